"""Measure what sliding windows cost a replay: the same requests through a plain engine and one with sliding layers.

    python benchmarks/replay_windows.py --work DIR [--runs N] [--json]

Two workloads of some 650,000 tokens: short prompts with long answers, which is nearly all decode, and long prompts with
short answers. Each is simulated with full layers alone and with full and sliding layers (a window of 1,024 behind a
full-to-SWA table), and replayed with every check in processes of its own, after one replay that
has the compiled pass made. The seconds are those of the replay, medians of --runs; the exit status is 1 if a sliding trace
takes more than twice as long as the plain one, and 2 if two replays of one trace differ.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from making_traces import DifferError, replayed, tell
from performance_page import machine, today
from programs import program

TARGET = 2.0
WORKLOADS = {
    "decode": ("--requests", "2200", "--prompt-tokens", "40", "--output-tokens", "280", "--max-running", "256"),
    "long prompts": ("--requests", "180", "--prompt-tokens", "3600", "--output-tokens", "60", "--max-running", "64"),
}
ENGINE = ("--pool-tokens", "524288", "--chunk-tokens", "8192", "--window", "1024")
SHAPES = {"plain": "mha", "sliding": "swa"}


def main() -> int:
    """Make the traces, replay them, print the ratios; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder in which the traces are kept")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2, help="that a replay may use")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    once = argparse.Namespace(**{**vars(args), "runs": 1})
    found: dict[str, Any] = {"machine": machine(), "date": today()}
    try:
        for workload in WORKLOADS:
            traces = {name: simulated(args.work, workload, shape) for name, shape in SHAPES.items()}
            replayed([traces["sliding"]], "interval", once)
            figures = {name: replayed([trace], "interval", args) for name, trace in traces.items()}
            found[workload] = {
                **{name: {"tokens": one["tokens"], "seconds": one["seconds"]} for name, one in figures.items()},
                "ratio": figures["sliding"]["seconds"] / figures["plain"]["seconds"],
            }
    except DifferError as error:
        print(f"{error}: no ratio", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for workload in WORKLOADS:
            row = found[workload]
            shown = ", ".join(
                f"{name} {row[name]['tokens']:,} tokens in {row[name]['seconds']:.2f} s" for name in SHAPES
            )
            print(f"{workload}: {shown}: {row['ratio']:.2f} times (target {TARGET:.0f})")
    return int(any(found[workload]["ratio"] > TARGET for workload in WORKLOADS))


def simulated(work: Path, workload: str, shape: str) -> Path:
    """Return the trace of a workload on an engine of this shape, made now if it is not there yet."""
    trace = work / f"{workload.replace(' ', '_')}_{shape}.arrow"
    if not trace.exists():
        tell(f"recording {trace.name}")
        made = trace.with_suffix(".part")
        command = [*program("kvcanary"), "simulate", "-o", str(made), "--shape", shape, *WORKLOADS[workload], *ENGINE]
        subprocess.run([*command, "--force", "--json"], stdout=subprocess.DEVNULL, check=True)
        made.rename(trace)
    return trace


if __name__ == "__main__":
    sys.exit(main())
