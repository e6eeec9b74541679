"""Measure replay at scale: the Mooncake conversation workload through the simulated engine, and its traces replayed.

    python benchmarks/replay.py mooncake_conversation.jsonl --work DIR [--full] [--markdown] [--json]
    python benchmarks/replay.py mooncake_conversation.jsonl --work DIR --device cuda

The engine: K and V with 16 captured bytes a slot, pages of 16, a pool of 1,048,576 slots, prefix cache, at most 256
requests at once, chunks of 8,192 tokens, arrivals as in the file, the prefix's bytes read again in every forward. Traces
are kept in DIR and taken again; 10 % is 0.8 GB and takes some minutes to make, --full 8 GB and half an hour.

Each replay is a process of its own on --cores cores, with every check, its report written, after a small trace that
loads the compiled code; seconds are those of the replay, the median of --runs, peak memory is the whole process's.
Tokens are those that forwards were fed. Interval and stepwise replay of a trace must agree in verdict, counters, rows
and findings, or no ratio is printed and the exit status is 2; it is 1 where a target is missed.

With --device cuda the same traces are replayed on a GPU, beside the published canary's kernels stepped over the same
forwards there (see published_stepping.py), and the same workload, recorded in segments, by 4, 8 and 16 workers, by the
last without compression too; rows are compared first, on a damaged trace too. Every figure is told on stderr as it
comes; where a command's time is limited, --fractions 0.001 and --runs 1 come first, then one larger fraction a command:
traces and compiled code stay.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from making_traces import DifferError, make_trace, replayed, tell
from performance_page import load, machine, today, write_section
from programs import program
from replay_beside import on_device
from replay_children import WARM_UP, child, pin
from trace_reading import TARGET_SHARE, reading_table

FRACTIONS = (0.001, 0.01, 0.1)

TARGET_EXPONENT = 1.05
TARGET_TOKENS_PER_SECOND = 3_000_000  # on two cores, at 10 %
TARGET_MEMORY_BYTES = 4 << 30


def main() -> int:
    """Make the traces, replay them, print what it came to; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path, help="mooncake_conversation.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="folder in which the traces are kept")
    parser.add_argument("--fractions", default=",".join(map(str, FRACTIONS)), help="of the workload")
    parser.add_argument("--full", action="store_true", help="all of the workload too")
    parser.add_argument("--stepwise-up-to", type=float, default=0.01, help="replay stepwise up to this fraction")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2, help="that a replay may use")
    parser.add_argument("--device", help="cuda or cuda:N: compare with the published kernels there instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="write the section of docs/results/performance.md")
    args = parser.parse_args()
    fractions = [float(text) for text in args.fractions.split(",")] + ([1.0] if args.full else [])
    missing = [name for name in ("torch", "triton", "sglang") if args.device and find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} missing: --device steps the published kernels of sglang 0.5.23 there")
    args.work.mkdir(parents=True, exist_ok=True)
    recordings = {fraction: make_trace(args.workload, args.work, fraction) for fraction in sorted(set(fractions))}
    compile_all(recordings[min(recordings)], args)  # a smaller one may not compile the pass
    begin = load()
    try:
        if args.device:
            found = on_device(recordings, args)
        else:
            found = on_cpu({fraction: recording[0] for fraction, recording in recordings.items()}, args)
    except DifferError as error:
        print(f"{error}: no ratio", file=sys.stderr)
        return 2
    found |= {"machine": machine(), "date": today(), "load": [begin, load()]}
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join([*found["lines"], *(f"missed: {text}" for text in found["missed"])]))
    if args.markdown:
        lines = [line for line in found["lines"] if line.startswith("|") or not line]
        name = "replay-device" if args.device else "replay"
        write_section(name, "\n".join([command_line(args, found), "", *lines, "", *found["notes"]]))
    return int(bool(found["missed"]))


def command_line(args: argparse.Namespace, found: dict[str, Any]) -> str:
    """Return the sentence that says how a section was made."""
    options = " ".join(
        text
        for text, said in (
            ("--full", args.full),
            (f"--device {args.device}", args.device),
            (f"--runs {args.runs}", args.runs != 3),
            (f"--fractions {args.fractions}", args.fractions != ",".join(map(str, FRACTIONS))),
        )
        if said
    )
    where = f"{found['gpu']}, {found['machine']}" if args.device else f"{found['machine']}, {args.cores} of them used"
    return (
        f"`python benchmarks/replay.py mooncake_conversation.jsonl --work DIR {options} --markdown`, {found['date']}, "
        f"{where}; load average {found['load'][0]:.1f} before, {found['load'][1]:.1f} after."
    )


def compile_all(recording: list[Path], args: argparse.Namespace) -> None:
    """Replay a trace without counting it: compiled code is on the disk then, and no single run pays for it."""
    tell("compiling; minutes where nothing is kept yet")
    todo = [(recording, "interval", "cpu"), ([WARM_UP], "stepwise", "cpu")]
    if args.device:
        todo.append((recording, "stepwise", args.device))
    for paths, executor, device in todo:
        trace = [str(path) for path in paths]
        child("replay", {"trace": trace, "executor": executor, "device": device, "checks": True}, 0)


