"""Ending a trace in a process that SIGTERM is about to end: service managers send it to every process of a service."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any


def stop_on_sigterm(stop: Callable[[], None]) -> bool:
    """Have SIGTERM call `stop` before it ends the process, where the engine has left it at its default.

    The first one is the last that is looked at: a second ends the process at once. `stop` is called in a thread of its
    own, since the main thread may hold whatever `stop` needs; it goes on meanwhile. A process whose main thread is
    stuck in native code does not notice the first, nor would Python let it.

    Returns:
        Whether it was set: not outside the main thread, and not in place of a handler.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return False

    def end(number: int, _: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=stop_and_die, args=(number,), name="kvcanary-sigterm", daemon=True).start()

    def stop_and_die(number: int) -> None:
        try:
            stop()
        finally:
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    return True
