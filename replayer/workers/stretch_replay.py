"""The replay of one stretch of a recording's segments, and of all behind it where something came up."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...recorder.errors import TraceError
from ...recorder.trace.reader import TraceReader
from ..report.report import STRETCH_PREFIX
from ..report.summary import Summary
from ..run.replay import ReplayRun
from ..run.settings import Progress, ReplaySettings
from .jobs import Stretch

_PART: Final = STRETCH_PREFIX + "{:04d}"
_PARTS: Final = STRETCH_PREFIX + "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What came of a stretch.

    `to_end`: whatever comes behind it is in its summary and its report, since something came up, or nothing follows.
    `began` and `ended` are seconds of the machine's clock.
    """

    summary: Summary
    request_ids: frozenset[int]
    to_end: bool
    began: float
    ended: float


def replay_stretch(
    stretch: Stretch,
    settings: ReplaySettings,
    report: Path | None,
    *,
    all_there: bool,
    on_progress: Callable[[Progress], None],
    on_trouble: Callable[[], None],
) -> Part:
    """Replay a stretch; where it is not clean and whole to its end, go on to the recording's.

    Args:
        stretch: which segments, and which follow.
        settings: how.
        report: the recording's report directory, which must exist; the stretch's files go into a folder there.
        all_there: whether no segment may follow the last one.
        on_progress: called after every batch of events.
        on_trouble: called once when it is clear that what follows is replayed here too.

    Raises:
        TraceError: a segment cannot be read at all, or not with these settings.
    """
    began = time.perf_counter()
    folder = None
    if report is not None:
        folder = report / _PART.format(stretch.number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    paths, last, reported = stretch.paths, not stretch.behind, False
    if not last and not _any_readable(paths):
        # A flight recorder has deleted them since: a gap, behind which the others say what there is.
        paths, last, reported = paths + stretch.behind, True, True
        on_trouble()
    with ReplayRun(paths, settings=settings, report=folder, all_there=all_there) as run:
        try:
            while True:
                more = run.step()
                on_progress(run.progress())
                troubled = not (run.is_ordinary if more else last or run.leaves_nothing)
                if troubled and not reported:
                    reported = True
                    on_trouble()
                if more:
                    continue
                if last or not reported:
                    break
                last = True
                run.go_on(stretch.behind)
        except KeyboardInterrupt:
            run.interrupt()
        summary = run.finish()
        ids = run.request_ids
    return Part(
        summary=summary,
        request_ids=ids,
        to_end=last or reported or bool(summary.stopped),
        began=began,
        ended=time.perf_counter(),
    )


def _any_readable(paths: Sequence[Path]) -> bool:
    for path in paths:
        try:
            with TraceReader(path):
                return True
        except TraceError:
            continue
    return False


def drop_parts(report: Path | None) -> None:
    """Remove what stretches have left in a report directory, if there is one."""
    for folder in report.glob(_PARTS) if report is not None else ():
        shutil.rmtree(folder, ignore_errors=True)
