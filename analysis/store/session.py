"""An open session: SQL over traces and reports, answered as Arrow or Polars."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import duckdb
import pyarrow as pa

from ...recorder.errors import first_line
from ...recorder.remote import as_path
from ..errors import AnalysisError, SqlError
from .connection import Interruptible, connect, quoted
from .library import BASE, DERIVED, base_statements, derived_statements, sql_file
from .live import FileStates, file_states, make_raw_relations, plain_path
from .sources import Source, find_sources, read_summary
from .store import fresh_store

if TYPE_CHECKING:
    import polars as pl

ROWS_PER_BATCH = 100_000
MEMORY_LIMIT: Final = "4GB"  # of a query; what does not fit is spilled


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A relation of a session, as `report.violations`."""

    session: "SqlSession"
    name: str

    def lazy(self) -> "pl.LazyFrame":
        """Return a lazy Polars frame, which asks DuckDB for the rows and columns that are used; see `SqlSession.lazy`."""
        return self.session.lazy(f"from {self.name}")


class SqlSession:
    """SQL over `sources`, traces and reports; a context manager. `stored`: it answers from report.duckdb.

    Each relation is an attribute: `report.violations.lazy()` is a Polars frame.
    """

    def __init__(
        self, connection: Any, sources: Sequence[Source], resources: ExitStack, *, stored: bool, states: FileStates
    ) -> None:
        self.sources, self.stored = tuple(sources), stored
        self._connection, self._resources, self._states = connection, resources, states
        self._interruptible = Interruptible(connection)
        self._open: pa.RecordBatchReader | None = None

    def sql(self, query: str) -> pa.Table:
        """Run SQL and return the last statement's rows; raise `SqlError` with DuckDB's message."""
        return self.batches(query).read_all()

    def batches(self, query: str) -> pa.RecordBatchReader:
        """Run SQL and return the last statement's rows as record batches; raise `SqlError`, also under way. The next query ends them."""
        if self._open is not None:
            self._open.close()  # DuckDB begins nothing beside it
            self._open = None
        if file_states(self._states) != self._states:  # what was checked is what is used
            raise SqlError("a trace was changed since it was opened; open it again")
        try:
            self._open = self._interruptible.run(lambda: self._begin(query))
        except (duckdb.Error, pa.ArrowException) as error:
            raise SqlError(str(error)) from None
        if self._open is None:
            return pa.table({}).to_reader()
        return pa.RecordBatchReader.from_batches(self._open.schema, self._read(self._open))

    def _begin(self, query: str) -> pa.RecordBatchReader | None:
        result = self._connection.sql(query)
        return None if result is None else result.to_arrow_reader(ROWS_PER_BATCH)

    def _read(self, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        try:
            while (batch := self._interruptible.run(lambda: next(reader, None))) is not None:
                yield batch
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise SqlError(str(error)) from None

    def polars(self, query: str) -> "pl.DataFrame":
        """Run SQL and return the last statement's rows as a Polars frame; raise `SqlError`, `AnalysisError` without polars."""
        pl = _polars()
        frame = pl.from_arrow(self.sql(query))
        return frame if isinstance(frame, pl.DataFrame) else frame.to_frame()

    def __getattr__(self, name: str) -> "Relation":
        if name in BASE or ("views", name) in DERIVED:
            return Relation(session=self, name=name)
        raise AttributeError(f"no relation {name!r}; relations() lists them")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *BASE, *(name for folder, name in DERIVED if folder == "views")]

    def lazy(self, query: str) -> "pl.LazyFrame":
        """Return a query's rows as a lazy Polars frame. From report.duckdb it reads what is used, else everything at once.

        Raises `SqlError`, and `AnalysisError` without polars.
        """
        if not self.stored:  # what was opened belongs to this connection, which does one thing at a time
            return self.polars(query).lazy()
        _polars()
        try:
            return self._connection.cursor().sql(query).pl(lazy=True)
        except duckdb.Error as error:
            raise SqlError(str(error)) from None

    def relations(self) -> dict[str, str]:
        """Return the library's relations and macros with their descriptions."""
        named = [*(("base", name) for name in BASE), *DERIVED]
        return {name: sql_file(folder, name).description for folder, name in named}

    def words(self) -> list[str]:
        """Return the names of relations, columns and macros, and SQL's own words, for completion."""
        named = self.sql(
            "select column_name as word from information_schema.columns where column_name[1] <> '_' "
            "union select keyword_name from duckdb_keywords() where keyword_category in ('reserved', 'type_function')"
        )
        return sorted({*self.relations(), *named["word"].to_pylist()})

    def interrupt(self) -> None:
        """Stop the running query."""
        self._connection.interrupt()

    def close(self) -> None:
        """Close the session and remove its temporary files."""
        self._interruptible.close()
        self._connection.close()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _polars() -> Any:
    try:
        import polars as pl
    except ModuleNotFoundError:
        raise AnalysisError("polars is not installed: pip install 'kvcanary[replay]'") from None
    return pl


