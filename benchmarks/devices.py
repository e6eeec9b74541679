"""Measure replays spread over GPUs: several recordings on one GPU, then the same ones on all.

    python benchmarks/devices.py mooncake_0.1.arrow --devices cuda:0,cuda:1 [--each 2] [--runs 3] [--markdown]

Each GPU gets --each links to the trace (benchmarks/replay.py makes such traces). Timed are whole processes of
`kvcanary-replay --devices ...`, stepwise, without the history checks, which are the CPU's work; in turn, medians. What
they print must be the same, or no ratio is printed and the exit status is 2; it is 1 where the speed-up is below
--target times the number of GPUs. --markdown writes the section of docs/results/performance.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from performance_page import machine, today, write_section
from programs import program

TARGET = 0.8


def main() -> int:
    """Time both, print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--each", type=int, default=2, help="recordings for each GPU")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--target", type=float, default=TARGET, help="speed-up by GPU")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    devices = args.devices.split(",")
    choices = (devices[0], args.devices)
    seconds: dict[str, list[float]] = {choice: [] for choice in choices}
    with tempfile.TemporaryDirectory(dir=args.trace.parent) as folder:
        links = [Path(folder) / f"{number}.arrow" for number in range(args.each * len(devices))]
        for link in links:
            os.link(args.trace, link)
        replayed(links[:1], choices[0])  # compiles
        for _ in range(args.runs):
            told = []
            for choice in choices:
                begin = time.perf_counter()
                told.append(replayed(links, choice))
                seconds[choice].append(time.perf_counter() - begin)
                print(f"{choice}: {seconds[choice][-1]:.2f} s", file=sys.stderr, flush=True)
            if told[0] != told[1]:
                print(f"one GPU and all give different verdicts, no ratio: {told}", file=sys.stderr)
                return 2
    one, all_of_them = (statistics.median(seconds[choice]) for choice in choices)
    times = one / all_of_them
    lines = [
        command_line(args),
        "",
        "| recordings | one GPU, s | all GPUs, s | times as fast |",
        "|---|---|---|---|",
        f"| {len(links)} of {args.trace.name} | {one:.1f} | {all_of_them:.1f} | {times:.2f} |",
    ]
    print("\n".join(lines))
    if args.markdown:
        write_section("replay-devices", "\n".join(lines))
    return int(times < args.target * len(devices))


def command_line(args: argparse.Namespace) -> str:
    """Return the sentence that says how the section was made."""
    options = f"--devices {args.devices} --each {args.each} --runs {args.runs}"
    return f"`python benchmarks/devices.py {args.trace.name} {options} --markdown`, {today()}, {machine()}, {gpus()}."


def replayed(traces: list[Path], devices: str) -> list[str]:
    """Replay traces in one process and return what it printed, a line a trace, in any order."""
    command = [*program("kvcanary-replay"), "--quiet", "--no-report", "--checks", "none", "--devices", devices]
    done = subprocess.run([*command, *map(str, traces)], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return sorted(done.stdout.splitlines())


def gpus() -> str:
    """Return how many GPUs there are, and what they are called."""
    import torch

    names = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    return f"{torch.cuda.device_count()} GPUs: {', '.join(sorted(names))}"


if __name__ == "__main__":
    sys.exit(main())
