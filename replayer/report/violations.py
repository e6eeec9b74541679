"""Violation rows: the canary's eight fields, and what only the trace knows about each; streamed to Parquet.

Rows go to disk in row groups as they are found, so a million of them cost a million rows of disk and no memory. All are
counted; of a slot that has very many, and of a report that has, the first are kept (`RowLimit`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ...kernels.arrays import Int64Array
from ...kernels.constants import FailReason, LaunchTag
from ...recorder.files import new_private_file
from ...recorder.state.requests import RequestTable
from ...recorder.trace.header import PoolGroup

# What a report keeps by default of what it counts: rows of a slot for each launch tag, and rows in all.
ROWS_PER_SLOT: Final = 1_000
MAX_ROWS: Final = 10_000_000

# What reading a stranger's Parquet raises: names and texts in it need not be UTF-8, whatever the format says.
PARQUET_ERRORS: Final = (pa.ArrowException, OSError, UnicodeError)

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
        # who knew better: "truth" the scheduler's tokens, "hash" the hash oracle, "" where only the record speaks
        ("oracle", pa.dictionary(pa.int8(), pa.utf8())),
        # where and when
        ("event", pa.int64()),
        ("forward", pa.int64()),
        ("time_ns", pa.int64()),
        ("mode", pa.utf8()),
        ("runner", pa.int16()),
        ("group", pa.int16()),
        ("endpoint", pa.utf8()),
        ("half", pa.utf8()),
        # of which request
        ("request_id", pa.int64()),
        ("request", pa.utf8()),
        ("req_pool_idx", pa.int64()),
        ("expected_position", pa.int64()),
        # how long: one row a forward in stepwise replay; a merged row stands for num_forwards forwards of its request
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
_ORACLE_NAMES = pa.array(
    [
        "truth" if bits & FailReason.VERIFY_TOKEN else "hash" if bits & FailReason.WRITE_TOKEN else ""
        for bits in range(1 << len(FailReason))
    ]
)
_LAUNCH_NAMES = pa.array([tag.name for tag in LaunchTag])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchViolations:
    """The violations of one launch of one forward, `n` rows.

    `rows` `[n, 8] int64` as the kernel wrote them; `request_ids`, `req_pool_indices`, `expected_positions`
    `[n] int64`; `writers` `[n, 3] int64`: event, forward and request id of each slot's last writer, -1 for nobody;
    `places` `[n] int64`: each row's request in the batch, or of a sweep the first entry with its slot and position;
    `turns` `[n] int64`: what `turns.Turns` counts, where rows are merged.
    """

    event: int
    forward: int
    time_ns: int
    mode: str
    runner: int
    group: int
    endpoint: str
    half: str
    rows: Int64Array
    request_ids: Int64Array
    req_pool_indices: Int64Array
    expected_positions: Int64Array
    writers: Int64Array
    places: Int64Array
    turns: Int64Array | None = None

    def take(self, chosen: npt.NDArray[np.bool_]) -> "LaunchViolations":
        """Return the rows that `chosen` `[n] bool` names."""
        return replace(
            self,
            rows=self.rows[chosen],
            request_ids=self.request_ids[chosen],
            req_pool_indices=self.req_pool_indices[chosen],
            expected_positions=self.expected_positions[chosen],
            writers=self.writers[chosen],
            places=self.places[chosen],
            turns=None if self.turns is None else self.turns[chosen],
        )


class RowLimit:
    """How many rows of the file each slot has, for each launch tag: what one slot can fill has a bound.

    `None` for `per_slot` sets no bound. What is not kept is counted by whoever asks.
    """

    def __init__(self, groups: Sequence[PoolGroup], *, per_slot: int | None, total: int = MAX_ROWS) -> None:
        self._per_slot = per_slot
        self._left = total
        # Untouched memory costs nothing: most slots never have a row.
        self._counts = [np.zeros((len(LaunchTag), group.num_slots), np.uint16) for group in groups]

    def wanted(self, launch: LaunchViolations) -> npt.NDArray[np.bool_] | None:
        """Say which rows of a launch may be kept, `[n] bool`; None for all."""
        if self._per_slot is None:
            return None
        if self._left <= 0:
            return np.zeros(len(launch.rows), np.bool_)
        tags, slots = launch.rows[:, 0], launch.rows[:, 1]
        wanted = self._counts[launch.group][tags, slots] < self._per_slot
        return None if wanted.all() else wanted

    def kept(self, table: pa.Table) -> None:
        """Count rows that went into the file."""
        if self._per_slot is None:
            return
        self._left -= table.num_rows
        groups, tags, slots = (table[name].to_numpy() for name in ("group", "launch_tag", "slot"))
        for group in np.unique(groups).tolist():
            mine = groups == group
            places, times = np.unique(
                tags[mine].astype(np.int64) * len(self._counts[group][0]) + slots[mine], return_counts=True
            )
            counts = self._counts[group].reshape(-1)
            counts[places] = np.minimum(counts[places] + times, np.iinfo(np.uint16).max)


def violation_table(launches: Sequence[LaunchViolations], request_table: RequestTable) -> pa.Table:
    """Build one table of the violations of many launches, in their order."""
    counts = [len(launch.rows) for launch in launches]
    rows = np.concatenate([launch.rows for launch in launches])
    writers = np.concatenate([launch.writers for launch in launches])
    request_ids = np.concatenate([launch.request_ids for launch in launches])
    index = pa.array(np.repeat(np.arange(len(launches)), counts))

    def spread(name: str) -> pa.Array:
        """One value a launch, for each of its rows."""
        kind = VIOLATION_SCHEMA.field(name).type
        return pa.array([getattr(launch, name) for launch in launches], type=kind).take(index)

    columns: dict[str, Any] = {name: rows[:, i] for i, name in enumerate(_FIELDS)}
    columns |= {name: spread(name) for name in ("event", "forward", "time_ns", "mode", "runner", "group")}
    columns |= {
        "endpoint": spread("endpoint"),
        "half": spread("half"),
        "launch": pa.DictionaryArray.from_arrays(pa.array(rows[:, 0].astype(np.int8)), _LAUNCH_NAMES),
        "reasons": pa.DictionaryArray.from_arrays(pa.array(rows[:, 7].astype(np.int8)), _REASON_NAMES),
        "oracle": pa.DictionaryArray.from_arrays(pa.array(rows[:, 7].astype(np.int8)), _ORACLE_NAMES),
        "request_id": request_ids,
        "request": request_table.name_column(request_ids),
        "req_pool_idx": np.concatenate([launch.req_pool_indices for launch in launches]),
        "expected_position": np.concatenate([launch.expected_positions for launch in launches]),
        "first_forward": columns["forward"],
        "last_forward": columns["forward"],
        "num_forwards": np.ones(len(rows), dtype=np.int64),
        "writer_event": writers[:, 0],
        "writer_forward": writers[:, 1],
        "writer_request_id": writers[:, 2],
        "writer_request": request_table.name_column(writers[:, 2]),
    }
    return pa.table(
        [
            value if isinstance(value, pa.Array) else pa.array(value).cast(field.type)
            for field, value in ((field, columns[field.name]) for field in VIOLATION_SCHEMA)
        ],
        schema=VIOLATION_SCHEMA,
    )


class TableSink:
    """Streams tables of one schema to a Parquet file in row groups; also a counter when no file is wanted."""

    ROWS_PER_GROUP = 65_536

    def __init__(self, path: Path | None, schema: pa.Schema) -> None:
        self.num_rows = 0
        self._schema = schema
        self._pending: list[pa.Table] = []
        self._num_pending = 0
        # Opened here, not by pyarrow, which takes no path that is not UTF-8.
        self._file = None if path is None else new_private_file(path)
        self._writer = None if self._file is None else pq.ParquetWriter(self._file, schema, compression="zstd")

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
        try:
            self._flush()
            if self._writer is not None:
                self._writer.close()
        finally:
            self._writer = None
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> "TableSink":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
