"""One task replayed, and its result committed: reports, rows of the table, and last the result that makes it done.

Each is written beside its place and renamed, under a name that follows from the task, so that whoever is killed leaves nothing
half, and whoever does a task again changes nothing. What failed leaves no result, and is tried again by the next run.
"""

import contextlib
import fcntl
import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...recorder.cli.program import error_facts, unforeseen
from ...recorder.files import partial_path
from ...recorder.remote import RemotePath, as_path
from ...recorder.trace.files import is_locked
from ...recorder.trace.recordings import Recording
from ...replayer.report.report import STRETCH_PREFIX, SUMMARY_NAME, write_summary
from ...replayer.report.summary import EXIT_UNREADABLE, Summary
from ...replayer.run.settings import ReplaySettings
from ...replayer.workers.group_replay import GroupResult, GroupTask, joined_results, replay_group
from ...replayer.workers.jobs import Job
from ..errors import AnalysisError
from ..finishing import finish
from ..store.report_rows import add_report, mark_table, write_file
from .tasks import Task

_MUCH_BYTES: Final = 1 << 30
_RESULTS: Final = "results"
_RENAMES: Final = 5
_KEPT: Final = (
    *("verdict", "exit_code", "trace_id", "forwards", "tokens", "violations", "findings"),
    *("num_incidents", "num_gaps", "doubts", "seconds"),
)

Row = dict[str, Any]  # of a recording: `trace`, `exit_code`, and what was found, or `error` and `hint`


class PartResult(NamedTuple):
    """What came of a stretch, with the files of its report, for whoever joins them elsewhere."""

    result: GroupResult
    files: dict[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Where results go, a folder that all workers see or a URL, and how to replay; `node` as `kvcanary collect` has it."""

    out: Path
    settings: ReplaySettings
    node: str = ""
    all_reports: bool = False

    def prepare(self) -> None:
        """Make the table, so that what cannot be written is known before anything is replayed; raise `OSError`."""
        mark_table(self.table)

    @property
    def table(self) -> Path:
        """The table of reports, for `kvcanary sql`."""
        return self.out / "table"

    def place(self, key: str) -> Path:
        """Return where a task's result is, once there is one."""
        return self.out / _RESULTS / f"{key}.json"

    def committed(self, place: Path) -> list[Row] | None:
        """Return a task's result, None if there is none; raise `OSError`."""
        try:
            with place.open("rb") as file:
                return json.load(file)["recordings"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):  # not ours, or damaged: made anew
            return None

    def keys(self) -> set[str]:
        """Return the keys of the tasks that have a result; raise `OSError`."""
        folder = self.out / _RESULTS
        try:
            return {path.stem for path in folder.iterdir() if path.suffix == ".json"}
        except FileNotFoundError:
            return set()


def replay_task(task: Task, fleet: Fleet) -> list[Row]:
    """Replay a task and commit its result; return a row for each recording. Raises nothing that a recording may bring."""
    rows = _guarded(task, fleet, lambda scratch: _replayed(task, fleet, scratch))
    if task.memory_bytes > _MUCH_BYTES:
        gc.collect()  # pools hang in a circle, and those of two recordings do not fit everywhere
    return rows


def replay_part(task: Task, fleet: Fleet) -> PartResult:
    """Replay a stretch."""
    [[job]] = task.groups
    with tempfile.TemporaryDirectory(prefix="kvcanary-") as scratch:
        try:
            report = Path(scratch) / "report"
            result = replay_group([replace(job, report=report)], _how(fleet))
            folder = report / f"{STRETCH_PREFIX}{job.stretch.number:04d}" if job.stretch is not None else report
            there = folder.iterdir() if result.part is not None else ()
            return PartResult(result, {path.name: path.read_bytes() for path in there})
        except Exception as error:  # noqa: BLE001  # one recording's trouble must not be the others'
            return PartResult(GroupResult(error=unforeseen(error)), {})


def join_parts(task: Task, fleet: Fleet, *parts: PartResult) -> list[Row]:
    """Join what came of a task's parts to the recording's one result, and commit it."""
    return _guarded(task, fleet, lambda scratch: _joined(task, fleet, parts, scratch))


def failed(task: Task, error: str) -> list[Row]:
    """Return the rows of a task that could not be done."""
    return [_error_row(one, error) for one in task.recordings]


def _error_row(recording: Recording, error: str) -> Row:
    return {"trace": recording.name, **error_facts(error), "exit_code": EXIT_UNREADABLE}


def _how(fleet: Fleet) -> GroupTask:
    no_room = "make room, and run the same command again"
    return GroupTask(settings=fleet.settings, explicit=True, all_there=True, finish=finish, no_room=no_room)


def _guarded(task: Task, fleet: Fleet, act: Callable[[Path], list[Row]]) -> list[Row]:
    rows = _attempted(task, fleet, act)
    if any("error" in row for row in rows):
        with contextlib.suppress(OSError):
            return fleet.committed(fleet.place(task.key)) or rows  # another run has done it meanwhile
    return rows


def _attempted(task: Task, fleet: Fleet, act: Callable[[Path], list[Row]]) -> list[Row]:
    try:
        if (there := fleet.committed(fleet.place(task.key))) is not None:
            return there  # by a worker that was lost behind its last step
        with _scratch(task, fleet) as scratch:
            rows = act(scratch)
            if all(is_final(row) for row in rows):
                write_file(fleet.place(task.key), json.dumps({"recordings": rows}).encode())
    except OSError as error:
        why = f"{error.filename or fleet.out}: {error.strerror or error}"
        return failed(task, f"the result cannot be kept ({why}); mend that and run the same command again")
    except AnalysisError as error:
        return failed(task, str(error))
    except Exception as error:  # noqa: BLE001  # one recording's trouble must not be the others'
        return failed(task, unforeseen(error))
    return rows


def is_final(row: Row) -> bool:
    """Whether a row would be the same once more; the gaps of what lies in a store may be the store's, and pass."""
    return "error" not in row and not (row["num_gaps"] and isinstance(as_path(row["trace"]), RemotePath))


@contextlib.contextmanager
def _scratch(task: Task, fleet: Fleet) -> Iterator[Path]:
    """Give a folder to write reports to, on the disk of a local target; what a killed worker left of this task goes.

    It is locked: another run may be at the same task, and what it writes to stays.
    """
    prefix, where = f"{task.key}.", None
    if not isinstance(fleet.out, RemotePath):
        where = fleet.out / ".scratch"
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=where, ignore_cleanup_errors=True) as scratch:
        with _opened(Path(scratch)) as mine:
            with contextlib.suppress(OSError):  # no locks here: nothing is cleared away then
                fcntl.flock(mine, fcntl.LOCK_EX)
            yield Path(scratch)
        for left in where.glob(f"{prefix}*") if where is not None else ():
            with contextlib.suppress(OSError), _opened(left) as theirs:
                if not is_locked(theirs, unknown=True):
                    shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _replayed(task: Task, fleet: Fleet, scratch: Path) -> list[Row]:
    rows: list[Row] = []
    for group in task.groups:
        jobs = [replace(job, report=scratch / f"{len(rows) + at}.report") for at, job in enumerate(group)]
        result = replay_group(jobs, _how(fleet))
        rows += _rows(task, fleet, jobs, result)
    return rows


