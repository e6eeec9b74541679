"""The recordings that benchmarks/replay.py replays, and one way to time a replay."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from programs import program
from replay_children import child

ENGINE = ("--max-running", "256", "--chunk-tokens", "8192", "--pool-tokens", "1048576")


class DifferError(Exception):
    """Two replays that must give the same did not; no ratio may be printed."""


def make_trace(workload: Path, work: Path, fraction: float, *options: str) -> list[Path]:
    """Return the recording of a fraction of the workload, its file or segments, made now where it is not there yet."""
    name = "_".join(["mooncake", f"{fraction:g}", *(option.strip("-") for option in options)])
    trace, done = work / f"{name}.arrow", work / f"{name}.json"
    if not done.exists():
        tell(f"recording {trace.name}")
        command = [*program("kvcanary"), "simulate", "-o", str(trace), "--workload", str(workload)]
        command += ["--fraction", str(fraction), *ENGINE, *options, "--json", "--force"]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)} failed with {ran.returncode}")
        told = json.loads(ran.stdout)
        if told["dropped_events"] or told["counters"]["refused"]:
            raise SystemExit(f"{trace}: {told['dropped_events']} events dropped, {told['counters']['refused']} refused")
        done.write_text(ran.stdout)
    return sorted(work.glob(f"{name}.[0-9]*.arrow")) or [trace]


def replayed(
    trace: list[Path],
    executor: str,
    args: argparse.Namespace,
    *,
    device: str = "cpu",
    checks: bool = True,
    kind: str = "replay",
    jobs: int = 0,
) -> dict[str, Any]:
    """Replay a recording in processes of its own; medians, and the largest peak.

    `kind` is the child of `replay_children` that does it: on the CPU on `args.cores` cores, several workers on all.
    """
    todo = {"trace": [str(path) for path in trace], "executor": executor, "device": device, "checks": checks}
    todo["jobs"] = jobs
    cores = args.cores if device == "cpu" and kind == "replay" else 0
    found = [child(kind, todo, cores) for _ in range(args.runs)]
    name = f"{trace[0].name}{f' and {len(trace) - 1} more' if len(trace) > 1 else ''}"
    if len({one["digest"] for one in found}) > 1:
        raise DifferError(f"{name}: two {executor} replays differ")
    timed = ("seconds", "cpu_seconds", "whole")
    figures = {what: statistics.median(one[what] for one in found) for what in timed if what in found[0]}
    peak = max(one["peak_bytes"] for one in found)
    shown = ", ".join(f"{what} {figure:.2f}" for what, figure in figures.items())
    tell(f"{name}: {kind}, {executor} on {device}: {shown}, {peak / 2**20:,.0f} MiB")
    return {**found[0], **figures, "peak_bytes": peak, "tokens_per_second": found[0]["tokens"] / figures["seconds"]}


def tell(text: str) -> None:
    """Say at once how far it has come, so that a run that is cut short has told what it found."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
