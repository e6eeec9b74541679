"""How many workers a plan is shared out among, and what each of them gets: groups, or stretches of one recording.

A stretch is some of a recording's segments, the first of which begins with a keyframe: with all that a replay of those
before it would hold. So stretches are replayed side by side. Of a recording with neither damage nor losses, violations or
findings that is the whole story. Where a stretch comes upon something, what follows may depend on it: whoever replays it
goes on to the recording's end, and what the stretches behind it gave is not used (`group_replay`, `joining`).
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ...kernels.sparse import free_memory_bytes
from ...recorder.errors import TraceError
from ...recorder.state.pools import pool_bytes
from ...recorder.trace.reader import TraceReader
from ..run.segment_stream import described, file_size
from ..run.settings import ReplaySettings
from .jobs import Job, ReplayPlan, Stretch, group_bytes

# To load the libraries once more, in the server of the workers, takes about as long as some 200 MB of a trace.
WORTH_A_WORKER_BYTES: Final = 256 << 20
# One replay keeps one core and a half busy; stretches of one recording begin with its keyframe each.
WORTH_SPLITTING_CORES: Final = 4
_SHARE_OF_MEMORY: Final = 0.5


def shared_out(plan: ReplayPlan, settings: ReplaySettings, *, jobs: int | None) -> tuple[ReplayPlan, int]:
    """Return a plan for workers, recordings in segments split if there are more workers than recordings, and how many.

    `jobs` is how many workers the user wants; None for as many as pay, which is one on a GPU.
    """
    if jobs is None:
        if settings.device != "cpu":
            return plan, 1
        cores = usable_cores()
        split = split_plan(plan, settings, workers=cores) if cores >= WORTH_SPLITTING_CORES else plan
        jobs = default_jobs(split)
    plan = split_plan(plan, settings, workers=jobs)
    return plan, min(jobs, len(plan.groups))


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(plan: ReplayPlan) -> int:
    """Return how many workers pay for a plan's groups, and fit into memory; 1 for none at all."""
    jobs = min(usable_cores(), len(plan.groups), sum(map(group_bytes, plan.groups)) // WORTH_A_WORKER_BYTES)
    needed = sorted(map(memory_needed, plan.groups), reverse=True)
    free = free_memory_bytes()
    while jobs > 1 and free is not None and sum(needed[:jobs]) > _SHARE_OF_MEMORY * free:
        jobs -= 1
    return max(1, jobs)


def memory_needed(group: Sequence[Job]) -> int:
    """Return about what a group's pools, tables and bookkeeping take at most."""
    return sum(2 * pool_bytes(job.recording.header) for job in group if job.recording.header is not None)


def split_plan(plan: ReplayPlan, settings: ReplaySettings, *, workers: int) -> ReplayPlan:
    """Return a plan in which recordings in segments are split, so that `workers` have something to do.

    The groups of one recording's stretches stand where the recording stood. Recordings that are replayed with others,
    or compared with others forward by forward, stay whole.
    """
    if len(plan.groups) >= workers or settings.fail_fast or settings.max_violations is not None:
        return plan
    sizes = list(map(group_bytes, plan.groups))
    groups: list[list[Job]] = []
    for group, size in zip(plan.groups, sizes, strict=True):
        shares = round(workers * size / max(1, sum(sizes)))
        stretches = _stretches(group[0].recording.paths, shares) if len(group) == 1 and _may_split(group[0]) else []
        groups += [[replace(group[0], stretch=stretch)] for stretch in stretches] or [group]
    return replace(plan, groups=groups)


def _may_split(job: Job) -> bool:
    """Whether a recording's segments are all there, in order, each with its keyframe, and its own business alone."""
    header = job.recording.header
    if job.schedule is not None or header is None or header.role or len(job.recording.paths) < 2:
        return False
    numbers = []
    for path in job.recording.paths:
        try:
            with TraceReader(path) as reader:
                segment = reader.header.segment
                if segment is None or described(reader.header) != described(header):
                    return False
        except TraceError:
            return False
        numbers.append(segment.number)
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _stretches(paths: Sequence[Path], count: int) -> list[Stretch]:
    """Return the files in up to `count` stretches of about as many bytes; none where there would be one."""
    sizes = [file_size(path) for path in paths]
    per_stretch = sum(sizes) / max(1, count)
    firsts, before = [0], 0
    for index, size in enumerate(sizes):
        # A stretch ends with the file whose middle lies behind the share of those before it.
        if index and before + size / 2 >= per_stretch * len(firsts) and len(firsts) < count:
            firsts.append(index)
        before += size
    if len(firsts) < 2:
        return []
    ends = [*firsts[1:], len(paths)]
    return [
        Stretch(number=number, of=len(firsts), paths=tuple(paths[first:end]), behind=tuple(paths[end:]))
        for number, (first, end) in enumerate(zip(firsts, ends, strict=True))
    ]
