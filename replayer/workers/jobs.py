"""What one call of the replay command has to do: which recordings, together with which, compared with which."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...recorder.errors import TraceError
from ...recorder.state.forward import UnusableEventError, read_forward
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.recordings import Recording
from ..run.ranks import ranks_together, replayed_together
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


def values_of(paths: Sequence[Path], number: int, name: str) -> npt.NDArray[np.int64] | str | None:
    """Return a field of a recording's forward `number`, by a search of its files; None where it is not there."""
    try:
        return _search(SegmentStream(paths), number, name)
    except TraceError:  # a flight recorder may have deleted it since
        return None


def _search(stream: SegmentStream, number: int, name: str) -> npt.NDArray[np.int64] | str | None:
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