def _joined(task: Task, fleet: Fleet, parts: Sequence[PartResult], scratch: Path) -> list[Row]:
    report = scratch / "0.report"
    groups: list[tuple[list[Job], GroupResult]] = []
    for one, (result, files) in zip(task.parts, parts, strict=True):
        [[job]] = one.groups
        if result.part is not None and job.stretch is not None:
            folder = report / f"{STRETCH_PREFIX}{job.stretch.number:04d}"
            folder.mkdir(mode=0o700, parents=True)
            for name, content in files.items():
                (folder / name).write_bytes(content)
            result.part.summary.report = str(folder)
        groups.append(([replace(job, report=report)], result))
    [(jobs, joined)] = joined_results(groups, _how(fleet))
    return _rows(task, fleet, jobs, joined)


def _rows(task: Task, fleet: Fleet, jobs: Sequence[Job], result: GroupResult) -> list[Row]:
    if result.error:
        return [_error_row(job.recording, result.error) for job in jobs]
    return [_row(task, fleet, summary, result.notes) for summary in result.summaries]


def _row(task: Task, fleet: Fleet, summary: Summary, notes: Sequence[str]) -> Row:
    """Keep a recording's report where there is something to look at, put it into the table, and return its row."""
    folder, kept = Path(summary.report or ""), None
    if summary.verdict.exit_code or fleet.all_reports:
        kept = fleet.out / "reports" / f"{Path(summary.trace).stem}-{summary.header.trace_id[:8]}-{task.key[:8]}.report"
    summary.report = str(kept) if kept is not None else None
    name = add_report(folder, fleet.table, node=fleet.node, place=summary.report)
    if kept is not None:
        write_summary(summary, folder)
        _keep(folder, kept)
    found = summary.to_json()
    return {
        "trace": summary.trace,
        **{name: found[name] for name in _KEPT},
        "report": summary.report,
        "row": name,
        "notes": list(notes),
    }


def _keep(folder: Path, kept: Path) -> None:
    if isinstance(kept, RemotePath):
        # where the summary is, the report is whole
        for path in sorted(folder.iterdir(), key=lambda one: one.name == SUMMARY_NAME):
            write_file(kept / path.name, path.read_bytes())
        return
    kept.parent.mkdir(mode=0o700, exist_ok=True)
    for left in reversed(range(_RENAMES)):
        old = partial_path(kept)
        with contextlib.suppress(FileNotFoundError):  # of a worker that was lost before the result was there
            kept.rename(old)
        try:
            folder.rename(kept)
        except OSError:  # another run's has come there in between
            if not left:
                raise
        else:
            return
        finally:
            shutil.rmtree(old, ignore_errors=True)
