"""What is to be replayed of all recordings below a prefix, in tasks that need nothing of one another.

A task is a recording, with the ranks and the other sides that lie in its folder: they are replayed as `kvcanary-replay FOLDER`
does. Segments of one recording belong together wherever they lie, so a frozen copy is no second recording.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from ...recorder.errors import NoTracesError, TraceError
from ...recorder.remote import RemotePath, located, mapped, retried
from ...recorder.trace.recordings import Recording, group_recordings, traces_in
from ...replayer.run.settings import ReplaySettings
from ...replayer.workers.jobs import Job, ReplayPlan, group_bytes, memory_needed, plan_jobs, split_plan
from ..errors import AnalysisError

# What a process takes with its libraries and what is read ahead, beside the pools of its recordings.
PROCESS_BYTES: Final = 400 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Groups of recordings to be replayed one after another; `key` names them, their files and the settings.

    `parts` are stretches of the one recording, which may be replayed anywhere, each a task.
    """

    key: str
    groups: list[list[Job]]
    num_bytes: int
    memory_bytes: int
    parts: tuple["Task", ...] = ()

    @property
    def recordings(self) -> list[Recording]:
        """The recordings, in the order in which they are replayed."""
        return [job.recording for group in self.groups for job in group]


def traces_below(top: Path) -> list[Path]:
    """Return the traces of a folder or prefix and of all folders below it; raise `AnalysisError` if there is none, `OSError`."""
    folders: list[Path]
    if isinstance(top, RemotePath) and not top.is_file():
        folders = _remote_folders(top)
    elif top.is_dir():
        folders = [
            Path(folder)
            for folder, _, names in os.walk(top, onerror=_unlisted)
            if any(one.endswith(".arrow") for one in names)
        ]
    else:
        return [top]  # whoever opens it says what is wrong with it
    found: list[Path] = []
    for traces in mapped(_traces_of, sorted(folders)):
        found += traces
    if not found:
        raise AnalysisError(f"{top}: no .arrow file in it or below it; name a folder, or a prefix, of traces")
    return found


def _remote_folders(top: RemotePath) -> list[Path]:
    import pyarrow.fs

    filesystem, key = located(top)
    selector = pyarrow.fs.FileSelector(key, recursive=True)
    listed = retried(top, lambda: filesystem.get_file_info(selector))
    names = [one.path.strip("/")[len(key.strip("/")) :] for one in listed if one.path.endswith(".arrow")]
    inner = {name.strip("/").rpartition("/")[0] for name in names}
    return [top / one if one else top for one in inner]


def _traces_of(folder: Path) -> list[Path]:
    try:
        return traces_in(folder)
    except NoTracesError:  # nothing but hidden files
        return []
    except TraceError as error:
        raise AnalysisError(str(error)) from None


def _unlisted(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # deleted meanwhile
        raise error


def make_tasks(paths: Sequence[Path], settings: ReplaySettings, *, workers: int) -> tuple[list[Task], list[str]]:
    """Return the tasks that replay all recordings of these files, the largest first, and what was left out, in words.

    A recording in segments is split where there are fewer tasks than `workers`.
    """
    found, notes = group_recordings(paths)
    stamps = dict(zip(paths, mapped(_stamp, paths), strict=True))
    recordings: dict[str, Recording] = {}
    for one in sorted(found, key=lambda one: -sum(stamps[path][1] for path in one.paths)):  # of copies the longest
        name = one.header.trace_id if one.header is not None and one.header.trace_id else one.name
        if name in recordings:
            notes.append(f"{one.name}: left out, {recordings[name].name} is the same recording")
        else:
            recordings[name] = one
    tasks: list[Task] = []
    for _, members in groupby(sorted(recordings.values(), key=_folder), key=_folder):
        plan = plan_jobs([Job(recording=one) for one in members])
        tasks += [_task(groups, settings, stamps) for groups in _apart(plan)]
    tasks.sort(key=lambda task: (-task.num_bytes, task.key))
    if len(tasks) < workers:
        tasks = [_split(task, settings, tasks, workers) for task in tasks]
    return tasks, notes


def _folder(recording: Recording) -> str:
    return str(recording.paths[0].parent)


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        found = path.stat()
    except OSError:  # a flight recorder deletes while we look
        return (path.name, 0, 0)
    return (path.name, found.st_size, found.st_mtime_ns)


def _apart(plan: ReplayPlan) -> list[list[list[Job]]]:
    """Return a plan's groups, in their order, those together whose ranks are compared with one another."""
    together = list(range(len(plan.groups)))  # of each group the first that it belongs to
    group_of = {id(job): number for number, group in enumerate(plan.groups) for job in group}
    for ranks in plan.ranks:
        numbers = {together[group_of[id(job)]] for job in ranks}
        together = [min(numbers) if one in numbers else one for one in together]
    found: dict[int, list[list[Job]]] = {}
    for number, group in zip(together, plan.groups, strict=True):
        found.setdefault(number, []).append(group)
    return list(found.values())


def _task(groups: list[list[Job]], settings: ReplaySettings, stamps: dict[Path, tuple[str, int, int]]) -> Task:
    jobs = [job for group in groups for job in group]
    ids = [job.recording.header.trace_id if job.recording.header is not None else job.recording.name for job in jobs]
    files = [[stamps[path] for path in job.recording.paths] for job in jobs]
    what = json.dumps([asdict(settings), sorted(zip(ids, files, strict=True))])
    return Task(
        key=hashlib.sha256(what.encode()).hexdigest()[:32],
        groups=groups,
        num_bytes=sum(size for file in files for _, size, _ in file),
        memory_bytes=PROCESS_BYTES + max(map(memory_needed, groups)),
    )


def _split(task: Task, settings: ReplaySettings, among: Sequence[Task], workers: int) -> Task:
    """Return a task with parts, if it is one recording in segments that is worth more than one worker."""
    if len(task.recordings) != 1:
        return task
    shares = round(workers * task.num_bytes / max(1, sum(one.num_bytes for one in among)))
    plan = split_plan(ReplayPlan(groups=task.groups), settings, workers=shares)
    if len(plan.groups) < 2:
        return task
    return replace(
        task, parts=tuple(replace(task, groups=[group], num_bytes=group_bytes(group)) for group in plan.groups)
    )
