"""Violation rows: the canary's eight fields, and what only the trace knows about each; streamed to Parquet.

No row is ever dropped: rows go to disk in row groups as they are found, so a million of them cost a million rows of
disk and no memory.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..kernels.constants import FailReason, LaunchTag

Int64Array = npt.NDArray[np.int64]

VIOLATION_SCHEMA = pa.schema(
    [
        # the canary's own eight fields, in its order
        ("launch_tag", pa.int8()),
        ("slot", pa.int64()),
        ("position", pa.int64()),
        ("stored_token", pa.int64()),
        ("expected_token", pa.int64()),
        ("stored_chain_hash", pa.int64()),
        ("expected_aux", pa.int64()),
        ("fail_reason_bits", pa.int32()),
        # the same in words
        ("launch", pa.dictionary(pa.int8(), pa.utf8())),
        ("reasons", pa.dictionary(pa.int8(), pa.utf8())),
        # where and when
        ("event", pa.int64()),
        ("forward", pa.int64()),
        ("time_ns", pa.int64()),
        ("mode", pa.utf8()),
        ("runner", pa.int16()),
        ("group", pa.int16()),
        ("endpoint", pa.utf8()),
        ("half", pa.utf8()),
        # whose
        ("request_id", pa.int64()),
        ("request", pa.utf8()),
        ("req_pool_idx", pa.int64()),
        ("expected_position", pa.int64()),
        # how long: one row a forward in stepwise replay
        ("first_forward", pa.int64()),
        ("last_forward", pa.int64()),
        ("num_forwards", pa.int64()),
        # who wrote the slot last, -1 where nobody did
        ("writer_event", pa.int64()),
        ("writer_forward", pa.int64()),
        ("writer_request_id", pa.int64()),
        ("writer_request", pa.utf8()),
    ]
)

_FIELDS = VIOLATION_SCHEMA.names[:8]
_REASON_NAMES = pa.array(
    ["+".join(r.name or "" for r in FailReason if bits & r) or "NONE" for bits in range(1 << len(FailReason))]
)
_LAUNCH_NAMES = pa.array([tag.name for tag in LaunchTag])


def reason_names(bits: int) -> list[str]:
    """Return the names of the fail reasons in `bits`, lowest bit first."""
    return [reason.name or "" for reason in FailReason if bits & reason]


def violation_table(rows: Int64Array, context: Mapping[str, Any]) -> pa.Table:
    """Build a table of violations.

    Args:
        rows: `[n, 8] int64`, the canary's violation rows.
        context: every other column but `launch`, `reasons` and the spans: an array of `n` values, or one value for
            all rows.
    """
    count = len(rows)
    columns: dict[str, Any] = {name: rows[:, i] for i, name in enumerate(_FIELDS)}
    columns |= {
        "launch": pa.DictionaryArray.from_arrays(pa.array(rows[:, 0].astype(np.int8)), _LAUNCH_NAMES),
        "reasons": pa.DictionaryArray.from_arrays(pa.array(rows[:, 7].astype(np.int8)), _REASON_NAMES),
        "first_forward": context["forward"],
        "last_forward": context["forward"],
        "num_forwards": 1,
        **context,
    }
    return pa.table(
        [_column(columns[field.name], field.type, count) for field in VIOLATION_SCHEMA], schema=VIOLATION_SCHEMA
    )


def _column(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    if isinstance(value, pa.Array):
        return value
    if isinstance(value, np.ndarray):
        return pa.array(value).cast(kind)
    return pa.repeat(pa.scalar(value, type=kind), count)


class TableSink:
    """Streams tables of one schema to a Parquet file in row groups; also a counter when no file is wanted."""

    ROWS_PER_GROUP = 65_536

    def __init__(self, path: Path | None, schema: pa.Schema) -> None:
        self.num_rows = 0
        self._schema = schema
        self._pending: list[pa.Table] = []
        self._num_pending = 0
        self._writer = None if path is None else pq.ParquetWriter(path, schema, compression="zstd")

    def append(self, table: pa.Table) -> None:
        """Add rows; they reach the disk with their row group or at `close`."""
        self.num_rows += table.num_rows
        if self._writer is None:
            return
        self._pending.append(table)
        self._num_pending += table.num_rows
        if self._num_pending >= self.ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._writer is not None and self._pending:
            self._writer.write_table(pa.concat_tables(self._pending))
        self._pending = []
        self._num_pending = 0

    def close(self) -> None:
        """Write what is pending and the file's footer."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> "TableSink":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
