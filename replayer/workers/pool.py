"""A plan's groups replayed by worker processes, one group a worker at a time; results in the plan's order.

A group waits for those whose ranks it is compared with; else the largest goes first, so that none is left alone at the
end. A worker that dies takes the group that it was at with it, and no other.
"""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from ...recorder.process.endings import ENDINGS
from ..executors.incremental.compiled_pass import compile_pass
from ..run.settings import Progress
from .group_replay import GroupResult, GroupTask, drop_parts
from .jobs import Job, ReplayPlan, group_bytes, usable_cores
from .server import start_server, start_worker
from .worker import BEGUN, STOP, TROUBLED, Done, work

_NOTHING: Final = Progress(0, 0, 0, 0, 0)


def replay_in_workers(
    plan: ReplayPlan,
    task: GroupTask,
    on_progress: Callable[[Progress], None],
    *,
    jobs: int,
    devices: Sequence[str] = (),
) -> Iterator[tuple[list[Job], GroupResult]]:
    """Yield each group of a plan with what came of it, in the plan's order.

    After Ctrl-C those under way are judged as far as they came, and the others left out; Ctrl-C once more ends the workers.
    Both raise `KeyboardInterrupt` if nothing had begun. `on_progress` is told how far all of it has come; `jobs` workers run at
    once, on `devices` in turn, if there are any, instead of the one that `task` names.
    """
    with _Pool(plan, task, jobs=jobs, devices=devices) as pool:
        shown = 0
        while shown < len(plan.groups):
            found = pool.results.pop(shown, None)
            if found is not None:
                yield plan.groups[shown], found
            elif pool.idle:  # interrupted before it began
                pass
            else:
                pool.advance(on_progress)
                continue
            shown += 1


class _Worker:
    """A process and the pipe to it; `group` is the number of the group that it is at, None for none."""

    def __init__(self, threads: int, device: str | None) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        try:
            self.process = start_worker(work, theirs, threads)
        except BaseException:  # Ctrl-C too: a worker that has begun already ends without it
            self.connection.close()
            raise
        finally:
            theirs.close()
        self.device = device
        self.group: int | None = None


