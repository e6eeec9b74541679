"""The replay of recordings that belong together, or of one stretch of a recording: from files to reports and summaries."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ...recorder.errors import TraceError
from ...recorder.files import ForeignFolderError
from ...recorder.trace.reader import TraceReader
from ..report.report import STRETCH_PREFIX, check_report_folder
from ..report.summary import Summary
from ..run.replay import ReplayRun, replay_joined
from ..run.segment_stream import SegmentStream
from ..run.settings import Progress, ReplaySettings, resolve_kv_hash
from .jobs import Job, Stretch

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """How to replay a group of a plan, whichever group it is.

    `explicit`: the user named the report's place; `all_there`: no segment may follow those given. `finish` is called with each
    summary once its verdict stands; it may change it and its report, and returns what to say to the user. It is a function of a
    module, so that another process finds it.
    """

    settings: ReplaySettings
    explicit: bool
    all_there: bool
    finish: Callable[[Summary], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What came of a group: a summary each, or the error that kept it from being judged; `notes` are for the user.

    Of a stretch of a recording the `part`, until all of them are joined.
    """

    summaries: list[Summary] = field(default_factory=list)
    error: str = ""
    notes: list[str] = field(default_factory=list)
    part: Part | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it."""
        return any(summary.stopped.startswith("interrupted") for summary in self.summaries)


def replay_group(
    jobs: Sequence[Job],
    task: GroupTask,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_trouble: Callable[[], None] = lambda: None,
) -> GroupResult:
    """Replay the recordings of a group together, and write their reports.

    `on_trouble` is called where a stretch of a recording turns out to be replayed to the recording's end.
    """
    notes: list[str] = []
    part: Part | None = None
    done: list[Summary] = []
    try:
        folders = []
        for job in jobs:
            # A trace that cannot be judged leaves no empty report behind.
            resolve_kv_hash(task.settings.kv_hash, SegmentStream(job.recording.paths).header)
            folders.append(_place(Path(job.recording.name), job.report, explicit=task.explicit, notes=notes))
        try:
            if jobs[0].stretch is None:
                for folder in folders:
                    drop_parts(folder)  # of a replay that was killed
                done = replay_joined(
                    [job.recording.paths for job in jobs],
                    settings=task.settings,
                    reports=folders,
                    on_progress=on_progress,
                    schedules=[job.schedule for job in jobs],
                    all_there=task.all_there,
                )
            else:
                part = _replay_stretch(jobs[0].stretch, task, folders[0], on_progress, on_trouble)
        except OSError as error:
            raise TraceError(not_written(jobs, folders, error)) from None
    except TraceError as error:
        return GroupResult(error=str(error), notes=notes)
    notes += finished(done, task)
    return GroupResult(summaries=done, notes=notes, part=part)


def finished(summaries: Sequence[Summary], task: GroupTask) -> list[str]:
    """Call the task's `finish` with each summary; return what it has to say to the user."""
    return [note for summary in summaries if task.finish is not None and (note := task.finish(summary))]


def not_written(jobs: Sequence[Job], folders: Sequence[Path | None], error: OSError) -> str:
    """Say that the reports of jobs cannot be written, and what to do."""
    return (
        f"{', '.join(job.recording.name for job in jobs)}: the report in {', '.join(map(str, folders))} cannot be "
        f"written ({error.strerror or error}); make room, name another folder with --report DIR, or use --no-report"
    )


def report_candidates(target: Path, *, explicit: bool) -> list[Path]:
    """Return where a report may go, best first; one that the user has not named also to the working directory."""
    return [target] if explicit else [target, Path.cwd() / target.name]


def make_folder(folder: Path) -> None:
    """Make a report directory where there is none; raise `OSError` where nothing can, or shall, be written to it."""
    # Its files hold tokens and names of requests, as the trace does.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_report_folder(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _place(trace: Path, target: Path | None, *, explicit: bool, notes: list[str]) -> Path | None:
    """Make the report directory; a default one that cannot be made beside the trace goes to the working directory."""
    if target is None:
        return None
    candidates = report_candidates(target, explicit=explicit)
    for folder in candidates:
        try:
            make_folder(folder)
        except OSError as error:
            failure = error
            if isinstance(error, ForeignFolderError):
                break  # what lies there is to be looked at, and not passed by
            continue
        if folder != target:
            notes.append(f"{target} cannot be written ({failure.strerror}); the report goes to {folder}")
        return folder
    raise TraceError(
        f"{trace}: the report directory {folder} cannot be written ({failure.strerror}); name another with "
        "--report DIR, or use --no-report"
    )


def _replay_stretch(
    stretch: Stretch,
    task: GroupTask,
    report: Path | None,
    on_progress: Callable[[Progress], None],
    on_trouble: Callable[[], None],
) -> Part:
    """Replay a stretch, into a folder of its own in `report`; if it is not clean and whole, go on to the recording's end."""
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
    with ReplayRun(paths, settings=task.settings, report=folder, all_there=task.all_there) as run:
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
    to_end = last or reported or bool(summary.stopped)
    return Part(summary=summary, request_ids=run.request_ids, to_end=to_end, began=began, ended=time.perf_counter())


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
