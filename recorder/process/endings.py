"""What ends a program from outside: Ctrl-C, SIGTERM, a closed terminal."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_endings() -> None:
    """Ignore them: in workers, since they go to the whole process group and the parent tells its workers itself; in a
    program that has been ended and is clearing away.
    """
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def endings_deferred() -> Iterator[None]:
    """Let what ends a program wait until what is inside is done: a file that is half written helps nobody.

    What came is handled afterwards, as it would have been at once. Only the main thread hears of signals; elsewhere
    nothing waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = {number: signal.getsignal(number) for number in ENDINGS}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda *what: came.append(what))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for came_number, frame in came[:1]:
        handler = before[signal.Signals(came_number)]
        if callable(handler):
            handler(came_number, frame)
