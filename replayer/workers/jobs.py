"""What one call of the replay command has to do: which recordings, together with which, compared with which, by how many.

Tensor-parallel ranks of an engine are compared, the prefill and decode sides of a deployment replayed together. Of one
recording a worker may get a stretch: some of its segments, the first of which begins with a keyframe, with all that a replay
of those before it would hold. If it has neither damage nor losses, violations or findings that is the whole story. If a
stretch comes upon something, what follows may depend on it: whoever replays it goes on to the recording's end, and what the
stretches behind it gave is not used (`group_replay`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from ...kernels.arrays import Int64Array
from ...kernels.sparse import free_memory_bytes
from ...recorder.errors import TraceError
from ...recorder.state.forward import UnusableEventError, read_forward
from ...recorder.state.pools import pool_bytes
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.reader import TraceReader
from ...recorder.trace.recordings import Recording
from ..run.schedule import Schedule, ScheduleLog, field_values
from ..run.settings import ReplaySettings
from ..run.streams import SegmentStream, described, file_size

# To load the libraries once more, in the server of the workers, takes about as long as some 200 MB of a trace.
WORTH_A_WORKER_BYTES: Final = 256 << 20
# One replay keeps one core and a half busy; stretches of one recording begin with its keyframe each.
WORTH_SPLITTING_CORES: Final = 4
_SHARE_OF_MEMORY: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Segments of a recording in a row, one of `of` stretches; `paths` are its own, `behind` those of all after it."""

    number: int
    of: int
    paths: tuple[Path, ...]
    behind: tuple[Path, ...]


@dataclass(slots=True, kw_only=True)
class Job:
    """The replay of one recording, or of a `stretch` of it; `report` is its directory, `schedule` sees its forwards."""

    recording: Recording
    report: Path | None = None
    schedule: Schedule | None = None
    stretch: Stretch | None = None


@dataclass(slots=True, kw_only=True)
class ReplayPlan:
    """`groups` are replayed one after another, the jobs of a group together; `ranks` names the engines compared."""

    groups: list[list[Job]]
    ranks: list[list[Job]] = field(default_factory=list)


def group_bytes(group: Sequence[Job]) -> int:
    """Return how large the files are that a group replays."""
    return sum(file_size(path) for job in group for path in (job.stretch or job.recording).paths)


def plan_jobs(jobs: Sequence[Job]) -> ReplayPlan:
    """Return what is replayed together and in which order, with the ranks of each engine set to be compared."""
    recordings = [job.recording for job in jobs]
    engines = ranks_together(recordings)
    for first, *others in engines:
        lead = recordings[first].header
        if lead is None:
            continue
        log = ScheduleLog(f"tp rank {lead.ranks.tp_rank} ({recordings[first].name})", lead)
        jobs[first].schedule = Schedule(lead, log=log)
        values = partial(values_of, recordings[first].paths)
        for index in others:
            mine = recordings[index].header
            jobs[index].schedule = Schedule(mine, other=log, values=values) if mine is not None else None
    leads = {group[0] for group in engines}
    # The rank that others are compared with goes first.
    groups = sorted(replayed_together(recordings), key=lambda group: leads.isdisjoint(group))
    return ReplayPlan(
        groups=[[jobs[index] for index in group] for group in groups],
        ranks=[[jobs[index] for index in group] for group in engines],
    )


def values_of(paths: Sequence[Path], number: int, name: str) -> Int64Array | str | None:
    """Return a field of a recording's forward `number`, by a search of its files; None where it is not there."""
    try:
        stream = SegmentStream(paths)
        for item in stream.stream():
            if isinstance(item, TraceBatch) and number in item.scalar_ints("forward"):
                for view in item:
                    if view.kind == "forward" and view.scalar("forward") == number:
                        return field_values(read_forward(view, stream.header), name)
    except (TraceError, UnusableEventError):  # a flight recorder may have deleted it since
        pass
    return None


def ranks_together(recordings: Sequence[Recording]) -> list[list[int]]:
    """Return which recordings are tensor-parallel ranks of one engine, by their indices, ranks ascending.

    Other data-parallel or pipeline-parallel positions run other forwards. If all ranks of a server's run are there, its id tells
    them from another server's; else a rank that comes again is of a later run. A server on several machines has an id on each.
    """
    headers = {index: one.header for index, one in enumerate(recordings) if one.header is not None}
    engines: dict[tuple[object, ...], dict[str, list[int]]] = {}
    for index, header in headers.items():
        sampled = (
            header.sampling is not None and header.sampling.window_seconds
        )  # each rank begins with another forward
        if header.ranks.tp_size > 1 and not sampled:
            engine = (header.engine, header.model, header.role, header.runners, replace(header.ranks, tp_rank=0))
            engines.setdefault(engine, {}).setdefault(header.run_id, []).append(index)

    def rank(index: int) -> int:
        return headers[index].ranks.tp_rank

    groups: list[list[int]] = []
    for runs in engines.values():
        rest: list[int] = []
        for run_id, members in runs.items():
            whole = run_id and sorted(map(rank, members)) == list(range(headers[members[0]].ranks.tp_size))
            if whole:
                groups.append(sorted(members, key=rank))
            else:
                rest += members
        run: list[int] = []
        for index in sorted(rest, key=lambda i: headers[i].created_ns):
            if rank(index) in map(rank, run):
                groups.append(sorted(run, key=rank))
                run = []
            run.append(index)
        groups.append(sorted(run, key=rank))
    return [group for group in groups if len(group) > 1]


def replayed_together(recordings: Sequence[Recording]) -> list[list[int]]:
    """Return which recordings exchange transfers: prefill and decode sides, rank by rank; the others are alone.

    What was hashed with another salt is no other side. With as many ranks on both sides each sends to its like; else all are one.
    """
    alike = len({r.header.ranks.tp_size for r in recordings if r.header is not None and r.header.role}) == 1
    groups: dict[tuple[object, ...], list[int]] = {}
    key: tuple[object, ...]
    for index, recording in enumerate(recordings):
        header, key = recording.header, (index,)  # of one without another side
        if header is not None and header.role:
            rank = (header.ranks.tp_rank, header.ranks.pp_rank) if alike else (0, 0)
            key = (header.tokens, header.salt_id, *rank)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def shared_out(plan: ReplayPlan, settings: ReplaySettings, *, jobs: int | None) -> tuple[ReplayPlan, int]:
    """Return a plan for `jobs` workers, None for as many as pay, recordings split if they are too few; and how many."""
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

    Recordings that are replayed with others, or compared with others forward by forward, stay whole.
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
