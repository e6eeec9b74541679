"""Replay on a GPU beside the published canary's kernels, stepped over the same forwards there."""

import argparse
import os
from pathlib import Path
from typing import Any

from making_traces import DifferError, make_trace, replayed, tell
from replay_children import ROOT, child

DAMAGED = ROOT / "data" / "table_swap.arrow"
TARGETS = {"stepwise": 5.0, "interval": 50.0}
SEGMENTS = 16
LEAST_SEGMENT_BYTES = 16 << 20
BYTES_OF_ALL = 8_200_000_000  # about what the whole workload's trace takes


def make_segments(workload: Path, work: Path, fraction: float) -> list[Path]:
    """Return the recording of a fraction of the workload in some `SEGMENTS` files, one where it is small."""
    size = int(max(LEAST_SEGMENT_BYTES, BYTES_OF_ALL * fraction / SEGMENTS))
    return make_trace(workload, work, fraction, "--segment-bytes", str(size))


def on_device(recordings: dict[float, list[Path]], args: argparse.Namespace) -> dict[str, Any]:
    """Replay recordings on a GPU beside the published kernels; all figures, and what missed its target."""
    damaged = child("published", {"trace": [str(DAMAGED)], "device": args.device}, 0)
    tell(f"published kernels on {DAMAGED.name}: {damaged['rows']:,} rows, same: {damaged['same_rows']}")
    if not damaged["same_rows"] or not damaged["rows"]:
        raise DifferError(f"{DAMAGED}: ours and the published kernels' rows differ")
    rows = [_measured(fraction, recording, args) for fraction, recording in recordings.items()]
    last = rows[-1]
    times = {"stepwise": _times(last, "stepwise")}
    times["interval"] = max(_times(last, name) for name in ("interval", *shared_by()))
    missed = [f"{name} {times[name]:.1f} times the published kernels' speed, target {target:.0f}"
              for name, target in TARGETS.items() if times[name] < target]  # fmt: skip
    note = (
        f"Rows compared first, on a damaged trace too ({damaged['rows']:,} rows of table_swap.arrow). The interval executor "
        "runs on this machine's CPU. Where workers share a recording in segments, seconds are from the first one's first "
        "event to the last one's last, keyframes included; what it takes to start them comes on top, in brackets: importing "
        "libraries, which, like CUDA's start and the compilation of kernels, counts in no other column."
    )
    return {
        "rows": rows,
        "gpu": last["gpu"],
        "damaged": damaged,
        "missed": missed,
        "lines": _table(rows),
        "notes": [note],
    }


def _measured(fraction: float, recording: list[Path], args: argparse.Namespace) -> dict[str, Any]:
    """Measure one recording each way."""
    row: dict[str, Any] = {"fraction": fraction}
    row |= child("published", {"trace": [str(path) for path in recording], "device": args.device}, 0)
    tell(f"{fraction:.1%}: published kernels {row['seconds']:.2f} s, {row['state_seconds']:.2f} s without launches")
    if not row["same_rows"]:
        raise DifferError(f"{fraction:.1%}: ours and the published kernels' rows differ")
    row["interval"] = replayed(recording, "interval", args)
    # Stepwise without the history checks, which the CPU does and the published kernels have no like of.
    row["stepwise"] = replayed(recording, "stepwise", args, device=args.device, checks=False)
    if row["stepwise"]["digest"] != row["interval"]["digest"]:
        raise DifferError(f"{fraction:.1%}: interval and stepwise replay differ")
    segments = make_segments(args.workload, args.work, fraction)
    if len(segments) > 1:
        one = replayed(segments, "interval", args)
        if any(one[name] != row["interval"][name] for name in ("verdict", "tokens", "forwards", "verified")):
            raise DifferError(f"{fraction:.1%}: a recording of one file and one in segments differ")
        for name, jobs in shared_by().items():
            row[name] = replayed(segments, "interval", args, kind="stretches", jobs=jobs)
            tell(f"{fraction:.1%}: {row[name]['workers']} workers, with their start {row[name]['whole']:.2f} s")
            if row[name]["digest"] != one["digest"]:
                raise DifferError(f"{fraction:.1%}: one process and {jobs} differ")
    tell(f"measured {fraction:.1%}")
    return row


def shared_by() -> dict[str, int]:
    """Return with how many workers a recording in segments is replayed, by the names of what is found."""
    cores = len(os.sched_getaffinity(0))
    return {f"{jobs} workers": jobs for jobs in sorted({min(jobs, cores) for jobs in (4, 8, SEGMENTS)})}


def _times(row: dict[str, Any], name: str) -> float:
    return row["seconds"] / row[name]["seconds"] if name in row else 0.0


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = [
        *("workload", "forwards", "entries", "published kernels, s", "of it without launches, s"),
        *("stepwise on the GPU, s", "times", "interval, one process, s", "times"),
    ]
    for jobs in shared_by().values():
        columns += [f"interval, at most {jobs} workers, s (with their start)", "times"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = [f"{row['fraction']:.1%}", f"{row['interval']['forwards']:,}", f"{row['entries']:,}"]
        cells += [f"{row['seconds']:.2f}", f"{row['state_seconds']:.2f}"]
        for name in ("stepwise", "interval"):
            cells += [f"{row[name]['seconds']:.2f}", f"{_times(row, name):.1f}"]
        for shared in shared_by():
            found = row.get(shared)
            cells += (
                [f"{found['seconds']:.2f} ({found['whole']:.2f})", f"{_times(row, shared):.1f}"] if found else ["", ""]
            )
        lines.append(f"| {' | '.join(cells)} |")
    return lines
