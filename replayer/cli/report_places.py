"""Where the reports of a call go, and that one replay at a time writes there: of two neither's report would be left."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from ...recorder.errors import TraceError
from ...recorder.files import ForeignFolderError
from ...recorder.remote import as_path, beside
from ...recorder.trace.files import split_segment_name
from ...recorder.trace.recordings import Recording
from ..report.summary import EXIT_UNREADABLE
from ..run.settings import ReplaySettings, resolve_kv_hash
from ..workers.group_replay import make_folder, report_candidates
from ..workers.jobs import Job

# Each takes an open file, of which a process may have a few hundred.
_MOST_HELD: Final = 100


class _BusyFolderError(click.ClickException):
    exit_code = EXIT_UNREADABLE


def report_folders(recordings: list[Recording], report: Path | None, no_report: bool) -> list[Path | None]:
    """Return each recording's report directory; refuse two that would share one."""
    if no_report:
        return [None] * len(recordings)
    if report and len(recordings) == 1:
        return [report]
    named = [_report_name(recording) for recording in recordings]
    for number, recording in enumerate(recordings):  # a file that has the name of a recording's segments
        if named.count(named[number]) > 1 and split_segment_name(recording.paths[0]) is None:
            named[number] = as_path(recording.name)
    folders = [(report or beside(trace)) / f"{trace.name}.report" for trace in named]
    shared = next((folder for folder in folders if folders.count(folder) > 1), None)
    if shared:
        raise _shared(shared)
    return list(folders)


@contextlib.contextmanager
def reports_held(jobs: Sequence[Job], settings: ReplaySettings, *, explicit: bool) -> Iterator[None]:
    """Hold the report folders of jobs, made where they can be, against other replays; of very many, the first ones.

    A folder made here to which nothing was written goes again at the end. Without locks in the file system nothing is held.
    Raises `ClickException` if another replay holds one of them, or two jobs have one under two names.
    """
    mine: set[tuple[int, int]] = set()
    with ExitStack() as held:
        for job in jobs[:_MOST_HELD]:
            if job.report is not None and _can_be_judged(job, settings):
                for folder in report_candidates(job.report, explicit=explicit):
                    if _hold(folder, held, mine):
                        break
        yield


def _can_be_judged(job: Job, settings: ReplaySettings) -> bool:
    """Whether a report will be written: what cannot be judged is reported where it is replayed, and leaves no folder."""
    if job.recording.header is None:
        return False
    try:
        resolve_kv_hash(settings.kv_hash, job.recording.header)
    except TraceError:
        return False
    return True


def _hold(folder: Path, held: ExitStack, mine: set[tuple[int, int]]) -> bool:
    """Hold a folder, and add it to those that are `mine`; return whether a report can be written there."""
    try:
        new = not folder.exists()
        make_folder(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:  # reported where the report is written
        return isinstance(error, ForeignFolderError)
    held.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) in mine:
        raise _shared(folder)
    mine.add((status.st_dev, status.st_ino))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _BusyFolderError(
            f"{folder}: another replay is writing its report there; wait until it is done, or name another folder with "
            "--report DIR"
        ) from None
    except OSError:
        pass  # no locks on this file system
    if new:
        held.callback(_drop_if_empty, folder)
    return True


def _shared(folder: Path) -> click.UsageError:
    return click.UsageError(f"two traces would write to {folder}; replay them apart, or name another --report each")


def _drop_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it holds a report
        folder.rmdir()


def _report_name(recording: Recording) -> Path:
    """Return a recording's name; of a part of its segments with their numbers: the whole recording's report stays."""
    name = as_path(recording.name).with_suffix("")
    splits = [split_segment_name(path) for path in recording.paths]
    numbers = [split[1] for split in splits if split is not None]
    if len(recording.paths) == 1 or not numbers or len(numbers) < len(splits):
        return name
    there = (split_segment_name(path) for path in name.parent.iterdir())
    if {split[1] for split in there if split is not None and split[0] == name.name} <= {*numbers}:
        return name
    return name.with_name(f"{name.name}.{min(numbers):06d}-{max(numbers):06d}")
