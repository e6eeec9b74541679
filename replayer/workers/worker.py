"""What a worker process does: it replays the groups that it is given, one after another, until it is sent the end."""

import gc
import time
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

from ...recorder.process.endings import ignore_endings
from ..run.schedule import ScheduleLog
from ..run.settings import Progress
from .group_replay import GroupResult, GroupTask, replay_group
from .jobs import Job

STOP: Final = "stop"  # the user wants an end: what is being replayed is judged as far as it came
# What a worker says, beside its progress and what is done: it has its libraries, and begins to replay; what came up in a
# stretch is followed to the recording's end, so that the stretches behind it are not needed.
BEGUN: Final = "begun"
TROUBLED: Final = "troubled"
_PROGRESS_SECONDS: Final = 0.1


class Done(NamedTuple):
    """A group's result, and of each job with a schedule what that has come to."""

    result: GroupResult
    compared: list[tuple[int, int, bool, ScheduleLog | None] | None]


def work(connection: Connection, threads: int) -> None:
    """Replay what comes through `connection`, `(jobs, task)` each, with `threads` threads to read; None is the end."""
    ignore_endings()
    try:
        failed = load(threads)
        while (given := connection.recv()) is not None:
            if given != STOP:
                jobs, task = given
                found = Done(GroupResult(error=failed), [None] * len(jobs)) if failed else None
                connection.send(found or _replay(jobs, task, connection))
                gc.collect()  # its pools hang in a circle, and those of two do not fit everywhere
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone: nobody wants to know
        return


def load(threads: int | None = None) -> str:
    """Load the libraries, of which pyarrow is to use so many threads; return what keeps them from being loaded, or ""."""
    gc.disable()
    try:
        import numpy.ma  # noqa: F401  # which pyarrow asks for at its first array
        import pyarrow as pa

        from ...kernels.dispatch import prepare
        from ...kernels.replay_pass.state import STATE_LOOPS

        if threads is not None:
            pa.set_cpu_count(threads)
        prepare(*STATE_LOOPS, backend="cpu")
    except (OSError, MemoryError, ImportError, RuntimeError) as error:  # no memory, or no thread, left
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return (
            f"the process that replays it cannot load its libraries ({cause}); replay it with fewer --jobs, or on a larger "
            "machine"
        )
    gc.freeze()  # what libraries make stays until the end
    gc.enable()
    return ""


def _replay(jobs: list[Job], task: GroupTask, connection: Connection) -> Done:
    reported = 0.0
    connection.send(BEGUN)

    def on_progress(progress: Progress) -> None:
        nonlocal reported
        if time.monotonic() >= reported + _PROGRESS_SECONDS:
            reported = time.monotonic()
            connection.send(progress)
        while connection.poll():
            if connection.recv() == STOP:
                raise KeyboardInterrupt

    try:
        result = replay_group(jobs, task, on_progress, lambda: connection.send(TROUBLED))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001  # one recording's trouble must not be the others'
        from ...recorder.cli.program import unforeseen

        result = GroupResult(error=unforeseen(error))
    schedules = [job.schedule for job in jobs]
    return Done(result, [None if s is None else (s.compared, s.differing, s.unrelated, s.log) for s in schedules])
