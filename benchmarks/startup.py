"""Measure the start: `--help`, and start to verdict on every trace in data/, as medians of whole processes.

    python benchmarks/startup.py [--runs 5] [--traces data/kv_flip.arrow ...] [--json] [--markdown]

A process is started as a user starts it, its output read through a pipe. The verdict is timed when its line has
arrived; where something was found the report's page is built after it, so the end is timed beside it. Incidents and
report are part of the verdict's time. All commands take turns, so that other work on the machine meets all alike, and
beside them stand rivals that do nothing but import what a replay on the CPU, or a tool on torch, cannot do without. A
warm-up run of each is not counted: it fills the kernel cache, the page cache and Python's cache of compiled modules
(PYTHONDONTWRITEBYTECODE is taken away, since an installed package has them).

The exit status is 1 where a median misses its target, 2 where a trace's verdict is not the one kept in tests/golden.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from performance_page import load, machine, today, write_section
from programs import program

ROOT = Path(__file__).parents[1]
TARGET_HELP_SECONDS = 0.15
TARGET_VERDICT_SECONDS = 1.5
VERDICTS = ("CLEAN", "CORRUPT", "INCONCLUSIVE")


@dataclass(slots=True, kw_only=True)
class Timed:
    """A command, its target in seconds (None for a rival), and what was measured."""

    name: str
    command: list[str]
    target: float | None = None
    expected: set[int] | None = None
    verdict: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median of what its target speaks of."""
        return statistics.median(self.verdict or self.end)


def main() -> int:
    """Run all commands in turn, print the medians; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each command, after one that is not counted")
    parser.add_argument("--traces", type=Path, nargs="+", help="these instead of all in data/")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="write the section of docs/results/performance.md")
    args = parser.parse_args()
    begin = load()
    with tempfile.TemporaryDirectory() as folder:
        commands = list_commands(args.traces or traces(), Path(folder))
        for number in range(args.runs + 1):
            for timed in commands:
                if not run(timed, counted=number > 0):
                    print(f"{timed.name}: not the verdict that was expected; no figures", file=sys.stderr)
                    return 2
    missed = [timed for timed in commands if timed.target is not None and timed.seconds > timed.target]
    if args.json:
        print(json.dumps(figures(commands, args.runs, begin), indent=2))
    else:
        print(table(commands))
        print("missed: " + ", ".join(timed.name for timed in missed) if missed else "every target is met")
    if args.markdown:
        write_section("startup", section(commands, args.runs, begin))
    return int(bool(missed))


def traces() -> list[Path]:
    """Return every trace in data/, a prefill and a decode side together as their folder."""
    found = sorted((ROOT / "data").rglob("*.arrow"))
    return sorted({path.parent if path.stem in ("prefill", "decode", "rank0", "rank1") else path for path in found})


def list_commands(found: list[Path], folder: Path) -> list[Timed]:
    """Return what is measured: helps, replays into `folder`, rivals."""
    replay = program("kvcanary-replay")
    python = sys.executable
    commands = [
        Timed(name="kvcanary --help", command=[*program("kvcanary"), "--help"], target=TARGET_HELP_SECONDS),
        Timed(name="kvcanary-replay --help", command=[*replay, "--help"], target=TARGET_HELP_SECONDS),
    ]
    for number, trace in enumerate(found):
        commands.append(
            Timed(
                name=str(trace.resolve().relative_to(ROOT)) if trace.resolve().is_relative_to(ROOT) else str(trace),
                command=[*replay, "--report", str(folder / str(number)), str(trace)],
                target=TARGET_VERDICT_SECONDS,
                expected={0} if "clean" in trace.name else {0, 1, 125},
            )
        )
    return [
        *commands,
        Timed(name="python -c pass", command=[python, "-c", "pass"]),
        Timed(name="import numpy, pyarrow, numba", command=[python, "-c", "import numpy, pyarrow, numba"]),
        Timed(name="import torch", command=[python, "-c", "import torch"]),
    ]


def run(timed: Timed, *, counted: bool) -> bool:
    """Run a command once; False where it did not do what it should."""
    begin = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(timed.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    verdict = None
    for line in process.stdout or ():
        if verdict is None and line.decode(errors="replace").startswith(VERDICTS):
            verdict = time.perf_counter() - begin
    code = process.wait()
    end = time.perf_counter() - begin
    if timed.expected is not None and (verdict is None or code not in timed.expected):
        return False
    if counted and (code == 0 or timed.expected is not None):  # without torch, its import is no rival
        timed.end.append(end)
        if verdict is not None:
            timed.verdict.append(verdict)
    return True


def figures(commands: list[Timed], runs: int, begin: float) -> dict[str, object]:
    """Return all of it as JSON."""
    rows = [
        {
            "name": timed.name,
            "target_seconds": timed.target,
            "verdict_seconds": statistics.median(timed.verdict) if timed.verdict else None,
            "end_seconds": statistics.median(timed.end),
            "least_seconds": min(timed.verdict or timed.end),
        }
        for timed in commands
        if timed.end
    ]
    return {"machine": machine(), "date": today(), "runs": runs, "load": [begin, load()], "rows": rows}


def table(commands: list[Timed]) -> str:
    """Return all of it for a terminal."""
    lines = [f"{'median of whole processes, s':52} {'target':>7} {'verdict':>8} {'end':>7} {'least':>7}"]
    for timed in commands:
        if timed.end:
            target = "" if timed.target is None else f"{timed.target:.2f}"
            verdict = f"{statistics.median(timed.verdict):.3f}" if timed.verdict else ""
            least = min(timed.verdict or timed.end)
            lines.append(f"{timed.name:52} {target:>7} {verdict:>8} {statistics.median(timed.end):7.3f} {least:7.3f}")
    return "\n".join(lines)


def section(commands: list[Timed], runs: int, begin: float) -> str:
    """Return the section of docs/results/performance.md: the helps, the slowest and the median trace, the rivals."""
    replays = sorted((timed for timed in commands if timed.verdict), key=lambda timed: timed.seconds)
    others = [timed for timed in commands if not timed.verdict and timed.end]
    where = f"{today()}, {machine()}; load average {begin:.1f} before, {load():.1f} after"
    lines = [
        f"`python benchmarks/startup.py --markdown`, {where}. Seconds, medians of {runs} whole processes, in turn.",
        "",
        "| | target | median | least |",
        "|---|---|---|---|",
    ]
    if replays:
        middle = replays[len(replays) // 2]
        chosen = (
            (f"start to verdict, median of {len(replays)} traces in data/", middle),
            ("slowest trace", replays[-1]),
        )
        for what, timed in chosen:
            lines.append(
                f"| {what} (`{timed.name}`) | {timed.target} | {timed.seconds:.2f} | {min(timed.verdict):.2f} |"
            )
    for timed in others:
        target = "" if timed.target is None else f"{timed.target}"
        lines.append(f"| `{timed.name}` | {target} | {timed.seconds:.2f} | {min(timed.end):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
