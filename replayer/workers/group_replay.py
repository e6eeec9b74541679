"""The replay of recordings that belong together, or of one stretch of a recording: from files to reports and summaries.

The stretches of a recording are joined to the summary and the report that a replay of all segments in turn would give.
Every part but the last found nothing and lost nothing, so what the last one says holds for all; counts are summed, and
the running totals of the divergence figures go on from part to part.
"""

import copy
import errno
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...recorder.errors import TraceError
from ...recorder.files import ForeignFolderError
from ...recorder.remote import arrow_file, as_path
from ...recorder.trace.reader import TraceReader
from ..report.report import STRETCH_PREFIX, check_report_folder, write_summary
from ..report.summary import MAX_LISTED, Summary
from ..report.violations import TableSink
from ..run.divergence import DIVERGENCE_SCHEMA
from ..run.replay import ReplayRun, replay_joined
from ..run.settings import Progress, ReplaySettings, resolve_kv_hash
from ..run.streams import SegmentStream
from .jobs import Job, Stretch

_SUMS: Final = (
    *("forwards", "forwards_watched", "tokens", "verified", "written", "unknown_entries", "entries_read"),
    *("figures", "samples", "told", "transfers_sent", "transfers_received", "transfers_unmatched"),
    *("num_marks", "num_injected", "kv_recorded"),
)
_COUNTS: Final = ("events", "forwards_by_mode", "slot_counters", "kernel_counters", "oracle", "model_bytes")
_RUNNING: Final = ("verify_full", "verify_swa")
_DIVERGENCE: Final = "swa_divergence.parquet"


class Part(NamedTuple):
    """What came of a stretch, and when; `to_end`: whatever comes behind it is in its summary, or nothing follows."""

    summary: Summary
    request_ids: frozenset[int]
    to_end: bool
    began: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """How to replay a group of a plan, whichever group it is.

    `explicit`: the user named the report's place; `all_there`: no segment may follow those given; `finish`, a function of a
    module, so that another process finds it, is as in `make_replay_command`; `no_room` says what to do if a report cannot be written.
    """

    settings: ReplaySettings
    explicit: bool
    all_there: bool
    finish: Callable[[Summary], str] | None = None
    no_room: str = "make room, name another folder with --report DIR, or use --no-report"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What came of a group: a summary each, of a stretch the `part`, or an error; `notes` are for the user."""

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
    """Replay a group and write its reports; `on_trouble` is called if a stretch is to be replayed to the recording's end."""
    notes: list[str] = []
    part: Part | None = None
    done: list[Summary] = []
    try:
        folders = []
        for job in jobs:
            # A trace that cannot be judged leaves no empty report behind.
            resolve_kv_hash(task.settings.kv_hash, SegmentStream(job.recording.paths).header)
            folders.append(_place(as_path(job.recording.name), job.report, explicit=task.explicit, notes=notes))
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
            raise TraceError(_not_written(jobs, folders, error, task)) from None
    except TraceError as error:
        return GroupResult(error=str(error), notes=notes)
    notes += _finished(done, task)
    return GroupResult(summaries=done, notes=notes, part=part)


def _finished(summaries: Sequence[Summary], task: GroupTask) -> list[str]:
    return [note for summary in summaries if task.finish is not None and (note := task.finish(summary))]


