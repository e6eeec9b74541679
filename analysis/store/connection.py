"""How DuckDB is begun: what it may do, where it spills, and how Ctrl-C reaches it."""

import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import current_thread, main_thread
from typing import Any, Final, TypeVar

import duckdb

from ..errors import AnalysisError

_MAX_THREADS: Final = 8
# Of address space, with all libraries, most of it never used: measured with DuckDB 2.0 on two cores, and what glibc reserves a thread.
_ADDRESSES_BYTES: Final = 2 << 30
_THREAD_BYTES: Final = 160 << 20
_SECONDS_BETWEEN: Final = 0.1  # between two tries to stop a query; one that comes before it has begun is lost
Result = TypeVar("Result")


def quoted(text: str) -> str:
    """Return text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def connect(database: str, resources: ExitStack, memory_limit: str, spill: Path | None = None) -> Any:
    """Return a DuckDB connection that fetches nothing from outside and spills into a private folder, or into `spill`.

    Raises `AnalysisError` where the process may not have the address space for it.
    """
    check_address_space()
    config: Any = {"autoinstall_known_extensions": False, "python_enable_replacements": False}
    connection = duckdb.connect(database, config=config)
    resources.callback(connection.close)
    folder = resources.enter_context(private_folder()) if spill is None else str(spill)
    connection.execute(f"set temp_directory = {quoted(folder)}")
    connection.execute(f"set memory_limit = {quoted(memory_limit)}")
    if spill is None:
        connection.execute(f"set threads = {min(os.cpu_count() or 1, _MAX_THREADS)}")
    # DuckDB takes a trace, whose number of rows it does not know, for a few rows, and would join as of by trying all pairs.
    connection.execute("set asof_loop_join_threshold = 0")
    return connection


def check_address_space() -> None:
    """Raise `AnalysisError` if `ulimit -v` leaves DuckDB less than it needs: it ends the process where a thread cannot begin."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = _ADDRESSES_BYTES + min(os.cpu_count() or 1, _MAX_THREADS) * _THREAD_BYTES
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise AnalysisError(
            f"SQL needs {needed / 2**30:.1f} GiB of address space, of which it uses little, and this process may have "
            f"{limit / 2**30:.1f} GiB: allow it ulimit -v {needed // 1024}; to bound memory, take a control group instead "
            "(systemd-run --scope -p MemoryMax=4G ...)"
        )


class Interruptible:
    """Does work on a DuckDB connection in another thread, so that the main one can ask DuckDB to stop at Ctrl-C."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvcanary-sql")

    def run(self, work: Callable[[], Result]) -> Result:
        """Return what the work returns; raises what it raises, and `KeyboardInterrupt`."""
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


def private_folder(inside: Path | None = None) -> TemporaryDirectory[str]:
    """Return a new temporary folder that only this user can read: tokens are private."""
    return TemporaryDirectory(prefix=".kvcanary-" if inside else "kvcanary-", dir=inside)
