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
# About what the whole workload's trace takes, keyframes left out.
BYTES_OF_ALL = {"lz4": 8_200_000_000, "none": 11_700_000_000}
PLAIN = "workers, recorded without compression"


def make_segments(workload: Path, work: Path, fraction: float, compression: str = "lz4") -> list[Path]:
    """Return the recording of a fraction of the workload in some `SEGMENTS` files, one where it is small."""
    size = int(max(LEAST_SEGMENT_BYTES, BYTES_OF_ALL[compression] * fraction / SEGMENTS))
    options = ("--segment-bytes", str(size), "--compression", compression)
    return make_trace(workload, work, fraction, *options)


def on_device(recordings: dict[float, list[Path]], args: argparse.Namespace) -> dict[str, Any]:
    """Replay recordings on a GPU beside the published kernels; all figures, and what missed its target."""
    damaged = child("published", {"trace": [str(DAMAGED)], "device": args.device}, 0)
    tell(f"published kernels on {DAMAGED.name}: {damaged['rows']:,} rows, same: {damaged['same_rows']}")
    if not damaged["same_rows"] or not damaged["rows"]:
        raise DifferError(f"{DAMAGED}: ours and the published kernels' rows differ")
    rows = [_measured(fraction, recording, args) for fraction, recording in recordings.items()]
    last = rows[-1]
    times = {"stepwise": _times(last, "stepwise")}
    times["interval"] = max(_times(last, name) for name in ("interval", *shared_by(), *shared_without_compression()))
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
    for compression, shared in (("lz4", shared_by()), ("none", shared_without_compression())):
        segments = make_segments(args.workload, args.work, fraction, compression)
        if len(segments) > 1:
            row |= _shared(row, segments, shared, args)
    tell(f"measured {fraction:.1%}")
    return row


def _shared(
    row: dict[str, Any], segments: list[Path], shared: dict[str, int], args: argparse.Namespace
) -> dict[str, Any]:
    """Replay a recording in segments by one process, and by several; raise `DifferError` where they do not agree."""
    fraction = f"{row['fraction']:.1%}"
    one = replayed(segments, "interval", args)
    if any(one[name] != row["interval"][name] for name in ("verdict", "tokens", "forwards", "verified")):
        raise DifferError(f"{fraction}: a recording of one file and one in segments differ")
    found = {}
    for name, jobs in shared.items():
        found[name] = replayed(segments, "interval", args, kind="stretches", jobs=jobs)
        tell(f"{fraction}: {found[name]['workers']} {PLAIN if PLAIN in name else 'workers'}, "
             f"with their start {found[name]['whole']:.2f} s")  # fmt: skip
        if found[name]["digest"] != one["digest"]:
            raise DifferError(f"{fraction}: one process and {jobs} differ")
    return found


def shared_by() -> dict[str, int]:
    """Return with how many workers a recording in segments is replayed, by the names of what is found."""
    cores = len(os.sched_getaffinity(0))
    return {f"{jobs} workers": jobs for jobs in sorted({min(jobs, cores) for jobs in (4, 8, SEGMENTS)})}


def shared_without_compression() -> dict[str, int]:
    """Return the same for a recording without compression: with the most workers alone."""
    most = max(shared_by().values())
    return {f"{most} {PLAIN}": most}


def _times(row: dict[str, Any], name: str) -> float:
    return row["seconds"] / row[name]["seconds"] if name in row else 0.0


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = [
        *("workload", "forwards", "entries", "published kernels, s", "of it without launches, s"),
        *("stepwise on the GPU, s", "times", "interval, one process, s", "times"),
    ]
    shared = [*shared_by(), *shared_without_compression()]
    for name in shared:
        columns += [f"interval, at most {name}, s (with their start)", "times"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = [f"{row['fraction']:.1%}", f"{row['interval']['forwards']:,}", f"{row['entries']:,}"]
        cells += [f"{row['seconds']:.2f}", f"{row['state_seconds']:.2f}"]
        for name in ("stepwise", "interval"):
            cells += [f"{row[name]['seconds']:.2f}", f"{_times(row, name):.1f}"]
        for name in shared:
            found = row.get(name)
            cells += (
                [f"{found['seconds']:.2f} ({found['whole']:.2f})", f"{_times(row, name):.1f}"] if found else ["", ""]
            )
        lines.append(f"| {' | '.join(cells)} |")
    return lines
