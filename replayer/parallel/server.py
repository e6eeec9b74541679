"""The process that workers are forked from: it has loaded their libraries, which each would load for itself otherwise.

It is `multiprocessing`'s, one for the whole life of the process that asked for it, with the environment of that moment.
Where it cannot run, or cannot fork, each worker is a new process that loads for itself.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Final

_LOADED: Final = f"{__package__}.loaded"


def start_server(functions: Iterable[Callable[..., Any]] = ()) -> None:
    """Begin to load what workers need, in a process of its own, if there is none yet.

    Args:
        functions: what workers will call; their modules are loaded too.
    """
    modules = sorted({function.__module__ for function in functions})
    with _interrupts_held():  # for good in that process and its children: loading, they would end in tracebacks
        try:
            multiprocessing.set_forkserver_preload([*modules, _LOADED])
            forkserver.ensure_running()
        except OSError:  # whoever starts a worker does without
            return


def start_worker(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a process that calls `target`, forked from the server if that works; raise `OSError` if none can be started."""
    with _interrupts_held():
        resource_tracker.ensure_running()  # started with the first process, it would let interrupts through again
        try:
            return _started("forkserver", target, arguments)
        except (OSError, EOFError):  # the second is what is left of a server that ended
            return _started("spawn", target, arguments)


def _started(method: str, target: Callable[..., None], arguments: tuple[object, ...]) -> BaseProcess:
    process: BaseProcess = multiprocessing.get_context(method).Process(target=target, args=arguments, daemon=True)  # type: ignore[attr-defined]
    process.start()
    return process


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C, which a terminal sends to the processes that are started meanwhile too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
