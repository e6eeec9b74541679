"""Runs a prefill and a decode engine of SGLang's together, recorded, and replays both traces as one.

    python tests/conformance/sglang/pairs.py                  # all runs, and docs/results/conformance-sglang-pairs.md
    python tests/conformance/sglang/pairs.py --only flip --seeds 1 --no-write

Exit status 1 where a run is not as expected.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Side = tuple[Path, dict[str, Any]]  # a trace, and what its replay says
DOCUMENT = HERE.parents[2] / "docs" / "results" / "conformance-sglang-pairs.md"
WINDOW = 16  # of the hybrid model

# fault -> verdicts of prefill and decode side, what is found on each, and what it is
FAULTS = {
    "none": ("clean", "clean", set(), set(), "no fault"),
    "slow": ("clean", "clean", set(), set(), "no fault: a transfer takes long"),
    "flip": ("clean", "corrupt", set(), {"transfer_differs"}, "a bit is flipped on the way"),
    "skip": ("clean", "corrupt", set(), {"transfer_differs"}, "a page is not sent, and said to be"),
    "late": ("clean", "corrupt", set(), {"transfer_differs"}, "pages land after the transfer was said to have ended"),
    "damaged": (
        *("corrupt", "corrupt", {"transfer_source_damaged"}, {"transfer_source_damaged"}),
        "a bit of the prefill side's KV is flipped between the forward and the transfer",
    ),
    "early_free": ("corrupt", "clean", {"freed_during_transfer"}, set(), "a page is given back while it is being sent"),
    "fail": ("clean", "clean", set(), set(), "a transfer fails, and the engine aborts the request; nothing is corrupt"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--keep", type=Path, help="keep logs and traces in this folder")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a run")
    parser.add_argument("--no-write", action="store_true", help=f"leave {DOCUMENT.name} as it is")
    return parser.parse_args()


def main() -> int:
    from engine import ENVIRONMENT

    # The canary's stand-ins are for an engine that has its canary on.
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "SGLANG_STANDIN_CANARY"}
    if any(os.environ.get(name) != value for name, value in environment.items()):  # read at the interpreter's start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    from engine import import_engine
    from pair_engine import import_backend, run_pair

    args = arguments()
    runs = [run for run in matrix(args.seeds) if args.only in run.name]
    folder = args.keep or Path(tempfile.mkdtemp(prefix="conformance-sglang-pairs-"))
    folder.mkdir(parents=True, exist_ok=True)
    if runs:
        import_engine()
        import_backend()
    results = []
    for number, run in enumerate(runs, 1):
        started = time.monotonic()
        place = folder / run.name
        shutil.rmtree(place, ignore_errors=True)
        statuses = run_pair(run, place, args.timeout)
        if run.fault == "none" and run.seed == 1:
            run_pair(run, place / "off", args.timeout, recorded=False)
        result = judge(run, place, statuses)
        results.append((run, result))
        print(
            f"[{number}/{len(runs)}] {run.name}: {'DIFFERS' if result['wrong'] else 'as expected'}   "
            f"{result['verdicts']}, {result['sent']} sent, {result['received']} received, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
        for wrong in result["wrong"][:5]:
            print(f"    {wrong}", flush=True)
    if runs and not args.no_write:
        DOCUMENT.write_text(document(results, whole=len(runs) == len(matrix(2))))
    if not args.keep:
        shutil.rmtree(folder)
    return int(any(result["wrong"] for _, result in results))


def matrix(seeds: int) -> list[Any]:
    """Return the clean runs of each model, page size and seed, and each fault with each model, page sizes taking turns."""
    from pair_engine import Pair

    models = ("llama", "mellum_hybrid")
    runs = [
        Pair(model=model, page_size=page_size, seed=seed, overlap=seed % 2 == 0, cached=page_size == 4)
        for model in models
        for page_size in (1, 4)
        for seed in range(1, seeds + 1)
    ]
    runs += [Pair(model=model, page_size=4, fault=fault, ranks=2) for model in models for fault in ("none", "flip")]
    for number, fault in enumerate(fault for fault in FAULTS if fault != "none"):
        runs += [
            Pair(model=model, page_size=(1, 4)[(number + turn) % 2], fault=fault, overlap=turn == 1)
            for turn, model in enumerate(models)
        ]
    return runs


def judge(run: Any, folder: Path, statuses: dict[str, int]) -> dict[str, Any]:
    """Replay a run's two traces as one, and say what is not as it should be."""
    wrong: list[str] = []
    result: dict[str, Any] = {
        "verdicts": "",
        "sent": 0,
        "received": 0,
        "failed": 0,
        "judged": 0,
        "findings": "",
        "wrong": wrong,
    }
    for role, status in statuses.items():
        if status != 0:
            log = (folder / role / "log").read_text(errors="replace")
            wrong.append(f"the {role} engine ended with {status}: {log.strip()[-600:]}")
    if wrong:
        return result
    outputs = {role: json.loads((folder / role / "outputs.json").read_text()) for role in statuses}
    wrong += wrong_outputs(run, folder, outputs)
    traces = sorted((folder / "traces").glob("*.arrow"))
    done = subprocess.run(
        [Path(sys.executable).with_name("kvcanary-replay"), "--no-report", "--json", *traces],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1, 125):
        wrong.append(f"the replay ended with {done.returncode}: {done.stderr.strip()[-600:]}")
        return result
    sides = [(trace, side) for side in json.loads(done.stdout) for trace in traces if trace.name in side["trace"]]
    ranks = [[(trace, side) for trace, side in sides if f"-tp{rank}-" in trace.name] for rank in range(run.ranks)]
    if len(traces) != 2 * run.ranks or {len(rank) for rank in ranks} != {2}:
        wrong.append(f"{len(traces)} traces, expected one of each rank of each side")
        return result
    for rank in ranks:
        decode, prefill = sorted(rank, key=lambda one: "-prefill-" in one[0].name)
        wrong += wrong_rank(run, outputs, prefill, decode, result)
    return result


