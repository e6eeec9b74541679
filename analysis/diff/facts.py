"""The facts of each trace, row by row, in files on disk: Parquet, for DuckDB to join."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

_I64, _I32, _I8, _TEXT = pa.int64(), pa.int32(), pa.int8(), pa.utf8()

FACTS: Final[dict[str, pa.Schema]] = {
    # a request became known, or its prompt did
    "requests": pa.schema({"request_id": _I64, "name": _TEXT, "room": _I64, "prompt_len": _I64, "event": _I64}),
    "prompts": pa.schema({"request_id": _I64, "prompt_hash": _I64, "event": _I64}),
    "statuses": pa.schema({"request_id": _I64, "event": _I64, "status": _TEXT, "losses": _I64}),
    # a request's part of a forward; `losses`: how often something was lost before it
    "batches": pa.schema(
        {
            "request_id": _I64,
            "runner": _I8,
            "event": _I64,
            "forward": _I64,
            "mode": _TEXT,
            "prefix": _I32,
            "extend": _I32,
            "losses": _I64,
        }
    ),
    # a token written; `guess` 0: settled, 1: a target's that may be rejected, 2: a draft's, 3: sent to or received
    # from another engine; `round`: where a draft's guessing began, else -1 (-2: lost);
    # `unsure` 1: what it read was lost, so that `reads` says nothing
    "tokens": pa.schema(
        {
            "request_id": _I64,
            "runner": _I8,
            "position": _I32,
            "event": _I64,
            "forward": _I64,
            "guess": _I8,
            "round": _I32,
            "token": _I64,
            "fed": _I64,
            "reads": _I64,
            "misreads": _I64,
            "unsure": _I8,
        }
    ),
    # the first position of a request's part of a forward that led elsewhere
    "misreads": pa.schema(
        {
            "request_id": _I64,
            "runner": _I8,
            "event": _I64,
            "pool_group": _I32,
            "position": _I32,
            "slot": _I64,
            "writer": _I64,
            "writer_position": _I64,
            "state": _TEXT,
        }
    ),
    "samples": pa.schema({"request_id": _I64, "position": _I32, "event": _I64, "forward": _I64, "token": _I64}),
    # KV bytes written or received
    "kv": pa.schema(
        {
            "request_id": _I64,
            "pool_group": _I8,
            "position": _I32,
            "event": _I64,
            "forward": _I64,
            "guess": _I8,
            "bytes": pa.binary(),
        }
    ),
    # KV bytes that changed without a write; `content` is the slot's canonical name
    "changes": pa.schema(
        {
            "request_id": _I64,
            "pool_group": _I8,
            "position": _I32,
            "slot": _I64,
            "event": _I64,
            "forward": _I64,
            "content": _I64,
        }
    ),
}

ROWS_AT_ONCE: Final = 65_536
SETTLED, GUESS, DRAFT, MOVED = 0, 1, 2, 3


class Sinks:
    """One Parquet file a kind of fact, in a folder; a context manager."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.paths = {name: folder / f"{prefix}_{name}.parquet" for name in FACTS}
        self._pending: dict[str, list[Sequence[Any]]] = {name: [] for name in FACTS}
        self._rows = dict.fromkeys(FACTS, 0)
        self._writers = {
            name: pq.ParquetWriter(path, FACTS[name], compression="zstd", compression_level=1)
            for name, path in self.paths.items()
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _column(column: Any, count: int) -> Any:
    if isinstance(column, str):
        return [column] * count
    if isinstance(column, (int, np.integer)):
        return np.full(count, column, np.int64)
    return column.view(np.int64) if isinstance(column, np.ndarray) and column.dtype == np.uint64 else column


def _array(parts: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_binary(kind):  # [n, width] uint8 each: one value a row
        arrays = [_rows_as_binary(part) for part in parts]
        return pa.chunked_array(arrays, type=kind).combine_chunks()
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
