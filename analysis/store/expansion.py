"""Merged violations back to one row a forward: exactly the rows, in exactly the order, that stepwise replay writes.

A merged row says since which event it was found and in how many forwards; the trace's forwards and sweeps say the rest.
DuckDB joins them, and spills what does not fit into memory.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ...recorder.trace.batch import TraceBatch
from ...replayer.report.merged.turns import SWEEP_TAGS, WRITES, launch_ranks
from ...replayer.report.violations import VIOLATION_SCHEMA
from ...replayer.run.streams import SegmentStream
from ..errors import AnalysisError
from ..incidents.places import open_parquet, require_columns
from .connection import connect
from .library import sql_sections

MAX_ROWS: Final = 1 << 18  # of a table given
_MEMORY_LIMIT: Final = "4GB"
_TOLD: Final = (
    *("event", "forward", "time_ns", "kind", "mode", "runner", "request_ids", "req_pool_indices"),
    *("sweep_group", "sweep_slot", "sweep_position"),
)


_WRONG: Final = {
    "order": "a violation of event {event} comes before event {before}, or counts for no forward: the report is of another "
    "trace, or not in its order; replay the trace again",
    "request": "event {event} of the trace does not hold the request of a violation found there: the report is of another "
    "trace; replay the trace again",
    "few": "a violation of event {event} was found in more forwards than the trace has: it is another trace, or was cut "
    "short since; replay it again",
    "end": "a violation of event {event} ends in another forward than the report says: it is of another trace; replay the "
    "trace again",
}


class ExpansionError(AnalysisError):
    """A report's rows cannot be expanded with this trace; `str()` says why."""


def read_violations(path: Path) -> Iterator[pa.Table]:
    """Yield a report's violations, a row group at a time; raise `AnalysisError` if the file is no report's or missing."""
    if not path.is_file():
        raise ExpansionError(f"{path}: missing; name the folder that kvcanary-replay wrote")
    with open_parquet(path) as parquet:
        require_columns(path, parquet, VIOLATION_SCHEMA.names)
        for group in range(parquet.num_row_groups):
            yield parquet.read_row_group(group, columns=VIOLATION_SCHEMA.names)


def expand(violations: pa.Table, trace: Path | Sequence[Path]) -> pa.Table:
    """Return one row a violation and forward, as stepwise replay has them, in one table; see `expand_tables`."""
    tables = list(expand_tables([violations], trace))
    return pa.concat_tables(tables) if tables else VIOLATION_SCHEMA.empty_table()


def expand_tables(violations: Iterable[pa.Table], trace: Path | Sequence[Path]) -> Generator[pa.Table, None, None]:
    """Yield one row a violation and forward, in tables of at most `MAX_ROWS`, of a report's rows in its order.

    `trace` is the one that they were found in, or its segments in their order. Raises `ExpansionError` if they were not
    found in this trace, `TraceError` if it cannot be read at all.
    """
    stream, sql = SegmentStream([trace] if isinstance(trace, Path) else list(trace)), sql_sections("expand", "rows")
    with ExitStack() as resources:
        connection = connect(":memory:", resources, _MEMORY_LIMIT)
        rows = (batch for table in violations for batch in table.select(VIOLATION_SCHEMA.names).to_batches())
        if not _keep(connection, "rows", rows):
            return
        _keep(connection, "events", (item.record_batch for item in stream.stream() if isinstance(item, TraceBatch)))
        order = launch_ranks(stream.header)
        groups, tags, writes = np.indices(order.shape).reshape(3, -1)
        ranks = {"group": groups, "launch_tag": tags, "is_write": writes, "swept": SWEEP_TAGS[tags]}
        connection.register("ranks", pa.table({**ranks, "launch_rank": order.ravel()}))
        for name in ("given", "turns", "found"):
            connection.execute(sql[name].format(writes=WRITES))
        if wrong := connection.execute(sql["wrong"]).fetchone():
            raise ExpansionError(_WRONG[wrong[0]].format(event=wrong[1], before=wrong[2]))
        for batch in connection.sql(sql["rows"]).to_arrow_reader(MAX_ROWS):
            for start in range(0, batch.num_rows, MAX_ROWS):
                table = pa.table(batch.slice(start, MAX_ROWS))
                yield table.select(VIOLATION_SCHEMA.names).cast(VIOLATION_SCHEMA)


def _keep(connection: Any, name: str, batches: Iterator[pa.RecordBatch]) -> bool:
    """Make a table of batches, as far as the join needs them; return whether there are any."""
    first = next(batches, None)
    if first is None:
        return False
    names = [column for column in first.schema.names if name == "rows" or column in _TOLD]
    chosen = (batch.select(names) for batch in chain([first], batches))
    connection.register(f"_{name}", pa.RecordBatchReader.from_batches(first.select(names).schema, chosen))
    connection.execute(f"create temp table {name} as from _{name}")
    return True
