"""Replays on a GPU what can be replayed and compares everything with the CPU: its own command, since CI has no GPU.

    python tests/replayer/on_device/gpu/run.py -o docs/results/replay-gpu.md

Every trace of data/, every fault of the lab on an engine that shows it, recordings in segments, traces bent in ways that
broken engines and recorders bend them, with and without the history checks, and with logs that hold nearly nothing. Exit code 1
where anything differs.
"""

import argparse
import datetime
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(ROOT / "tests" / "support"))
KV_HASHES = ("auto", "none", "partial", "all")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A set of traces to replay together; `name` also says how they come about: of data, of the lab, bent."""

    name: str
    sort: str
    checks: bool
    kv_hash: str = "auto"
    rows: int = 1 << 16


def cases(seeds: int) -> list[Case]:
    """List everything, the dear ones first."""
    from kvcanary.replayer.lab.faults import FAULTS

    data = ROOT / "data"
    files = [path for path in sorted(data.rglob("*.arrow")) if path.parent.name not in PAIRS]
    found = []
    for number, name in enumerate([*(str(path.relative_to(data)) for path in files), *sorted(PAIRS)]):
        found += [
            Case(name=name, sort="data", checks=True),
            Case(name=name, sort="data", checks=False, kv_hash=KV_HASHES[number % 4]),
            Case(name=name, sort="data", checks=False, rows=4),
        ]
    for seed in range(seeds):
        for number, (name, fault) in enumerate(FAULTS.items()):
            config = fault.configs[(number + seed) % len(fault.configs)]
            checks = bool((number + seed) % 2)
            found.append(Case(name=f"{name}/{config}/{seed}", sort="lab", checks=checks, rows=8 if seed else 1 << 16))
    for seed in range(seeds):
        for number, config in enumerate(("mha", "swa", "eagle_swa", "host", "overlap")):
            found.append(Case(name=f"{config}/{seed}", sort="segments", checks=bool((number + seed) % 2)))
    bendable = ["clean_fork_dedup_evict.arrow", "simulated/clean_swa.arrow", "simulated/clean_eagle.arrow"]
    for seed in range(12 * seeds):
        found.append(Case(name=f"{bendable[seed % 3]}/{seed}", sort="bent", checks=bool(seed % 2)))
    return found


PAIRS = {
    "clean_pd",
    "clean_pd_swa",
    "pd_abort_frees_during_transfer",
    "pd_kv_post_forward",
    "pd_transfer_wrong_stride",
}


def traces_of(case: Case, folder: Path) -> list[Path | list[Path]]:
    """Make a case's traces, or find them; segments come together, and then each but the first alone."""
    if case.sort == "segments":
        from kvcanary.replayer.lab.trial import Trial, run_trial
        from raw_traces import cut

        config, seed = case.name.split("/")
        (whole,) = run_trial(Trial(fault=None, config=config, seed=int(seed)), folder / "t.arrow").traces
        segments = cut(Path(whole), folder / "s.arrow", seed=int(seed), least=100, most=250)
        return [segments, *segments[1:]]
    if case.sort == "lab":
        from kvcanary.replayer.lab.faults import FAULTS
        from kvcanary.replayer.lab.trial import Trial, run_trial

        fault, config, seed = case.name.split("/")
        target = folder / "traces"
        from kvcanary.replayer.lab.configurations import CONFIGURATIONS

        target = target if CONFIGURATIONS[config].pair is not None else folder / "t.arrow"
        return list(run_trial(Trial(fault=FAULTS[fault], config=config, seed=int(seed)), target).traces)
    if case.sort == "bent":
        import numpy as np
        from raw_traces import bend, read_raw, write_raw

        name, seed = case.name.rsplit("/", 1)
        header, events = read_raw(ROOT / "data" / name)
        rng = np.random.default_rng(int(seed))
        return [write_raw(folder / "t.arrow", header, bend(events, header, rng))]
    if case.name in PAIRS:
        return sorted((ROOT / "data" / "simulated" / case.name).glob("*.arrow"))
    return [ROOT / "data" / case.name]


