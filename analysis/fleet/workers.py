"""Who does tasks: processes of this machine through concurrent.futures, or those of a cluster through Ray.

What a lost process or machine was at is done once more. A process of ours is an executor of its own, so that whatever ends it
takes what it was at, and nothing else.
"""

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Final

from ...kernels.sparse import free_memory_bytes
from ...recorder.errors import error_text, first_line
from ...recorder.process.endings import ignore_endings
from ...replayer.workers.jobs import usable_cores
from ...replayer.workers.server import start_server
from ...replayer.workers.worker import load
from ..errors import AnalysisError
from .committing import Fleet

TRIES: Final = 3
_SHARE_OF_MEMORY: Final = 0.7
_MARGIN: Final = 1.5  # of what tasks have shown to take
_SUBMITTED_TO_RAY: Final = 1000  # more would lie in the driver's memory; so many let a cluster see that it may grow


class LostError(Exception):
    """Whoever was to do it was lost, as often as it was tried, or cannot do it; `str()` says how."""


@dataclass(slots=True, eq=False)
class _Call:
    act: Callable[..., Any]
    arguments: tuple[Any, ...]
    memory_bytes: int
    began: float
    tries: int = 1
    value: Any = None
    error: str = ""


class Processes:
    """`jobs` processes of this machine, each with its own of `devices`, if there are any; raises `AnalysisError`.

    `most_at_once` were at work at a time, and `busy_seconds` long all of them together; `held_back` says that there was not memory
    for all of them.
    """

    def __init__(self, jobs: int, devices: Sequence[str] = ()) -> None:
        start_server(perform)  # it loads the libraries, which each process would load for itself otherwise
        self._idle = [_Process(devices[i % len(devices)] if devices else "", jobs) for i in range(jobs)]
        self.size = jobs
        self.most_at_once, self.busy_seconds, self.held_back = 0, 0.0, False
        self._at_work: dict[Future[Any], tuple[_Process, _Call]] = {}
        free = free_memory_bytes()
        self._memory = None if free is None else _SHARE_OF_MEMORY * free
        self._kept_free = (1 - _SHARE_OF_MEMORY) * (free or 0)
        self._seen_share = 0.0

    def room(self, memory_bytes: int) -> bool:
        """Whether a process is idle, and memory left for one more; one task is done in any case."""
        if not self._idle:
            return False
        taken = sum(call.memory_bytes for _, call in self._at_work.values())
        if not self._at_work or self._memory is None or taken + memory_bytes <= self._memory:
            return True
        fits = self._fits(memory_bytes)
        self.held_back |= not fits
        return fits

    def _fits(self, memory_bytes: int) -> bool:
        """Whether there is memory for one more by what is used now: a virtual machine may be given more as it uses what it has."""
        free, share = free_memory_bytes() or 0, self._share_used
        owed = sum(
            max(0.0, share * call.memory_bytes - process.private_bytes()) for process, call in self._at_work.values()
        )
        return owed + share * memory_bytes <= free - self._kept_free

    @property
    def _share_used(self) -> float:
        """How much of what a task asks for it may take: all, until some have shown that so much is never touched."""
        return min(1.0, _MARGIN * self._seen_share) if self._seen_share else 1.0

    def submit(self, act: Callable[..., Any], *arguments: Any, memory_bytes: int) -> _Call:
        """Have a function of a module called; return the call, which as an argument of another stands for its result.

        Raises `LostError` if such an argument has none.
        """
        given = [self.result(one) if isinstance(one, _Call) else one for one in arguments]
        call = _Call(act, tuple(given), memory_bytes, time.monotonic())
        self._give(call)
        return call

    def _give(self, call: _Call) -> None:
        process = self._idle.pop()
        self._at_work[process.begin(call)] = (process, call)
        self.most_at_once = max(self.most_at_once, len(self._at_work))

    def done(self) -> Sequence[_Call]:
        """Wait until some are done; what a process took with it another one does."""
        found: list[_Call] = []
        while not found:
            for future in wait(self._at_work, return_when=FIRST_COMPLETED).done:
                process, call = self._at_work.pop(future)
                self._idle.append(process)
                try:
                    call.value, call.arguments = future.result(), ()
                except BrokenProcessPool:
                    process.end()
                    self._seen_share = 1.0  # for want of memory perhaps
                    call.tries += 1
                    if call.tries <= TRIES:
                        self._give(call)
                        continue
                    call.error = f"its process was ended {TRIES} times, as the system does when memory runs out"
                    call.error += "; replay it with --jobs 1, or on a larger machine"
                except OSError as error:
                    call.error = f"no process can be started for it ({error.strerror or error}); use fewer --jobs"
                except Exception as error:  # noqa: BLE001  # what cannot travel between processes, too
                    call.error = str(error) if isinstance(error, LostError) else error_text(error)
                self.busy_seconds += time.monotonic() - call.began
                if self.held_back:
                    self._seen_share = max(self._seen_share, process.peak_bytes() / max(1, call.memory_bytes))
                found.append(call)
        return found

    def result(self, call: _Call) -> Any:
        """Return what came of a call; raise `LostError`."""
        if call.error:
            raise LostError(call.error)
        return call.value

    def close(self) -> None:
        """End the processes, and what they are at."""
        for process in [*self._idle, *(one for one, _ in self._at_work.values())]:
            process.end()


