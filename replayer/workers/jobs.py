"""What one call of the replay command has to do: which recordings, together with which, compared with which.

Tensor-parallel ranks of an engine are compared, the prefill and decode sides of a deployment replayed together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ...kernels.arrays import Int64Array
from ...recorder.errors import TraceError
from ...recorder.state.forward import UnusableEventError, read_forward
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.recordings import Recording
from ..run.schedule import Schedule, ScheduleLog, field_values
from ..run.segment_stream import SegmentStream, file_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Segments of a recording in a row, one of `of` such stretches that are replayed side by side.

    `paths` are its own, `behind` those of all stretches after it.
    """

    number: int
    of: int
    paths: tuple[Path, ...]
    behind: tuple[Path, ...]


@dataclass(slots=True, kw_only=True)
class Job:
    """The replay of one recording; `report` is its directory, None for none, `schedule` what its forwards go through.

    With a `stretch`, of that part of it alone.
    """

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
        header = recordings[first].header
        if header is None:
            continue
        log = ScheduleLog(f"tp rank {header.ranks.tp_rank} ({recordings[first].name})", header)
        jobs[first].schedule = Schedule(header, log=log)
        for index in others:
            mine = recordings[index].header
            if mine is not None:
                values = partial(values_of, recordings[first].paths)
                jobs[index].schedule = Schedule(mine, other=log, values=values)
    groups = replayed_together(recordings)
    leads = {group[0] for group in engines}
    # The rank that others are compared with goes first.
    groups.sort(key=lambda group: not any(index in leads for index in group))
    return ReplayPlan(
        groups=[[jobs[index] for index in group] for group in groups],
        ranks=[[jobs[index] for index in group] for group in engines],
    )


def values_of(paths: Sequence[Path], number: int, name: str) -> Int64Array | str | None:
    """Return a field of a recording's forward `number`, by a search of its files; None where it is not there."""
    try:
        return _search(SegmentStream(paths), number, name)
    except TraceError:  # a flight recorder may have deleted it since
        return None


def _search(stream: SegmentStream, number: int, name: str) -> Int64Array | str | None:
    for item in stream.stream():
        if not isinstance(item, TraceBatch) or number not in item.scalar_ints("forward"):
            continue
        for view in item:
            if view.kind == "forward" and view.scalar("forward") == number:
                try:
                    return field_values(read_forward(view, stream.header), name)
                except UnusableEventError:
                    return None
    return None


def ranks_together(recordings: Sequence[Recording]) -> list[list[int]]:
    """Return which recordings are tensor-parallel ranks of one engine, by their indices, ranks ascending.

    Other data-parallel or pipeline-parallel positions run other forwards. If all ranks of a server's run are there, its id tells
    them from another server's; else a rank that comes again is of a later run. A server on several machines has an id on each.
    """
    engines: dict[tuple[object, ...], list[int]] = {}
    for index, recording in enumerate(recordings):
        header = recording.header
        if header is None or header.ranks.tp_size < 2:
            continue
        ranks = header.ranks
        where = (ranks.tp_size, ranks.pp_rank, ranks.pp_size, ranks.dp_rank, ranks.dp_size)
        key = (header.engine, header.model, header.role, header.runners, where)
        engines.setdefault(key, []).append(index)
    groups: list[list[int]] = []
    for members in engines.values():
        whole, rest = _whole_runs(recordings, members)
        groups += whole
        run: dict[int, int] = {}
        for index in sorted(rest, key=lambda i: _header(recordings[i]).created_ns):
            rank = _header(recordings[index]).ranks.tp_rank
            if rank in run:
                groups.append([run[r] for r in sorted(run)])
                run = {}
            run[rank] = index
        groups.append([run[r] for r in sorted(run)])
    return [group for group in groups if len(group) > 1]


def _whole_runs(recordings: Sequence[Recording], members: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Return the members that are all ranks of one run by its id, ranks ascending, and the others."""
    by_run: dict[str, list[int]] = {}
    for index in members:
        by_run.setdefault(_header(recordings[index]).run_id, []).append(index)
    whole, rest = [], list(by_run.pop("", ()))
    for of_run in by_run.values():
        ranked = sorted(of_run, key=lambda i: _header(recordings[i]).ranks.tp_rank)
        ranks = [_header(recordings[i]).ranks for i in ranked]
        if [rank.tp_rank for rank in ranks] == list(range(ranks[0].tp_size)):
            whole.append(ranked)
        else:
            rest += of_run
    return whole, rest


def replayed_together(recordings: Sequence[Recording]) -> list[list[int]]:
    """Return which recordings exchange transfers: prefill and decode sides, rank by rank; the others are alone.

    What was hashed with another salt is no other side. With as many ranks on both sides each sends to its like; else all are one.
    """
    sides = [r.header for r in recordings if r.header is not None and r.header.role]
    alike = len({header.ranks.tp_size for header in sides}) == 1
    joined: dict[tuple[str, str, int, int], list[int]] = {}
    groups: list[list[int]] = []
    for index, recording in enumerate(recordings):
        header = recording.header
        if header is None or not header.role:
            groups.append([index])
            continue
        rank = (header.ranks.tp_rank, header.ranks.pp_rank) if alike else (0, 0)
        key = (header.tokens, header.salt_id, *rank)
        if key not in joined:
            joined[key] = []
            groups.append(joined[key])
        joined[key].append(index)
    return groups


def _header(recording: Recording) -> TraceHeader:
    if recording.header is None:
        raise ValueError(f"{recording.name} has no header")
    return recording.header