def open_report(
    path: str | os.PathLike[str], *, trace: str | os.PathLike[str] | None = None, unlocked: bool = False
) -> SqlSession:
    """Open a report folder, from its report.duckdb where this user made one that fits, else from the files themselves.

    `trace` is where its trace is now, if it has moved. `unlocked` lets the SQL read and write files, load extensions and change
    DuckDB's settings. Raises `AnalysisError` if there is no report, or no readable one.
    """
    report = as_path(path)
    read_summary(report)  # says so where a trace was given
    return open_sources(find_sources([report], trace=None if trace is None else as_path(trace)), unlocked=unlocked)


def open_traces(*paths: str | os.PathLike[str], unlocked: bool = False) -> SqlSession:
    """Open traces and report folders together; the column `trace` says which is which. `unlocked` as in `open_report`.

    Raises `AnalysisError` if a path is neither a trace nor a report, or none is given.
    """
    if not paths:
        raise AnalysisError("no trace is given; name at least one trace or report folder")
    return open_sources(find_sources([as_path(path) for path in paths]), unlocked=unlocked)


def open_sources(
    sources: Sequence[Source], *, use_store: bool = True, unlocked: bool = False, memory_limit: str = MEMORY_LIMIT
) -> SqlSession:
    """Open sources: from their stores if each has one that fits, else from their files; raise `AnalysisError`.

    Unless `unlocked`, what the SQL can reach is what was opened: no other file, no extension, no setting.
    """
    with ExitStack() as resources:
        connection = connect(":memory:", resources, memory_limit)
        stores = [fresh_store(source) for source in sources] if use_store else [None]
        states: FileStates = {}
        try:
            if all(stores):
                opened = _attach(connection, list(zip(sources, stores, strict=True)), resources)
            else:
                opened, states = make_raw_relations(connection, sources, resources)
                with _emptied(connection, ["raw_events"], temp=True):
                    for statement in base_statements(stored=False):
                        connection.execute(statement)
                    with _emptied(connection, BASE):
                        for statement in derived_statements():
                            connection.execute(statement)
            if not unlocked:
                lock(connection, opened)
        except duckdb.Error as error:
            if "KeyboardInterrupt" in str(error):  # Ctrl-C while DuckDB asks us for a relation
                raise KeyboardInterrupt from None
            named = ", ".join(str(source.report or source.trace) for source in sources)
            cause = first_line(error)  # what follows shows our own SQL
            raise AnalysisError(
                f"{named}: cannot be opened: {cause}; where a report's file is damaged, replay the trace again"
            ) from None
        return SqlSession(connection, sources, resources.pop_all(), stored=all(stores), states=states)


@contextmanager
def _emptied(connection: Any, names: Iterable[str], *, temp: bool = False) -> Iterator[None]:
    """Let empty tables of the same columns stand for views, so that what is made over these meanwhile is made quickly.

    DuckDB binds all that a view or macro builds on, down to the files, whenever one is made: most of opening a report.
    """
    columns: dict[str, list[str]] = {name: [] for name in names}
    asked = "select table_name, column_name, data_type from duckdb_columns() where not internal order by table_oid, column_index"
    for name, column, kind in connection.execute(asked).fetchall():
        if name in columns:
            columns[name].append(f'"{column.replace(chr(34), chr(34) * 2)}" {kind}')
    for name, shown in columns.items():
        connection.execute(f"alter view {name} rename to _of_files_{name}")
        connection.execute(f"create {'temp ' if temp else ''}table {name} ({', '.join(shown)})")
    yield
    for name in columns:
        connection.execute(f"drop table {name}")
        connection.execute(f"alter view _of_files_{name} rename to {name}")


def lock(connection: Any, opened: Sequence[str]) -> None:
    """Let a connection reach nothing but what is registered, files `opened`, and its spill folder."""
    spill = connection.execute("select current_setting('temp_directory')").fetchone()[0]
    connection.execute(f"set allowed_directories = [{quoted(spill)}]")
    connection.execute(f"set allowed_paths = [{', '.join(map(quoted, opened))}]")
    connection.execute("set autoload_known_extensions = false")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")


def _attach(connection: Any, stores: Sequence[tuple[Source, Path | None]], resources: ExitStack) -> list[str]:
    """Make one view a base relation, over all stores; return the stores' paths."""
    opened = [str(plain_path(store.parent, resources) / store.name) for _, store in stores if store is not None]
    for number, path in enumerate(opened):
        connection.execute(f"attach {quoted(path)} as store_{number} (read_only)")
    for name in BASE:
        parts = [
            f"select * replace ({quoted(source.name)} as trace) from store_{number}.{name}"
            for number, (source, _) in enumerate(stores)
        ]
        connection.execute(f"create view {name} as " + " union all by name ".join(parts))
    for statement in derived_statements():
        connection.execute(statement)
    return opened