@contextmanager
def _endings_ignored() -> Iterator[None]:
    """Ignore Ctrl-C and the like; to hold it back in one thread would leave it to the others, which libraries have made."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDINGS} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # not Python's own
                signal.signal(number, handler)


class _Pool:
    def __init__(self, plan: ReplayPlan, task: GroupTask, *, jobs: int, devices: Sequence[str]) -> None:
        self._plan = plan
        self._task = task
        self._jobs = min(jobs, len(plan.groups))
        self._free_devices = [devices[i % len(devices)] if devices else None for i in reversed(range(self._jobs))]
        self._threads = max(1, usable_cores() // self._jobs)
        self._workers: list[_Worker] = []
        self._after = [_compared_with(plan, number) for number in range(len(plan.groups))]
        self._waiting = sorted(range(len(plan.groups)), key=lambda number: -group_bytes(plan.groups[number]))
        self._progress = [_NOTHING._replace(bytes_total=group_bytes(group)) for group in plan.groups]
        self._finished: set[int] = set()
        self._begun = False
        self._stopping = False
        self.results: dict[int, GroupResult] = {}
        start_server(task.finish)
        if task.settings.executor == "interval" and task.settings.backend == "cpu":
            compile_pass(max(map(group_bytes, plan.groups), default=0))

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with _endings_ignored():  # another Ctrl-C would leave processes and files behind
            for worker in self._workers:
                if worker.group is None:
                    _send(worker.connection, None)
                else:
                    worker.process.kill()
            for worker in self._workers:
                worker.process.join(5)
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()
                worker.connection.close()
            for group in self._plan.groups if kind is not None else ():  # nobody is going to join them
                if group[0].stretch is not None:
                    drop_parts(group[0].report)

    @property
    def idle(self) -> bool:
        return not any(worker.group is not None for worker in self._workers) and (self._stopping or not self._waiting)

    def advance(self, on_progress: Callable[[Progress], None]) -> None:
        try:
            self._give()
            busy = {worker.connection: worker for worker in self._workers if worker.group is not None}
            for connection in wait(list(busy)) if busy else ():
                self._listen(busy[connection])  # type: ignore[index]  # only connections were given
            on_progress(self._sum())
        except KeyboardInterrupt:
            if self._stopping or not self._begun:
                raise
            self._stopping = True
            for worker in self._workers:
                if worker.group is not None:
                    _send(worker.connection, STOP)

    def _give(self) -> None:
        while not self._stopping and self._waiting:
            ready = [number for number in self._waiting if self._after[number] <= self._finished]
            running = [worker for worker in self._workers if worker.group is not None]
            if len(running) == self._jobs or not (ready or not running):
                return
            number = ready[0] if ready else self._waiting[0]
            worker = next((worker for worker in self._workers if worker.group is None), None)
            if worker is None:
                try:
                    worker = _Worker(self._threads, self._free_devices[-1])
                except OSError as error:  # no process, or no file, is left for it
                    if not running:
                        self._waiting.remove(number)
                        text = f"no process can be started for it ({error.strerror or error}); replay it with --jobs 1"
                        self._end(None, number, GroupResult(error=text))
                        continue
                    self._jobs = len(running)  # those that there are do it
                    return
                self._free_devices.pop()
                self._workers.append(worker)
            self._waiting.remove(number)
            worker.group = number
            settings: Any = self._task.settings
            if worker.device is not None:
                settings = replace(settings, device=worker.device)
            _send(worker.connection, (self._plan.groups[number], replace(self._task, settings=settings)))

    def _listen(self, worker: _Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        number = worker.group
        if number is None:
            return
        if message == BEGUN:
            self._begun = True
        elif message == TROUBLED:
            self._pass_over_behind(number)
        elif isinstance(message, Progress):
            self._progress[number] = message
        elif isinstance(message, Done):
            self._compared(number, message)
            self._end(worker, number, message.result)

    def _pass_over_behind(self, number: int) -> None:
        """Let nobody go on with the stretches behind one that is replayed to the recording's end."""
        stretch = self._plan.groups[number][0].stretch
        behind = range(number + 1, number + stretch.of - stretch.number) if stretch is not None else ()
        for worker in self._workers:
            if worker.group in behind:
                _send(worker.connection, STOP)
        for later in behind:
            if later in self._waiting:
                self._waiting.remove(later)
                self._finished.add(later)
                self._progress[later] = _NOTHING
                self.results[later] = GroupResult()

    def _end(self, worker: _Worker | None, number: int, result: GroupResult) -> None:
        if worker is not None:
            worker.group = None
        self._finished.add(number)
        self.results[number] = result
        last = self._progress[number]
        self._progress[number] = last._replace(bytes_read=last.bytes_total)

    def _bury(self, worker: _Worker) -> None:
        worker.process.join()
        self._workers.remove(worker)
        self._free_devices.append(worker.device)
        worker.connection.close()
        if worker.group is None:
            return
        group, code = self._plan.groups[worker.group], worker.process.exitcode or 0
        cause = f"ended with exit code {code}"
        if code < 0:
            cause = f"was ended by {signal.Signals(-code).name}"
            cause += ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        error = f"the process that replayed it {cause}; replay it again with --jobs 1, or on a larger machine"
        left = [str(job.report) for job in group if job.report is not None and Path(job.report).exists()]
        if left:
            error += f" ({', '.join(left)} is not whole)"
        self._end(worker, worker.group, GroupResult(error=error))

    def _compared(self, number: int, done: Done) -> None:
        """Take over what was compared; the ranks still to be compared with these get the digests."""
        for job, found in zip(self._plan.groups[number], done.compared, strict=True):
            if job.schedule is None or found is None:
                continue
            mine = job.schedule.log
            job.schedule.compared, job.schedule.differing, job.schedule.unrelated, log = found
            for other in [job.schedule for group in self._plan.groups for job in group] if log is not None else ():
                if other is not None and other.other is mine:
                    other.other = log
            job.schedule.log = log if log is not None else mine

    def _sum(self) -> Progress:
        return Progress(*map(sum, zip(*self._progress, strict=True)))


def _compared_with(plan: ReplayPlan, number: int) -> set[int]:
    """Return the numbers of the groups that must be done before a group: those of the ranks that it is compared with."""
    schedules = [[job.schedule for job in group if job.schedule is not None] for group in plan.groups]
    others = {id(schedule.other) for schedule in schedules[number] if schedule.other is not None}
    return {at for at, group in enumerate(schedules) if any(id(s.log) in others for s in group)} - {number}


def _send(connection: Connection, message: object) -> None:
    try:
        connection.send(message)
    except OSError:
        return  # it has died; whoever listens to it next will see