def _not_written(jobs: Sequence[Job], folders: Sequence[Path | None], error: OSError, task: GroupTask) -> str:
    return (
        f"{', '.join(job.recording.name for job in jobs)}: the report in {', '.join(map(str, folders))} cannot be "
        f"written ({error.strerror or error}); {task.no_room}"
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
        folder = report / f"{STRETCH_PREFIX}{stretch.number:04d}"
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
    return Part(summary, run.request_ids, to_end, began, time.perf_counter())


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
    for folder in report.glob(f"{STRETCH_PREFIX}*") if report is not None else ():
        shutil.rmtree(folder, ignore_errors=True)


def joined_results(
    results: Iterable[tuple[list[Job], GroupResult]], task: GroupTask
) -> Iterator[tuple[list[Job], GroupResult]]:
    """Yield each group with what came of it, the stretches of a recording as the one that they are of."""
    together: list[tuple[Job, GroupResult]] = []
    for group, result in results:
        stretch = group[0].stretch
        if together and (stretch is None or stretch.number == 0):
            yield from _recording(together, task)
            together = []
        if stretch is None:
            yield group, result
        else:
            together.append((group[0], result))
    yield from _recording(together, task)


def _recording(
    stretches: Sequence[tuple[Job, GroupResult]], task: GroupTask
) -> Iterator[tuple[list[Job], GroupResult]]:
    """Yield a recording with what came of its stretches; nothing where the user ended it before its first had begun."""
    parts: list[Part] = []
    for number, (job, result) in enumerate(stretches):
        if result.error:
            drop_parts(job.report)
            yield [replace(job, stretch=None)], replace(result, part=None)
            return
        if result.part is None or job.stretch is None or job.stretch.number != number:
            break
        parts.append(result.part)
        if result.part.to_end:
            break
    if not parts:
        return
    job, first = stretches[0]
    notes = list(first.notes)
    report = Path(parts[0].summary.report).parent if parts[0].summary.report else None
    try:
        summary = _joined(job.recording.name, parts, report)
    except OSError as error:
        text = _not_written([job], [report], error, task)
        yield [replace(job, stretch=None)], GroupResult(error=text, notes=notes)
        return
    beyond = [result.part.summary for _, result in stretches[len(parts) :] if result.part is not None]
    if summary.stopped and any(one.violations or one.findings for one in beyond):
        notes.append("more was found behind that than this report holds; replay it to its end")
    yield [replace(job, stretch=None)], GroupResult(summaries=[summary], notes=notes + _finished([summary], task))


def _joined(name: str, parts: Sequence[Part], report: Path | None) -> Summary:
    """Return the summary of a recording's parts, all but the last clean and whole, and leave their report in `report`."""
    summaries = [part.summary for part in parts]
    first, summary = summaries[0], copy.copy(summaries[-1])
    summary.trace = name
    for name_of_sum in _SUMS:
        setattr(summary, name_of_sum, sum(getattr(one, name_of_sum) for one in summaries))
    for name_of_counts in _COUNTS:
        total: Counter[str] = Counter()
        for one in summaries:
            total.update(getattr(one, name_of_counts))
        setattr(summary, name_of_counts, dict(total))
    summary.segments = [number for one in summaries for number in one.segments]
    summary.unknown_before = first.unknown_before
    summary.requests = len(frozenset[int]().union(*(part.request_ids for part in parts)))
    summary.first_time_ns = next((one.first_time_ns for one in summaries if one.first_time_ns), 0)
    summary.last_forward = next((one.last_forward for one in reversed(summaries) if one.forwards), -1)
    summary.last_time_ns = max(one.last_time_ns for one in summaries)
    summary.kv_filled = max(one.kv_filled for one in summaries)
    summary.marks = [mark for one in summaries for mark in one.marks][:MAX_LISTED]
    summary.injected = [fault for one in summaries for fault in one.injected]
    summary.swa_divergence = _divergence([one.swa_divergence for one in summaries])
    if "forwards_on_cpu" in summary.settings:
        summary.settings = dict(summary.settings)
        summary.settings["forwards_on_cpu"] = sum(one.settings["forwards_on_cpu"] for one in summaries)
    if summary.stopped.startswith("interrupted") or not parts[-1].to_end:
        summary.stopped = f"interrupted after {summary.forwards:,} forwards"
    summary.seconds = max(part.ended for part in parts) - min(part.began for part in parts)
    if report is not None:
        _join_reports(summaries, report)
        summary.report = str(report)
        write_summary(summary, report)
    return summary


def _divergence(figures: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    there = [one for one in figures if one is not None]
    if not there:
        return None
    total = copy.deepcopy(there[0])
    for one in there[1:]:
        for key in ("forwards", *_RUNNING):
            total[key] += one[key]
        for name, group in one["groups"].items():
            for key, figure in group.items():
                mine = total["groups"][name][key]
                mine["total"] += figure["total"]
                mine["largest"] = max(mine["largest"], figure["largest"])
                mine["last"] = figure["last"] if one["forwards"] else mine["last"]
    return total


def _join_reports(summaries: Sequence[Summary], report: Path) -> None:
    """Leave the last part's files in the report, the divergence figures of all parts, and no folder of a part."""
    folders = [Path(summary.report) for summary in summaries if summary.report]
    if (folders[-1] / _DIVERGENCE).exists():
        _join_divergence(summaries, [folder / _DIVERGENCE for folder in folders], report / _DIVERGENCE)
        (folders[-1] / _DIVERGENCE).unlink()
    for path in folders[-1].iterdir():
        path.replace(report / path.name)
    drop_parts(report)


def _join_divergence(summaries: Sequence[Summary], files: Sequence[Path], target: Path) -> None:
    before = dict.fromkeys(_RUNNING, 0)
    with closing(TableSink(target, DIVERGENCE_SCHEMA)) as sink:
        for summary, path in zip(summaries, files, strict=True):
            with arrow_file(path) as source, pq.ParquetFile(source) as read:
                for number in range(read.num_row_groups):
                    table = read.read_row_group(number)
                    for key, count in before.items():
                        at = table.schema.get_field_index(key)
                        table = table.set_column(at, key, pc.add(table[key], count))
                    sink.append(table.cast(DIVERGENCE_SCHEMA))
            figures = summary.swa_divergence or {}
            before = {key: count + figures.get(key, 0) for key, count in before.items()}