def run(case: Case, device: str) -> dict[str, object]:
    """Replay a case on the CPU and the device; what came of it."""
    from kvcanary.replayer.checks import CHECK_NAMES
    from kvcanary.replayer.executors.device import logs
    from kvcanary.replayer.run.settings import ReplaySettings
    from same import replay_both

    logs.FEWEST_ROWS = logs.MOST_ROWS = case.rows
    row: dict[str, object] = {"case": case, "error": ""}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            traces = traces_of(case, Path(folder))
            settings = ReplaySettings(kv_hash=case.kv_hash, checks=CHECK_NAMES if case.checks else ())
            both = replay_both(traces, Path(folder) / "reports", device, settings)
        except Exception as error:  # noqa: BLE001 - it is told of, whatever it is
            if "needs every byte of a slot" in str(error) or "holds no KV bytes" in str(error):
                row["error"] = "skipped"
            else:
                row["error"] = "".join(traceback.format_exception(error)[-3:])
        else:
            row["forwards"] = sum(ours.forwards for ours, _ in both)
            row["violations"] = sum(ours.violations for ours, _ in both)
            row["findings"] = sum(ours.findings for ours, _ in both)
    row["seconds"] = time.perf_counter() - started
    return row


def _work(asked: tuple[Case, str]) -> dict[str, object]:
    return run(*asked)


def main() -> int:
    """Run all cases side by side, print them, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--most-seconds", type=float, default=1e9, help="stop here and say how much was left")
    parser.add_argument("--only", default="", help="cases with this in their name or sort")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    listed = [case for case in cases(options.seeds) if options.only in f"{case.sort} {case.name}"]
    started = time.perf_counter()
    rows: list[dict[str, object]] = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for row in pool.imap_unordered(_work, [(case, options.device) for case in listed]):
            rows.append(row)
            if row["error"] and row["error"] != "skipped":
                print(row["case"], row["error"], flush=True)
            if time.perf_counter() - started > options.most_seconds:
                pool.terminate()
                break
    text = report(rows, len(listed), options, time.perf_counter() - started)
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return 1 if any(row["error"] not in ("", "skipped") for row in rows) or len(rows) < len(listed) else 0


def report(rows: list[dict[str, object]], asked: int, options: argparse.Namespace, seconds: float) -> str:
    """Return the page that says what was compared, and on what."""
    import torch
    import triton

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "Triton's interpreter"
    done = [row for row in rows if not row["error"]]
    failed = [row for row in rows if row["error"] not in ("", "skipped")]
    total: dict[str, Counter[str]] = {}
    for row in done:
        counts = total.setdefault(row["case"].sort, Counter())  # type: ignore[attr-defined]  # a Case
        counts["cases"] += 1
        counts["with rows"] += bool(row["violations"])
        for name in ("forwards", "violations", "findings"):
            counts[name] += int(row[name])  # type: ignore[call-overload]  # a number
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    command = f"`python tests/replayer/on_device/gpu/run.py --seeds {options.seeds}`"
    left_out = len(rows) - len(done) - len(failed)
    lines = [
        "# Replay on a GPU gives what the CPU gives",
        "",
        f"{where}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}; {versions}; {command}, {seconds:.0f} s.",
        "",
        "Each case is replayed stepwise on the CPU and on the GPU. violations.parquet, findings.parquet and",
        "swa_divergence.parquet must be equal in every row and their order, and all of the summary but how long it took.",
        "",
        f"**{len(done)} of {asked} cases equal, {len(failed)} differ**; {left_out} left out, whose traces hold too few bytes",
        "for `--kv-hash all`, or none.",
        "",
        "| traces | cases | with violations | forwards | violations | findings |",
        "|---|---|---|---|---|---|",
    ]
    names = {
        "data": "all of data/",
        "lab": "every fault of the lab",
        "bent": "bent by chance",
        "segments": "in segments",
    }
    for sort, counts in total.items():
        figures = [counts[name] for name in ("cases", "with rows", "forwards", "violations", "findings")]
        lines.append(f"| {names[sort]} | {' | '.join(f'{figure:,}' for figure in figures)} |")
    for row in failed:
        lines += ["", f"{row['case']}", "", "```", str(row["error"]).strip(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
