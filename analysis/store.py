"""`report.duckdb`: the library's base as tables, its views and macros, in one file that any DuckDB client opens."""

import contextlib
import shlex
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from .errors import AnalysisError
from .incidents.schema import INCIDENTS_NAME
from .interrupting import Interruptible
from .library import comment_statements, library_hash, relation_statements
from .live import NO_LOOP_JOIN, make_raw_relations, quoted
from .sources import STORE_NAME, Source
from .trace_scan import is_plain, plain_path, private_folder

# What the build may hold in memory; what does not fit goes to the temporary folder.
MEMORY_LIMIT = "1536MB"


def build_store(source: Source) -> Path:
    """Write a report's `report.duckdb`, in place of an older one, and return its path.

    The file needs neither trace nor report afterwards. It is made beside and renamed, so that nobody sees half of it,
    and only this user can read it.

    Raises:
        AnalysisError: there is no report folder, the trace is not at hand, or the file cannot be written.
    """
    if source.report is None:
        raise AnalysisError(
            f"{source.trace}: no report beside it to hold {STORE_NAME}; run kvcanary-replay "
            f"{shlex.quote(str(source.trace))}"
        )
    if source.trace is None:
        raise AnalysisError(f"{source.problem}; name the place that it has moved to with --trace")
    return write_store(source, source.report / STORE_NAME)


def write_store(source: Source, target: Path) -> Path:
    """Write a store to any file; see `build_store`."""
    try:
        with ExitStack() as resources:
            folder = Path(resources.enter_context(private_folder(target.parent)))
            made = folder / STORE_NAME
            if is_plain(made):
                _fill(made, source, resources)
            else:  # DuckDB writes no file of such a name, by whatever link
                elsewhere = Path(resources.enter_context(private_folder())) / STORE_NAME
                _fill(elsewhere, source, resources)
                shutil.move(elsewhere, made)
            made.chmod(0o600)
            made.replace(target)
    except OSError as error:
        raise AnalysisError(f"{target}: cannot be written ({error.strerror or error})") from None
    except duckdb.Error as error:
        cause = (str(error).splitlines() or [""])[0]  # what follows shows our own SQL
        raise AnalysisError(f"{target}: cannot be made: {cause}") from None
    return target


def fresh_store(source: Source) -> Path | None:
    """Return a report's store if it was made of these very files by this library, else None."""
    if source.report is None:
        return None
    store = source.report / STORE_NAME
    if not store.is_file():
        return None
    try:
        with ExitStack() as resources:
            plain = plain_path(store.parent, resources) / store.name
            connection = resources.enter_context(contextlib.closing(duckdb.connect(str(plain), read_only=True)))
            found = dict(connection.execute("select key, value from store_info").fetchall())
    except (duckdb.Error, OSError, UnicodeError):
        return None
    expected = _stamp(source)
    return store if all(found.get(key) == value for key, value in expected.items()) else None


def _fill(path: Path, source: Source, resources: ExitStack) -> None:
    connection: Any = duckdb.connect(str(path), config={"autoinstall_known_extensions": False})
    interruptible = Interruptible(connection)
    try:
        connection.execute(f"set temp_directory = {quoted(str(path.parent / 'spill'))}")
        connection.execute(f"set memory_limit = '{MEMORY_LIMIT}'")
        connection.execute(NO_LOOP_JOIN)
        make_raw_relations(connection, [source], resources)
        for statement in relation_statements(stored=True):
            interruptible.run(partial(connection.execute, statement))
        for statement in comment_statements():
            connection.execute(statement)
        connection.execute("create table store_info (key varchar, value varchar)")
        connection.executemany("insert into store_info values (?, ?)", list(_stamp(source).items()))
        interruptible.run(partial(connection.execute, "checkpoint"))
    finally:
        interruptible.close()
        connection.close()


def _stamp(source: Source) -> dict[str, str]:
    """What a store is made of; of a trace that is not at hand nothing is asked."""
    stamp = {"library": library_hash(), "summary": _file_stamp((source.report or Path()) / "summary.json")}
    incidents = (source.report or Path()) / INCIDENTS_NAME
    stamp["incidents"] = _file_stamp(incidents) if incidents.is_file() else ""
    if source.trace is not None:
        stamp["trace"] = ", ".join(_file_stamp(path) for path in source.files)
    return stamp


def _file_stamp(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"