class _Process:
    """An executor of one process, which is started with the first call, and anew after its end."""

    def __init__(self, device: str, jobs: int) -> None:
        self._device, self._threads = device, max(1, usable_cores() // jobs)
        self._executor: ProcessPoolExecutor | None = None
        self._pid: Future[int] | None = None

    def begin(self, call: _Call) -> Future[Any]:
        arguments = [self._placed(one) for one in call.arguments]
        try:
            if self._executor is None:
                context = get_context("forkserver")
                self._executor = ProcessPoolExecutor(1, context, initializer=_begin)
                self._pid = self._executor.submit(os.getpid)
            return self._executor.submit(perform, self._threads, call.act, *arguments)
        except (OSError, BrokenProcessPool) as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def private_bytes(self) -> int:
        """Return what it has of the machine's memory for itself; 0 if that is not known."""
        return self._status().get("RssAnon", 0)

    def peak_bytes(self) -> int:
        """Return the most that it ever had, libraries and files too; 0 if that is not known."""
        return self._status().get("VmHWM", 0)

    def _status(self) -> dict[str, int]:
        """Return what the system says of its memory, in bytes."""
        if self._pid is None or not self._pid.done() or self._pid.exception() is not None:
            return {}
        try:
            lines = Path(f"/proc/{self._pid.result()}/status").read_text(encoding="utf-8").splitlines()
        except OSError:  # it has just ended
            return {}
        fields = (line.split() for line in lines if line.endswith(" kB"))
        return {field[0].rstrip(":"): 1024 * int(field[1]) for field in fields}

    def _placed(self, one: Any) -> Any:
        if self._device and isinstance(one, Fleet):
            return replace(one, settings=replace(one.settings, device=self._device))
        return one

    def end(self) -> None:
        if self._executor is not None and self._pid is not None:
            with suppress(Exception):  # it has never begun, or is gone
                os.kill(self._pid.result(timeout=10), signal.SIGKILL)
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = None


def _begin() -> None:
    """Have this process end with the one that it works for, whatever ends that, and with nothing else."""
    ignore_endings()
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # type: ignore[func-returns-value]


_load = functools.cache(load)


def perform(threads: int, act: Callable[..., Any], *arguments: Any) -> Any:
    """Call `act` in a process that has its libraries; raise `LostError` if they cannot be loaded."""
    if why := _load(threads):
        raise LostError(why)
    return act(*arguments)


class RayCluster:
    """The processes of a Ray cluster at `address`; "local" starts one of `jobs` cores on this machine. Raises `AnalysisError`."""

    def __init__(self, address: str, *, jobs: int | None, gpu: bool) -> None:
        try:
            import ray
        except ImportError as error:
            raise AnalysisError(f"--address needs Ray ({error}): pip install 'kvcanary[ray]'") from None
        self._ray = ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing of a fleet goes to anybody
        here: dict[str, Any] = {"num_cpus": jobs, "include_dashboard": False} if address == "local" else {}
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR", **here)
            resources = ray.cluster_resources()
        except (OSError, RuntimeError, ValueError) as error:
            why = f"no Ray cluster answers at {address} ({first_line(error)})"
            raise AnalysisError(f"{why}; start one with ray start --head, or use --address local") from None
        if gpu and not resources.get("GPU"):
            ray.shutdown()
            raise AnalysisError(f"the Ray cluster at {address} has no GPU; leave out --device, or add a node with one")
        self.size = max(1, int(resources.get("CPU", 1)))
        # what no node has would be waited for without end
        self._largest = max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0)
        self._perform = ray.remote(num_cpus=1, num_gpus=int(gpu), max_retries=TRIES - 1)(perform)
        self._waiting: list[Any] = []

    def room(self, memory_bytes: int) -> bool:
        """Whether Ray may get one more; it knows which machine has the memory."""
        return len(self._waiting) < _SUBMITTED_TO_RAY

    def submit(self, act: Callable[..., Any], *arguments: Any, memory_bytes: int) -> Any:
        """Have a function called where memory and a core, or a GPU, are free; return the call, as `Processes` does."""
        placed = self._perform.options(memory=int(min(memory_bytes, self._largest)))
        self._waiting.append(placed.remote(1, act, *arguments))
        return self._waiting[-1]

    def done(self) -> Sequence[Any]:
        """Wait until some are done."""
        self._ray.wait(self._waiting)
        found, self._waiting = self._ray.wait(self._waiting, num_returns=len(self._waiting), timeout=0)
        return found

    def result(self, call: Any) -> Any:
        """Return what came of it; raise `LostError`."""
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            why = str(error.cause) if isinstance(error, self._ray.exceptions.RayTaskError) else first_line(error)
            raise LostError(f"{why}; kvcanary of one version must be on every machine, and memory enough") from None

    def close(self) -> None:
        """Leave the cluster, which ends what is under way for us."""
        self._ray.shutdown()


Workers = Processes | RayCluster
