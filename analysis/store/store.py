"""`report.duckdb`: the library's base as tables, its views and macros, in one file that any DuckDB client opens."""

import contextlib
import hashlib
import os
import shlex
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import duckdb

from ...kernels.user_cache import is_own, user_cache
from ...recorder.errors import first_line
from ...recorder.files import is_regular, read_small_file, replace_file
from ...replayer.report.report import STORE_NAME, check_report_folder
from ..errors import AnalysisError
from ..incidents.schema import INCIDENTS_NAME
from .connection import Interruptible, check_address_space, connect, private_folder
from .library import BASE, base_statements, comment_statements, derived_statements, library_hash
from .live import file_states, is_plain, make_raw_relations, plain_path
from .sources import Source

# What the build may hold in memory; what does not fit goes to the temporary folder.
MEMORY_LIMIT = "1536MB"


def build_store(source: Source) -> Path:
    """Write a report's `report.duckdb`, in place of an older one, and return its path.

    The file needs neither trace nor report afterwards. It is made beside and renamed, so that nobody sees half of it,
    and only this user can read it. Raises `AnalysisError`.
    """
    if source.report is None:
        run = f"run kvcanary-replay {shlex.quote(str(source.trace))}"
        raise AnalysisError(f"{source.trace}: no report beside it to hold {STORE_NAME}; {run}")
    if source.trace is None:
        raise AnalysisError(f"{source.problem}; name the place that it has moved to with --trace")
    check_writable(source.report)
    return write_store(source, source.report / STORE_NAME)


def made_store(source: Source) -> str:
    """Make the store of a report where none fits and the trace is at hand; return why it cannot be, "" if it is there."""
    if source.trace is not None and fresh_store(source) is None:
        try:
            build_store(source)
        except AnalysisError as error:
            return str(error)
    return ""


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
            _keep_stamp(target)
    except OSError as error:
        raise AnalysisError(f"{target}: cannot be written ({error.strerror or error})") from None
    except duckdb.Error as error:
        cause = first_line(error)  # what follows shows our own SQL
        raise AnalysisError(f"{target}: cannot be made: {cause}") from None
    return target


def check_writable(report: Path) -> None:
    """Raise `AnalysisError` if a report folder is not one that this user's replays write to."""
    try:
        check_report_folder(report)
    except OSError as error:
        raise AnalysisError(
            f"{report}: not written to: {error.strerror or error}; replay the trace again with --report DIR"
        ) from None


def fresh_store(source: Source) -> Path | None:
    """Return a report's store if this user's build made it of these very files: one that came with it may hold anything."""
    if source.report is None:
        return None
    store = source.report / STORE_NAME
    check_address_space()
    try:
        log = store.with_name(f"{store.name}.wal")  # which DuckDB would apply; ours is closed without one
        if not is_regular(store) or is_regular(log) or _kept_stamp(store) != _identity(store):
            return None
        with ExitStack() as resources:
            plain = plain_path(store.parent, resources) / store.name
            connection: Any = duckdb.connect(str(plain), read_only=True, config={"autoload_known_extensions": False})
            resources.callback(connection.close)
            connection.execute("set enable_external_access = false")
            found = dict(connection.execute("select key, value from store_info").fetchall())
            tables = {name for (name,) in connection.execute("select table_name from duckdb_tables()").fetchall()}
    except (duckdb.Error, OSError, UnicodeError):
        return None
    return store if tables >= {*BASE} and found.items() >= _stamp(source).items() else None


def _keep_stamp(store: Path) -> None:
    with contextlib.suppress(OSError):
        _note_of(store).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(_note_of(store), _identity(store).encode())


def _kept_stamp(store: Path) -> str:
    note = _note_of(store)
    return read_small_file(note).decode("utf-8", "replace") if is_own(note.parent.lstat()) else ""


def _note_of(store: Path) -> Path:
    return user_cache() / "stores" / hashlib.sha256(os.fsencode(store.resolve())).hexdigest()


def _identity(store: Path) -> str:
    """Return what identifies this very file: another one in its place gives something else."""
    found = store.stat()
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _fill(path: Path, source: Source, resources: ExitStack) -> None:
    connection = connect(str(path), resources, MEMORY_LIMIT, path.parent / "spill")
    interruptible = Interruptible(connection)
    try:
        _, states = make_raw_relations(connection, [source], resources)
        for statement in (*base_statements(stored=True), *derived_statements()):
            interruptible.run(partial(connection.execute, statement))
        if file_states(states) != states:
            raise AnalysisError(f"{source.name}: the trace was changed while its store was made; run it again")
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
    report = source.report or Path()
    incidents = report / INCIDENTS_NAME
    stamp = {
        "library": library_hash(),
        "summary": _file_stamp(report / "summary.json"),
        "incidents": _file_stamp(incidents) if incidents.is_file() else "",
    }
    return stamp | ({} if source.trace is None else {"trace": ", ".join(map(_file_stamp, source.files))})


def _file_stamp(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"
