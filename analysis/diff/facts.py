"""The facts of each trace, row by row, in Parquet files on disk, and the SQL in `sql/diff/` by which DuckDB joins them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ...kernels.arrays import Int64Array
from ..store.library import sql_sections, table_schema

FACTS: Final[dict[str, pa.Schema]] = {
    # a request became known, or its prompt did
    "requests": table_schema("request_id bigint, name varchar, room bigint, prompt_len bigint, event bigint"),
    "prompts": table_schema("request_id bigint, prompt_hash bigint, event bigint"),
    "statuses": table_schema("request_id bigint, event bigint, status varchar, losses bigint"),
    # a request's part of a forward; `losses`: how often something was lost before it; `windows` 1: all its sliding groups were
    # seen to read; `written`: tokens that the runner's forwards before it wrote
    "batches": table_schema(
        "request_id bigint, runner tinyint, event bigint, forward bigint, mode varchar, prefix integer, extend integer, "
        "losses bigint, windows tinyint, written bigint"
    ),
    # a token written; `guess` 0: settled, 1: a target's that may be rejected, 2: a draft's, 3: sent to or received
    # from another engine; `round`: where a draft's guessing began, else -1 (-2: lost);
    # `unsure` 1: what it read was lost, so that `reads` says nothing
    "tokens": table_schema(
        "request_id bigint, runner tinyint, position integer, event bigint, forward bigint, guess tinyint, round integer, "
        "token bigint, fed bigint, reads bigint, misreads bigint, unsure tinyint"
    ),
    # the first position of a request's part of a forward that led elsewhere
    "misreads": table_schema(
        "request_id bigint, runner tinyint, event bigint, pool_group integer, position integer, slot bigint, "
        "writer bigint, writer_position bigint, state varchar"
    ),
    "samples": table_schema("request_id bigint, position integer, event bigint, forward bigint, token bigint"),
    # KV bytes written or received
    "kv": table_schema(
        "request_id bigint, pool_group tinyint, position integer, event bigint, forward bigint, guess tinyint, bytes blob"
    ),
    # KV bytes that changed without a write; `content` is the slot's canonical name
    "changes": table_schema(
        "request_id bigint, pool_group tinyint, position integer, slot bigint, event bigint, forward bigint, content bigint"
    ),
    # what the KV of a request's position, and of those behind it, was computed with; `known` 0: nobody knows
    "identities": table_schema("request_id bigint, position integer, kind tinyint, known tinyint, hash bigint"),
    # a request's forward, whose first token is at `position`, read `count` positions from `start` on, not its window's
    "windows": table_schema(
        "request_id bigint, runner tinyint, pool_group tinyint, position integer, event bigint, start bigint, count bigint"
    ),
    # the hash of a state, `position` the last of its tokens; `wrote` 0: a forward went on from it, 1: a forward left it
    "states": table_schema(
        "request_id bigint, pool tinyint, position integer, event bigint, forward bigint, wrote tinyint, hash bigint"
    ),
    # values that no model writes, in a request's part of a forward: the first of its kind, in the lowest layer
    "values": table_schema(
        "request_id bigint, runner tinyint, pool_group tinyint, position integer, event bigint, forward bigint, "
        "guess tinyint, half varchar, kind tinyint, layer integer, rows bigint, prefix integer, extend integer, "
        "written bigint"
    ),
    # bytes that a slot shows of one layer, another one in each slot; those that changed without a write
    "layers": table_schema(
        "request_id bigint, pool_group tinyint, position integer, event bigint, forward bigint, guess tinyint, "
        "half varchar, layer integer, piece integer, bytes blob"
    ),
    "layer_changes": table_schema(
        "request_id bigint, pool_group tinyint, position integer, slot bigint, event bigint, forward bigint, "
        "half varchar, layer integer, piece integer"
    ),
}

ROWS_AT_ONCE: Final = 65_536
SETTLED, GUESS, DRAFT, MOVED = 0, 1, 2, 3


class WrittenTokens(NamedTuple):
    """The tokens of a forward that are followed, `[T]` each: their place in it, request, position, how sure they are."""

    chosen: Int64Array
    ids: Int64Array
    position: Int64Array
    guess: Int64Array


class Sinks:
    """One Parquet file a kind of fact, in a folder, until it is closed."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._pending: dict[str, list[Sequence[Any]]] = {name: [] for name in FACTS}
        self._rows = dict.fromkeys(FACTS, 0)
        self._writers = {
            name: pq.ParquetWriter(folder / f"{prefix}_{name}.parquet", schema, compression="zstd", compression_level=1)
            for name, schema in FACTS.items()
        }

    def add(self, name: str, *columns: Any) -> None:
        """Add rows: one array or list a column; a number or text stands for a column of its own, as often as needed."""
        count = next(len(column) for column in columns if not isinstance(column, (int, str, np.integer)))
        if not count:
            return
        self._pending[name].append([_column(column, count) for column in columns])
        self._rows[name] += count
        if self._rows[name] >= ROWS_AT_ONCE:
            self._flush(name)

    def close(self) -> None:
        """Write everything."""
        for name, writer in self._writers.items():
            self._flush(name)
            writer.close()

    def _flush(self, name: str) -> None:
        parts = self._pending[name]
        if parts:
            schema = FACTS[name]
            arrays = [_array([part[i] for part in parts], field.type) for i, field in enumerate(schema)]
            self._writers[name].write_table(pa.Table.from_arrays(arrays, schema=schema))
        self._pending[name] = []
        self._rows[name] = 0


