"""One recording for several workers: its segments in stretches, each of which begins with a keyframe.

What a keyframe holds is what a replay of all before it would hold, so stretches are replayed side by side. Of a
recording with neither damage nor losses, violations or findings that is the whole story. Where a stretch comes upon
something, what follows may depend on it: whoever replays it goes on to the recording's end, and what the
stretches behind it gave is not used (`stretch_replay`, `joining`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...recorder.errors import TraceError
from ...recorder.trace.reader import TraceReader
from ..run.segment_stream import described, file_size
from ..run.settings import ReplaySettings
from .jobs import Job, ReplayPlan, Stretch, group_bytes


def split_plan(plan: ReplayPlan, settings: ReplaySettings, *, workers: int) -> ReplayPlan:
    """Return a plan in which recordings in segments are split, so that `workers` have something to do.

    The groups of one recording's stretches stand where the recording stood. Recordings that are replayed with others,
    or compared with others forward by forward, stay whole.
    """
    if len(plan.groups) >= workers or settings.fail_fast or settings.max_violations is not None:
        return plan
    sizes = [group_bytes(group) for group in plan.groups]
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
    last: int | None = None
    for path in job.recording.paths:
        try:
            with TraceReader(path) as reader:
                segment = reader.header.segment
                if segment is None or described(reader.header) != described(header):
                    return False
        except TraceError:
            return False
        if last is not None and segment.number != last + 1:
            return False
        last = segment.number
    return True


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