def wrong_rank(
    run: Any, outputs: dict[str, list[Any]], prefill: Side, decode: Side, result: dict[str, Any]
) -> list[str]:
    """Return what is wrong with what a rank of both sides recorded; note it in `result`."""
    wrong = []
    both = [side for _, side in (prefill, decode)]
    expected = FAULTS[run.fault]
    result["verdicts"] = ", ".join(side["verdict"] for side in both)
    if tuple(side["verdict"] for side in both) != expected[:2]:
        wrong.append(f"the replay says {result['verdicts']}, expected {', '.join(expected[:2])}")
    if doubts := both[0]["doubts"] + both[1]["doubts"]:
        return [*wrong, f"not whole: {doubts[:3]}"]
    found = [{kind for kind, count in side["findings_by_kind"].items() if count} for side in both]
    result["findings"] = "; ".join(", ".join(sorted(kinds)) or "none" for kinds in found)
    # The prefix cache takes only whole pages: the engine gives the one that is not full back, once more.
    again = {"slot_freed_twice"} if run.fault == "early_free" and run.page_size > 1 else set()
    if found != [expected[2] | again, expected[3]]:
        wrong.append(f"found {result['findings']}, expected {expected[2] | again or 'none'}; {expected[3] or 'none'}")
    result["judged"] += both[1]["verified"]
    return wrong + wrong_transfers(run, [prefill[0], decode[0]], outputs, both[1], result)


def wrong_outputs(run: Any, folder: Path, outputs: dict[str, list[Any]]) -> list[str]:
    """Return what is wrong with the answers: as many as asked for, the first token from the prefill side."""
    from pair_engine import NEW_TOKENS, make_prompts

    wrong = []
    if run.fault == "fail":
        failed = [[isinstance(answer, str) for answer in answers] for answers in outputs.values()]
        return [] if any(failed[0]) and failed[0] == failed[1] else [f"requests that failed: {failed}"]
    for number in range(len(make_prompts(run.seed))):
        first, answer = (outputs[role][number] for role in ("prefill", "decode"))
        if isinstance(first, str) or isinstance(answer, str):
            wrong.append(f"request {number} failed: {first}; {answer}")
        elif len(answer) != NEW_TOKENS or first != answer[:1]:
            wrong.append(f"request {number} was answered {answer} after {first}")
    off = folder / "off" / "decode" / "outputs.json"
    if off.parent.exists() and (not off.exists() or json.loads(off.read_text()) != outputs["decode"]):
        wrong.append("the engines without a recorder answered otherwise")
    if run.fault != "none" and "\ninjected " not in (folder / "prefill" / "log").read_text(errors="replace"):
        wrong.append("nothing was injected")
    return wrong


