"""What ends a program from outside - Ctrl-C, SIGTERM, a closed terminal - and what is done when a process ends by itself."""

import atexit
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_endings() -> None:
    """Ignore them: in workers, which their parent ends, and in a program that has been ended and is clearing away."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def endings_deferred() -> Iterator[None]:
    """Let what ends a program wait until what is inside is done: a file that is half written helps nobody. What came is
    handled afterwards, as it would have been at once. Only the main thread hears of signals; elsewhere nothing waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: handler for number in ENDINGS if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, lambda *what: came.append(what))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for came_number, frame in came[:1]:
        handlers[signal.Signals(came_number)](came_number, frame)


def at_process_end(close: Callable[[], object], *, priority: int) -> Callable[[], None]:
    """Have `close` called when the process ends; return what takes that back. A process of `multiprocessing` ends with
    its finalizers, those of a higher `priority` first, and if it was forked with nothing else: `os._exit`, past
    `atexit`, which calls whoever came last first.
    """
    from multiprocessing.util import Finalize

    atexit.register(close)
    finalizer = Finalize(None, close, exitpriority=priority)

    def cancel() -> None:
        atexit.unregister(close)
        finalizer.cancel()

    return cancel
