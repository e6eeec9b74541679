"""Ctrl-C while DuckDB computes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import current_thread, main_thread
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

_SECONDS_BETWEEN: Final = 0.1  # between two tries to stop a query; one that comes before it has begun is lost


class Interruptible:
    """Does work on a DuckDB connection so that Ctrl-C ends it soon.

    DuckDB itself looks for Ctrl-C only between some of its steps, and one step may last as long as the query. So the
    work is done in another thread, and the main one, which waits for it, tells DuckDB to stop.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvcanary-sql")

    def run(self, work: Callable[[], Result]) -> Result:
        """Do the work and return what it returns; raises what it raises, and `KeyboardInterrupt`."""
        if current_thread() is not main_thread():  # Ctrl-C never comes here
            return work()
        done = self._thread.submit(work)
        try:
            return done.result()
        except KeyboardInterrupt:
            while not done.done():
                self._connection.interrupt()
                wait([done], _SECONDS_BETWEEN)
            raise

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