def wrong_transfers(
    run: Any, traces: list[Path], outputs: dict[str, list[Any]], decode: dict[str, Any], result: dict[str, Any]
) -> list[str]:
    """Return what is wrong with the transfers: each told on both sides, joined, and each slot of them judged."""
    from kvcanary.recorder.trace.reader import read_trace

    wrong = []
    told = [
        (event.scalar("mode"), event.scalar("status"), event.scalar("room"), event.ints("prefix_lens").tolist())
        for trace in traces
        for event in read_trace(trace)
        if event.kind == "transfer"
    ]
    groups = 2 if run.model == "mellum_hybrid" else 1
    answered = [not isinstance(answer, str) for answer in outputs["decode"]]
    count = {
        (side, status): sum(one[:2] == (side, status) and one[2] >= 0 for one in told)
        for side in ("send", "receive")
        for status in ("start", "end", "failed")
    }
    result["sent"] += count["send", "end"]
    result["received"] += count["receive", "end"]
    result["failed"] += count["send", "failed"] + count["receive", "failed"]
    for side in ("send", "receive"):
        ended, failed = groups * sum(answered), groups * answered.count(False)
        if (count[side, "start"], count[side, "end"]) != (ended + failed, ended):
            wrong.append(f"{side}: {count}, expected {ended} that ended and {failed} that failed")
        if failed and not count[side, "failed"]:
            wrong.append(f"{side}: no transfer failed")
    if decode["transfers_unmatched"]:
        wrong.append(f"{decode['transfers_unmatched']} transfers came from nowhere")
    if run.cached and not any(room >= 0 and first and first[0] for _, _, room, first in told):
        wrong.append("no transfer began behind a prefix that the decode side had")
    if all(answered):
        judged, left_out = slots_to_judge(run, groups)
        if (decode["verified"], decode["unknown_entries"]) != (judged, left_out):
            wrong.append(
                f"{decode['verified']} slots judged and {decode['unknown_entries']} left out on the decode side, "
                f"expected {judged} and {left_out}"
            )
    return wrong


def slots_to_judge(run: Any, groups: int) -> tuple[int, int]:
    """Return how many slots all decode forwards read, halves and launches counted, and how many of them are left out.

    Those of the health check's prompt are: nobody has sent it. With overlap there is one forward more a request.
    """
    from pair_engine import HEALTH_CHECK, NEW_TOKENS, make_prompts

    forwards = NEW_TOKENS - 1 + run.overlap
    read = unknown = 0
    for group in range(groups):
        window = WINDOW if group else 1 << 30
        for length in (HEALTH_CHECK, *map(len, make_prompts(run.seed))):
            read += sum(min(cached, window - 1) for cached in range(length, length + forwards))
        for cached in range(HEALTH_CHECK, HEALTH_CHECK + forwards):
            unknown += max(0, HEALTH_CHECK - max(0, cached + 1 - window))
    return 4 * (read - unknown), unknown


def document(results: list[tuple[Any, dict[str, Any]]], *, whole: bool) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("sglang", "torch", "kvcanary"))
    good = sum(not result["wrong"] for _, result in results)
    lines = [
        "# SGLang: prefill and decode engines recorded together",
        "",
        "Made by `make conformance-sglang`; do not edit. Each run is a prefill and a decode engine on the CPU, with SGLang's",
        "own queues, event loops and mooncake backend; in the place of Mooncake's transfer engine is one that writes over a",
        "local socket (`tests/conformance/sglang/standin/transfer`). Each side records by the plugin alone; both get a health",
        "check, to which nothing is sent, and six requests, some with a shared prefix. `kvcanary-replay PREFILL DECODE` must",
        "find what was injected and nothing else, join each transfer by its room, and judge each slot that a decode forward",
        "reads, but the health check's. `cached`: the decode side has a prefix cache of its own; `tensor2`: both sides have two",
        "ranks, figures are of both. Clean runs of the first seed ran without the recorder, too: same tokens.",
        "",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {versions}, Python {platform.python_version()}, {platform.machine()}.",
        "" if whole else "\n**Not all runs.**\n",
        f"**{good} of {len(results)} runs as expected.**",
        "",
        "| fault | |",
        "|---|---|",
        *(f"| {fault} | {what} |" for fault, (*_, what) in FAULTS.items()),
        "",
        "| run | sent | received | failed | slots judged (decode) | verdicts | found: prefill; decode | |",
        "|---|--:|--:|--:|--:|---|---|---|",
    ]
    for run, result in results:
        said = "**not as expected**" if result["wrong"] else "as expected"
        cells = [f"{result[name]:,}" for name in ("sent", "received", "failed", "judged")]
        lines.append(f"| {run.name} | {' | '.join(cells)} | {result['verdicts']} | {result['findings']} | {said} |")
    for run, result in results:
        if result["wrong"]:
            lines += ["", f"**{run.name}**", "", *(f"- {' '.join(text.split())[:400]}" for text in result["wrong"])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