def _column(column: Any, count: int) -> Any:
    if isinstance(column, str):
        return [column] * count
    if isinstance(column, (int, np.integer)):
        return np.full(count, column, np.int64)
    return column.view(np.int64) if isinstance(column, np.ndarray) and column.dtype == np.uint64 else column


def _array(parts: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_binary(kind):  # [n, width] uint8 each: one value a row
        return pa.chunked_array([_rows_as_binary(part) for part in parts], type=kind).combine_chunks()
    if pa.types.is_string(kind):
        return pa.array([text for part in parts for text in part], kind)
    values = np.concatenate(parts, dtype=np.int64, casting="unsafe")
    if kind == pa.int64():
        return pa.array(values)
    # A hostile trace may hold any number: what does not fit is cut to what does.
    narrow = kind.to_pandas_dtype()
    limits = np.iinfo(narrow)
    return pa.array(np.clip(values, limits.min, limits.max).astype(narrow))


def _rows_as_binary(rows: npt.NDArray[np.uint8]) -> pa.Array:
    height, width = rows.shape
    offsets = pa.py_buffer(np.arange(height + 1, dtype=np.int32) * np.int32(width))
    return pa.Array.from_buffers(pa.binary(), height, [None, offsets, pa.py_buffer(np.ascontiguousarray(rows))])


class Statements:
    """Runs the statements of one file by their names, with values in place of `{these}`."""

    def __init__(self, connection: Any, file: str) -> None:
        self._connection = connection
        self._sql = sql_sections("diff", file)

    def text(self, name: str, **values: object) -> str:
        """Return a statement."""
        return self._sql[name].format(**values)

    def run(self, name: str, **values: object) -> Any:
        """Run a statement."""
        return self._connection.execute(self.text(name, **values))

    def both(self, name: str, **values: object) -> None:
        """Run a statement for either trace; `{s}` is a or b."""
        for side in ("a", "b"):
            self.run(name, s=side, **values)

    def rows(self, name: str, parameters: list[Any] | None = None, **values: object) -> list[dict[str, Any]]:
        """Return a query's rows by their columns."""
        result = self._connection.execute(self.text(name, **values), parameters)
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def count(self, name: str, **values: object) -> int:
        """Return a query's only number."""
        return number(self._connection, self.text(name, **values))


def number(connection: Any, query: str) -> int:
    """Return a query's only number."""
    return int(connection.execute(query).fetchone()[0])
