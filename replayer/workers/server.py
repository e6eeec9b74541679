"""The process that workers are forked from: it has loaded their libraries, which each would load for itself otherwise.

It is `multiprocessing`'s, one for the whole life of the process that asked for it, with the environment of that moment.
Where it cannot run, or cannot fork, each worker is a new process that loads for itself.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, spawn, util
from multiprocessing.process import BaseProcess
from typing import Any, Final

_LOADED: Final = f"{__package__}.loaded"


def start_server(function: Callable[..., Any] | None = None) -> None:
    """Begin to load what workers need, the module of `function` too, in a process of its own, if there is none yet."""
    modules = [function.__module__] if function is not None else []
    try:
        with _starting():  # Ctrl-C is held back for good in that process and its children
            multiprocessing.set_forkserver_preload([*modules, _LOADED])
            forkserver.ensure_running()
    except OSError:  # whoever starts a worker does without
        return


def start_worker(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a process that calls `target`, forked from the server if that works; raise `OSError` if none can be started."""
    with _starting():
        try:
            return _started("forkserver", target, arguments)
        except (OSError, EOFError):  # the second is what is left of a server that ended
            return _started("spawn", target, arguments)


def _started(method: str, target: Callable[..., None], arguments: tuple[object, ...]) -> BaseProcess:
    process: BaseProcess = multiprocessing.get_context(method).Process(target=target, args=arguments, daemon=True)  # type: ignore[attr-defined]  # every context has it
    process.start()
    util.Finalize(None, process.kill, exitpriority=0)  # at our end, where nobody did before; it ignores what is kinder
    return process


@contextmanager
def _starting() -> Iterator[None]:
    """Hold back Ctrl-C, which a terminal sends to what is started meanwhile too: loading, it would end in a traceback."""
    with _same_modules():
        resource_tracker.ensure_running()  # started with the first process, it would let interrupts through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _same_modules() -> Iterator[None]:
    """Have processes that are started meanwhile find the modules that this one finds.

    Not every version of Python gives a server the places to look in: it would look into the current folder first, which may hold
    anybody's files.
    """
    path = [str(folder) for folder in spawn.get_preparation_data("")["sys_path"] if folder]
    given = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
