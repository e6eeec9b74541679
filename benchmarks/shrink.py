"""Shrink every trace in data/ that shows an incident: what is left of it, and how many replays that took.

    python benchmarks/shrink.py [--seconds 60] [--only NAME] [--resume LOG] [--write]
    python benchmarks/shrink.py --requests 10000 --seconds 600

--write puts the table into docs/results/shrink.md. --resume takes over the lines that this command has printed into a file, and
leaves out their traces; it may be given several times. --requests makes a trace of so many requests by the simulated engine, with a
fault put into it after three quarters of its forwards, and shrinks that. Exit status: 0 if each first incident was shrunk,
1 if not.
"""

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from kvcanary.analysis.shrink.shrink import NothingToShrinkError, ShrinkResult, shrink
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.errors import TraceError
from kvcanary.replayer.lab.effect import Clock, Probe
from kvcanary.replayer.lab.fault import Bench
from kvcanary.replayer.lab.faults import FAULTS

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "results" / "shrink.md"
_FEW: Final = 10
FOLDERS: Final = ("corpus", "simulated", "sglang", "vllm", ".")


def traces(only: str) -> list[Path]:
    """Return the traces in data/, clean ones too."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / "data" / folder).glob("*.arrow"))]
    return [path for path in found if only in path.stem and "clean" not in path.stem]


def row(result: ShrinkResult) -> str:
    """Return a line of the table."""
    before, after = result.before, result.after
    cells = [Path(result.trace).stem, result.incident["kind"]]
    names = ("events", "forwards", "requests", "tokens")
    cells += [f"{getattr(before, name):,} → {getattr(after, name):,}" for name in names]
    cells += [f"{before.bytes / 1000:,.0f} → {after.bytes / 1000:,.0f}", str(result.replays)]
    cells.append("time" if result.stopped else "")
    return "| " + " | ".join(cells) + " |"


def page(rows: dict[str, str], failed: list[str], seconds: float) -> str:
    """Return docs/results/shrink.md of the lines of traces, by name."""
    events = [line.split("|")[3].replace(",", "").split("→") for line in rows.values()]
    left = [int(after) / int(before) for before, after in events]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, under other load"
    lines = [
        "# Shrinking the traces in data/",
        "",
        "Made by",
        "",
        f"    python benchmarks/shrink.py --seconds {seconds:g} --write",
        "",
        (
            f"on {datetime.datetime.now(tz=datetime.UTC).date().isoformat()}, {machine}; do not edit. For each trace that shows an "
            "incident, the smallest one found that shows its first incident again, proven by a last replay under other names. "
            "A file has some 30 kB however little is in it: the format's columns."
        ),
        "",
        f"- {len(rows)} traces were run, at most {seconds:g} s each; {len(failed)} more could not be shrunk",
        f"- events left: {median(left):.1%} of them or less in half of the traces, {max(left):.0%} in the worst",
        f"- with ten events or less: {sum(int(after) <= _FEW for _, after in events)}",
        "",
        "| trace | kind | events | forwards | requests | tokens | kB | replays | ended by |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        *rows.values(),
        "",
        "ended by: `time` if the time was over before no single event could be left out any more.",
    ]
    if absent := [path.stem for path in traces("") if path.stem not in rows]:
        lines += ["", f"Not in the table, since they were not run or show no incident: {', '.join(absent)}."]
    if failed:
        lines += ["", "## Not shrunk", "", *(f"- {line}" for line in failed)]
    return "\n".join(lines) + "\n"


def large(requests: int, fault: str, folder: Path) -> Path:
    """Record a trace of many requests, with a fault of the lab."""
    path, clock = folder / f"{requests}-requests.arrow", Clock()
    workload = RandomWorkload(requests=requests, prompt_tokens=200, output_tokens=60)
    with SimulatedEngine(EngineConfig(page_size=16, num_pages=2000, max_running=64, rows=65), workload, path) as engine:
        probe = Probe(engine, clock)
        # A request takes some five forwards of a batch of this size, so this is some three quarters of the way.
        bench = Bench(fault, engine, probe, clock, np.random.default_rng(0), starts_at=requests * 7 // 2)
        FAULTS[fault].arm(bench)
        try:
            while engine.step():
                bench.stepped()
        except Exception as error:  # noqa: BLE001  # an engine with damaged books may fail in any way
            print(f"the engine broke down: {error}")
    if not bench.injections:
        raise SystemExit(f"the fault did not happen in {clock.now:,} forwards; take more requests")
    print(
        f"{path.stat().st_size / 1e6:,.0f} MB, {clock.now:,} forwards, fault in forward {bench.injected_at:,}",
        flush=True,
    )
    return path


def main() -> None:
    """Shrink, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", type=Path, action="append", default=[], metavar="LOG")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--fault", choices=FAULTS, default="free_too_early", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    printed = [line for log in args.resume for line in log.read_text().splitlines() if line.startswith("| ")]
    rows = {line.split("|")[1].strip(): line[: line.rindex("|") + 1] for line in printed}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        given = [large(args.requests, args.fault, Path(folder))] if args.requests else traces(args.only)
        for trace in given:
            if trace.stem in rows:
                continue
            began = time.process_time()
            try:
                result = shrink([trace], Path(folder) / f"small-{trace.name}", seconds=args.seconds)
            except NothingToShrinkError as error:
                if "shows no incident" not in str(error):
                    failed.append(f"{trace.stem}: {str(error).partition(': ')[2]}")
                print(error, flush=True)
            except TraceError as error:
                print(error, flush=True)
            else:
                rows[trace.stem] = row(result)
                used = time.process_time() - began
                print(rows[trace.stem], f"{result.seconds:.0f} s, {used:.0f} s of CPU", flush=True)
    if args.write:
        PAGE.write_text(page(dict(sorted(rows.items())), failed, args.seconds))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
