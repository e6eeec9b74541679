"""What is done when a process ends by itself, in whichever way Python ends it."""

import atexit
from collections.abc import Callable
from multiprocessing.util import Finalize


def at_process_end(close: Callable[[], object], *, priority: int) -> Callable[[], None]:
    """Have `close` called when the process ends; return what takes that back.

    A process of `multiprocessing` ends with its finalizers, those of a higher `priority` first, and if it was forked with
    nothing else: `os._exit`, past `atexit`, which calls whoever came last first.
    """
    atexit.register(close)
    finalizer = Finalize(None, close, exitpriority=priority)

    def cancel() -> None:
        atexit.unregister(close)
        finalizer.cancel()

    return cancel
