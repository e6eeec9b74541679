"""Runs SGLang on a GPU with its online canary and the recorder together, and compares what both found.

    python tests/conformance/sglang/gpu/run.py             # all runs side by side, and docs/results/conformance-sglang-gpu.md
    python tests/conformance/sglang/gpu/run.py --only eagle --no-write
    python tests/conformance/sglang/gpu/run.py --keep FOLDER --engines   # there: only the engines
    python tests/conformance/sglang/gpu/run.py --from FOLDER             # on any machine: compare, and write

It needs an NVIDIA GPU and an SGLang that runs on it, in whose environment kvcanary is installed. Exit status 1 where a
run differs. Rows are compared forward by forward; of EAGLE, whose draft has a canary and steps of its own, over the
whole run. Inside CUDA graphs the online canary checks no tokens, so there the expected token and the token's reason are
left out on both sides, and the table says so.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
DOCUMENT = HERE.parents[3] / "docs" / "results" / "conformance-sglang-gpu.md"

from compare import FIELDS, canonical, first_step, offline_rows  # noqa: E402
from online import TAGS, Row  # noqa: E402
from runs import RUNS, GpuRun  # noqa: E402
from side_by_side import Engine, run_side_by_side  # noqa: E402

VERIFY_TOKEN = 32
REPLAY = "import sys; from kvcanary.cli import replay_main; sys.argv[0] = 'kvcanary-replay'; replay_main()"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose name contains this, or one of these, joined by commas")
    parser.add_argument("--keep", type=Path, help="keep logs, traces and reports in this folder")
    parser.add_argument(
        "--engines", action="store_true", help="run the engines and keep what they leave, compare later"
    )
    parser.add_argument(
        "--from", dest="ran", type=Path, help="compare what engines left in this folder; no GPU is needed"
    )
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds for all engines")
    parser.add_argument("--no-write", action="store_true", help=f"leave {DOCUMENT.name} as it is")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if not args.ran and not any(
        point.name == "kvcanary" for point in importlib.metadata.entry_points(group="sglang.srt.plugins")
    ):
        print("kvcanary is not installed beside SGLang: pip install . in its environment", file=sys.stderr)
        return 2
    runs = [run for run in RUNS if any(part in run.name for part in args.only.split(","))]
    folder = args.ran or args.keep or Path(tempfile.mkdtemp(prefix="conformance-sglang-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not args.ran:
        run_engines(runs, folder, args.timeout)
        (folder / "machine").write_text(machine())
        if args.engines:
            return 0
    runs = [run for run in runs if (folder / run.name / "status").exists()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda run: result_of(run, folder / run.name), runs))
    outputs_are_equal(runs, results, folder)
    for run, result in zip(runs, results, strict=True):
        print(f"{run.name}: {said(result)}   {result['forwards']} forwards, {result['online_rows']} online rows")
        for difference in result["differences"][:5]:
            print(f"    {difference[:400]}")
    if not args.no_write:
        where = (folder / "machine").read_text()
        DOCUMENT.write_text(document(runs, results, where, whole=len(runs) == len(RUNS)))
    if not (args.keep or args.ran):
        shutil.rmtree(folder)
    return int(any(result["differences"] for result in results))


def run_engines(runs: list[GpuRun], folder: Path, timeout_s: float) -> None:
    """Run all engines side by side."""
    engines = []
    for number, run in enumerate(runs):
        place, env = folder / run.name, run.environment()
        if run.recorded:
            env["KVCANARY_TRACE"] = str(place / "traces")
        if run.canary:
            env["CONFORMANCE_RING"] = str(place / "ring")
        told = {**dataclasses.asdict(run), "port": 41_000 + 20 * number}
        engines.append(Engine(place=place, told=told, environment=env))
    run_side_by_side(engines, folder, timeout_s)


def result_of(run: GpuRun, place: Path) -> dict:
    """Replay a run's trace and compare it with the online canary's ring."""
    result: dict = {"forwards": 0, "injected": 0, "online_rows": 0, "offline_rows": 0, "verdict": "", "differences": []}
    result |= {"online_slots": 0, "offline_slots": 0, "offline_only": 0, "attention": ""}
    differences = result["differences"]
    status = (place / "status").read_text()
    log = (place / "log").read_text(errors="replace")
    if status != "0":
        differences.append(f"the engine ended with {status}, see its log: {log[-300:]}")
    if not run.recorded:
        return result
    traces = sorted((place / "traces").glob("*.arrow"))
    if len(traces) != 1:
        differences.append(f"{len(traces)} traces, expected one")
        return result
    report = place / "report"
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, "--kv-hash", "partial", "--report", str(report), str(traces[0])],
        capture_output=True,
        text=True,
        check=False,
    )
    if not (report / "summary.json").exists():
        differences.append(f"the replay ended with {done.returncode}: {done.stderr.strip()}")
        return result
    summary = json.loads((report / "summary.json").read_text())
    result |= {"forwards": summary["forwards"], "verdict": summary["verdict"]}
    result["injected"] = sum(
        "kv_canary perturb" in line and "slot=" in line and "skipped" not in line for line in log.splitlines()
    )
    if summary["doubts"] or not summary["complete"]:
        differences.append(f"the trace is not whole: {summary['doubts']}")
    if not result["injected"] and not run.faulty and summary["verdict"] != "clean":
        differences.append(f"no fault was injected, and the replay says {summary['verdict']}")
    if run.host_cache:
        from kvcanary.recorder.trace.reader import read_trace

        events = [event for event in read_trace(traces[0]) if event.kind == "kv_copy"]
        copies = Counter(event.scalar("note") for event in events)
        expected = ["offload", "load-back", *(["to storage", "from storage"] if run.host_cache == "storage" else [])]
        differences += [f"no copy is called {note}" for note in expected if not copies[note]]
        hashed = {"offload": ["copy_src_hash"], "load-back": ["copy_src_hash", "copy_dst_hash"]}
        without = [
            event.scalar("note")
            for event in events
            for name in hashed.get(event.scalar("note"), [])
            if len(event.ints("copy_count")) and not (len(event.ints(name)) and event.ints(name).all())
        ]
        differences += [
            f"{count} ends of a copy called {note} were not hashed" for note, count in Counter(without).items()
        ]
        if run.damage and not (result["injected"] and summary["findings_by_kind"].get("copy_differs")):
            differences.append(f"a copy was damaged {result['injected']} times, and the replay found nothing")
    if (
        run.adapters
        and run.damage
        and not (result["injected"] and summary["findings_by_kind"].get("computed_otherwise"))
    ):
        differences.append(f"adapters were mixed up {result['injected']} times, and the replay found nothing")
    if run.states_watched:
        unseen = forwards_without_states(traces[0])
        if unseen:
            differences.append(f"of {len(unseen)} forwards the states were not seen, first {unseen[:5]}")
        if run.faulty and not (result["injected"] and summary["findings_by_kind"].get("state_differs")):
            differences.append(f"a state was damaged {result['injected']} times, and the replay found nothing")
    if run.canary:
        compare(run, place, traces[0], summary, result)
    return result


def forwards_without_states(trace: Path) -> list[int]:
    """Return the forwards with requests of which nobody knows what states they read and wrote."""
    from kvcanary.recorder.state.recurrent import STEP
    from kvcanary.recorder.trace.reader import read_trace

    forwards = (
        event for event in read_trace(trace) if event.kind == "forward" and event.ints("req_pool_indices").any()
    )
    return [event.scalar("forward") for event in forwards if STEP not in event.ints("recurrent_op")]


def compare(run: GpuRun, place: Path, trace: Path, summary: dict, result: dict) -> None:
    differences = result["differences"]
    rings = [
        [json.loads(line) for line in ring.read_text().splitlines()]
        for ring in (place / "ring", place / "ring1")
        if ring.exists()
    ]
    online: dict[int, Counter[Row]] = {}
    looked_at = [0] * len(TAGS)
    first = first_step(trace) or 0
    for steps in rings:
        for step in steps:
            rows = [row for row in (seen(run, row) for row in step["rows"]) if row is not None]
            online.setdefault(step["step"] - first, Counter()).update(rows)
        before = [step["counters"] for step in steps if step["step"] < first]
        start = before[-1] if before else [0] * len(TAGS)
        looked_at = [n + end - begin for n, end, begin in zip(looked_at, steps[-1]["counters"], start, strict=True)]
    offline: dict[int, Counter[Row]] = {}
    for forward, rows in offline_rows(place / "report" / "violations.parquet", trace).items():
        for row, n in rows.items():
            both = seen(run, row)
            if both is None:
                result["offline_only"] += n
            else:
                offline.setdefault(forward, Counter())[both] += n
    if run.eagle:
        online, offline = ({0: sum(rows.values(), Counter())} for rows in (online, offline))
    result["online_rows"] = sum(rows.total() for rows in online.values())
    result["offline_rows"] = sum(rows.total() for rows in offline.values())
    for forward in sorted(set(online) | set(offline)):
        expected, came = (side.get(forward, Counter()) for side in (online, offline))
        if expected != came:
            only = [dict(list(side.items())[:2]) for side in (expected - came, came - expected)]
            differences.append(f"forward {forward}: online only {only[0]}, offline only {only[1]} ({FIELDS})")
    result["online_slots"] = sum(looked_at)
    result["offline_slots"] = sum(summary["slot_counters"].values())
    attention = {kind: n for kind, n in summary["findings_by_kind"].items() if n and kind.startswith("attention")}
    result["attention"] = ", ".join(f"{n} {kind}" for kind, n in attention.items())
    if run.faulty and not (result["online_rows"] + result["offline_only"] or attention):
        differences.append("something is wrong with this engine, and neither side found anything")
    differences += [
        f"{tag}: {n} slots looked at online, {summary['slot_counters'].get(tag, 0)} offline"
        for tag, n in zip(TAGS, looked_at, strict=True)
        if n != summary["slot_counters"].get(tag, 0)
    ]


def seen(run: GpuRun, row: list[int] | Row) -> Row | None:
    """Return a row as both sides can see it: without the token check where the online canary has none, None if it is all."""
    tag, slot, position, stored, expected, chain, aux, reasons = canonical(list(row))
    if not run.tokens_checked_online:
        expected, reasons = -1, reasons & ~VERIFY_TOKEN
        if not reasons:
            return None
    return (tag, slot, position, stored, expected, chain, aux, reasons)


def outputs_are_equal(runs: list[GpuRun], results: list[dict], folder: Path) -> None:
    """A recorded engine without faults generates what it generates without the recorder."""
    outputs = {}
    for run in runs:
        path = folder / run.name / "outputs.json"
        outputs[run.name] = json.loads(path.read_text()) if path.exists() else None
    for run, result in zip(runs, results, strict=True):
        own = run.name.replace("recorded", "off")
        # Of some no more than one engine runs without a recorder, whatever the others' graphs and pages.
        names = [own, *(own.replace(f"-{part}", "") for part in ("graph", "eager", "page16", "eager-plain"))]
        base = next((outputs[name] for name in names if name in outputs), None)
        if "recorded" in run.name and base is not None and outputs[run.name] != base:
            result["differences"].append("the recorded engine generated other tokens")


def said(result: dict) -> str:
    return "**differs**" if result["differences"] else "equal"


def machine() -> str:
    """Return when and on what the engines ran."""
    import torch

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("sglang", "torch", "triton"))
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {torch.cuda.get_device_name(0)}, {versions}."


def document(runs: list[GpuRun], results: list[dict], where: str, *, whole: bool) -> str:
    recorded = [(run, result) for run, result in zip(runs, results, strict=True) if run.recorded]
    beside = [(run, result) for run, result in recorded if run.canary]
    equal = sum(not result["differences"] for _, result in beside)
    injected, rows = (sum(result[name] for _, result in beside) for name in ("injected", "online_rows"))
    lines = [
        "# SGLang on a GPU: the replay against the online canary",
        "",
        "Made by `python tests/conformance/sglang/gpu/run.py` (the engines on a machine with a GPU, with `--keep FOLDER",
        "--engines`; the page from what they left, with `--from FOLDER`); do not edit. Each run is an SGLang engine with its",
        "own online canary (CUDA kernels, K and V), its fault injector and the recorder attached. Equal means: the replay of",
        "the trace finds the same violations in the same forward, as multisets of launch tag, slot, position, tokens, hashes",
        "and reasons, and each launch tag has looked at as many slots as online. EAGLE's draft has a canary and steps of its",
        "own; there the rows of the whole run are compared. Inside CUDA graphs the online canary compares no tokens (its",
        "valid token lengths stay 0); there the expected token and its reason are left out on both sides, and the column says",
        "so; rows that the replay has for the token alone are counted beside. Runs without the canary are held against the",
        "same engine without the recorder: the tokens must be the same.",
        "",
        "`revert-25015` and `revert-26329` are SGLang's own bugs, which its switch `SGLANG_DEBUG_REVERT_PR` brings back: an",
        "EAGLE draft whose positions are one off, and a chunked prefill whose draft gets the wrong last token, which shows in",
        "tokens alone. `inside-kv` flips a byte of a written slot after the canary's TAIL and before the forward returns;",
        "`inside-table` points a table cell to another slot as long as the forward takes; `inside-attention` overwrites a page",
        "index that the attention backend has prepared, `inside-attention-lens` lets it read one token less: of these the",
        "online canary sees nothing. In graphs, the draft's steps and what model and attention get are taken down in the graph.",
        "",
        where,
        "" if whole else "\n**Not all runs.**\n",
        f"**{equal} of {len(beside)} runs beside the canary equal**, {injected} faults, {rows} online rows.",
        "",
        "| run | forwards | faults | online rows | offline rows | slots online | slots offline | tokens compared | rows of the token alone, offline | attention, offline | verdict of the replay | |",
        "|---|--:|--:|--:|--:|--:|--:|---|--:|---|---|---|",
    ]
    for run, result in recorded:
        tokens = "" if not run.canary else "yes" if run.tokens_checked_online else "not in graphs"
        lines.append(
            f"| {run.name} | {result['forwards']} | {result['injected']} | {result['online_rows']} | "
            f"{result['offline_rows']} | {result['online_slots']} | {result['offline_slots']} | {tokens} | "
            f"{result['offline_only'] or ''} | {result['attention']} | {result['verdict']} | {said(result)} |"
        )
    for run, result in recorded:
        if result["differences"]:
            lines += [
                "",
                f"**{run.name}**",
                "",
                *(f"- {difference[:400]}" for difference in result["differences"][:10]),
            ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