def on_cpu(traces: dict[float, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Replay every trace on the CPU; all figures, and what missed its target."""
    rows: list[dict[str, Any]] = []
    for fraction, trace in traces.items():
        row: dict[str, Any] = {"fraction": fraction, "bytes": trace.stat().st_size}
        row["interval"] = replayed([trace], "interval", args)
        if fraction <= args.stepwise_up_to:
            row["stepwise"] = replayed([trace], "stepwise", args)
            if row["stepwise"]["digest"] != row["interval"]["digest"]:
                raise DifferError(f"{trace}: interval and stepwise replay differ")
        row["reading"] = child("reading", {"trace": str(trace), "runs": args.runs}, args.cores)
        rows.append(row)
        tell(f"measured {trace.name}")
    middle = min(traces, key=lambda fraction: abs(fraction - 0.01))
    (plain,) = make_trace(args.workload, args.work, middle, "--compression", "none")
    uncompressed = child("reading", {"trace": str(plain), "runs": args.runs}, args.cores)
    uncompressed["bytes"] = plain.stat().st_size
    jobs = jobs_scaling([trace for fraction, trace in traces.items() if fraction <= 0.1][-1], args)
    tokens = [row["interval"]["tokens"] for row in rows]
    seconds = [row["interval"]["seconds"] for row in rows]
    exponent = float(np.polyfit(np.log(tokens), np.log(seconds), 1)[0]) if len(rows) > 1 else None
    peaks = [row["interval"]["peak_bytes"] for row in rows]
    missed = []
    if exponent is not None and exponent > TARGET_EXPONENT:
        missed.append(f"interval time grows with tokens to the power of {exponent:.2f}, target {TARGET_EXPONENT}")
    if max(peaks) > TARGET_MEMORY_BYTES:
        missed.append(f"peak memory {max(peaks) / 2**30:.2f} GiB, target below {TARGET_MEMORY_BYTES / 2**30:.0f}")
    rates = [row["interval"]["tokens_per_second"] for row in rows if row["fraction"] == 0.1]
    slow = [rate for rate in rates if rate < TARGET_TOKENS_PER_SECOND]
    missed += [f"{rate:,.0f} tokens/s, target {TARGET_TOKENS_PER_SECOND:,}" for rate in slow]
    for where, share in rows[-1]["reading"]["shares"].items():
        if share < TARGET_SHARE:
            missed.append(f"reading at {share:.0%} of what the {where} gives, target {TARGET_SHARE:.0%}")
    readings = [(f"{row['fraction']:.1%}", row["bytes"], row["reading"]) for row in rows]
    readings.append((f"{middle:.1%}, recorded without compression", uncompressed["bytes"], uncompressed))
    lines = [*cpu_table(rows), "", *reading_table(readings), "", *other_table(exponent, jobs)]
    return {
        "rows": rows,
        "exponent": exponent,
        "jobs": jobs,
        "missed": missed,
        "lines": lines,
        "notes": cpu_notes(rows),
    }


def jobs_scaling(trace: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Time `kvcanary-replay` over as many links to a trace as there are cores, with one job and with all."""
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        links = [Path(folder) / f"{number}.arrow" for number in range(args.cores)]
        for link in links:
            os.link(trace, link)
        found = {}
        for jobs in (1, args.cores):
            command = [*program("kvcanary-replay"), "--quiet", "--executor", "interval"]
            begin = time.perf_counter()
            done = subprocess.run(
                [*command, "--no-report", "--jobs", str(jobs), *map(str, links)],
                capture_output=True,
                text=True,
                check=False,
                preexec_fn=lambda: pin(args.cores),
            )
            found[jobs] = (time.perf_counter() - begin, done.returncode, done.stdout)
    (one, *told), (many, *other) = found[1], found[args.cores]
    if told != other:
        raise DifferError(f"{trace}: --jobs 1 and --jobs {args.cores} differ")
    return {"trace": trace.name, "recordings": args.cores, "seconds": one, "jobs_seconds": many, "times": one / many}


def cpu_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return what replaying the traces comes to."""
    each = "s | CPU, s | tokens/s | peak, MiB"
    head = f"workload | tokens | forwards | trace, MB | interval, {each} | stepwise, {each} | interval is"
    lines = [f"| {head} |", "|---|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        mine, other = row["interval"], row.get("stepwise")
        cells = [f"{row['fraction']:.1%}", f"{mine['tokens']:,}", f"{mine['forwards']:,}", f"{row['bytes'] / 1e6:,.0f}"]
        for one in (mine, other):
            if one is None:
                cells += [""] * 4
                continue
            cells += [f"{one['seconds']:.2f}", f"{one['cpu_seconds']:.2f}", f"{one['tokens_per_second']:,.0f}"]
            cells.append(f"{one['peak_bytes'] / 2**20:,.0f}")
        cells.append(f"{other['seconds'] / mine['seconds']:.1f} times as fast" if other else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def other_table(exponent: float | None, jobs: dict[str, Any]) -> list[str]:
    """Return the growth, and what several jobs come to."""
    lines = ["| | |", "|---|---|"]
    if exponent is not None:
        lines.append(f"| interval time grows with tokens to the power of | {exponent:.3f} |")
    what = f"{jobs['recordings']} recordings of {jobs['trace']}, `--jobs 1` and `--jobs {jobs['recordings']}`"
    times = f"{jobs['seconds']:.1f} s and {jobs['jobs_seconds']:.1f} s, {jobs['times']:.2f} times as fast"
    return [*lines, f"| {what}, whole processes | {times} |"]


def cpu_notes(rows: list[dict[str, Any]]) -> list[str]:
    """Return what bounds the figures, by the largest trace's own CPU times."""
    last, read = rows[-1]["interval"], rows[-1]["reading"]
    alone = f"At {rows[-1]['fraction']:.0%}, reading alone takes {read['seconds']['page cache']:.2f} s, on a thread of its own in a replay"
    return [f"{alone}; the interval replay used {last['cpu_seconds'] / last['seconds']:.2f} cores."]


if __name__ == "__main__":
    sys.exit(main())
