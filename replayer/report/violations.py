"""Violation rows: the canary's eight fields, and what only the trace knows about each; streamed to Parquet.

Rows go to disk in row groups as they are found, so a million of them cost a million rows of disk and no memory. All are
counted; of a slot that has very many, and of a report that has, the first are kept (`RowLimit`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ...kernels.arrays import Int64Array
from ...kernels.constants import FailReason, LaunchTag
from ...kernels.ops.plan.reference import VerifyPlan, WritePlan
from ...kernels.ops.violation_log import ViolationLog
from ...recorder.files import new_private_file
from ...recorder.state.forward import Forward
from ...recorder.state.pools import Endpoint, GroupPool
from ...recorder.state.requests import RequestTable
from ...recorder.trace.header import PoolGroup
from ..run.planning import Sweep
from .merged.turns import first_places

# What a report keeps by default of what it counts: rows of a slot for each launch tag, and rows in all.
ROWS_PER_SLOT: Final = 1_000
MAX_ROWS: Final = 10_000_000

# What reading a stranger's Parquet raises: names and texts in it need not be UTF-8, whatever the format says.
PARQUET_ERRORS: Final = (pa.ArrowException, OSError, UnicodeError)


def _typed(kind: pa.DataType, *names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, kind) for name in names]


VIOLATION_SCHEMA = pa.schema(
    [
        # the canary's own eight fields, in its order
        *_typed(pa.int8(), "launch_tag"),
        *_typed(pa.int64(), "slot", "position", "stored_token", "expected_token", "stored_chain_hash", "expected_aux"),
        *_typed(pa.int32(), "fail_reason_bits"),
        # the same in words, and who knew better: "truth" the scheduler's tokens, "hash" the hash oracle, "" where only the
        # record speaks
        *_typed(pa.dictionary(pa.int8(), pa.utf8()), "launch", "reasons", "oracle"),
        # where and when
        *_typed(pa.int64(), "event", "forward", "time_ns"),
        *_typed(pa.utf8(), "mode"),
        *_typed(pa.int16(), "runner", "group"),
        *_typed(pa.utf8(), "endpoint", "half"),
        # of which request
        *_typed(pa.int64(), "request_id"),
        *_typed(pa.utf8(), "request"),
        *_typed(pa.int64(), "req_pool_idx", "expected_position"),
        # how long: one row a forward in stepwise replay; a merged row stands for num_forwards forwards of its request
        *_typed(pa.int64(), "first_forward", "last_forward", "num_forwards"),
        # who wrote the slot last, -1 where nobody did
        *_typed(pa.int64(), "writer_event", "writer_forward", "writer_request_id"),
        *_typed(pa.utf8(), "writer_request"),
    ]
)

_FIELDS = VIOLATION_SCHEMA.names[:8]
_SLOT_FIELD, _AUX_FIELD = (_FIELDS.index(name) for name in ("slot", "expected_aux"))
_EVERY_BITS = range(1 << len(FailReason))
_REASON_NAMES = pa.array(["+".join(r.name or "" for r in FailReason if bits & r) or "NONE" for bits in _EVERY_BITS])
_ORACLE_NAMES = pa.array(
    ["truth" if b & FailReason.VERIFY_TOKEN else "hash" if b & FailReason.WRITE_TOKEN else "" for b in _EVERY_BITS]
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
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        arrays: dict[str, Any] = {name: a[chosen] for name, a in columns.items() if isinstance(a, np.ndarray)}
        return replace(self, **arrays)


def launch_violations(
    log: ViolationLog,
    plan: VerifyPlan | WritePlan,
    what: Forward | Sweep,
    pool: GroupPool,
    endpoint: Endpoint,
    half: str,
) -> LaunchViolations:
    """Return the violations that a launch left in `log`; no request reads what a sweep verifies."""
    rows, entries = log.rows[: log.num_rows].copy(), log.entries[: log.num_rows]
    if isinstance(what, Sweep):
        request_ids = req_pool_indices = np.full(len(rows), -1, dtype=np.int64)
    else:
        offsets = plan.offsets if isinstance(plan, WritePlan) else plan.request_offsets
        places = np.searchsorted(offsets[1 : len(what.request_ids) + 1], entries, side="right").astype(np.int64)
        request_ids, req_pool_indices = what.request_ids[places], what.req_pool_indices[places]
    if isinstance(plan, WritePlan):  # the writer is this very forward, and expected_aux of such a row is a position
        expected_positions = rows[:, _AUX_FIELD]
        writers = np.stack([np.full(len(rows), what.event), np.full(len(rows), what.forward), request_ids], axis=1)
    else:
        expected_positions, writers = plan.expected_positions[entries], pool.last_writers(rows[:, _SLOT_FIELD])
        if isinstance(what, Sweep):
            places = first_places(np.stack([plan.slots, plan.expected_positions], axis=1))[entries]
    same: dict[str, Any] = {name: getattr(what, name) for name in ("event", "forward", "time_ns", "mode", "runner")}
    return LaunchViolations(
        **same,
        group=pool.index,
        endpoint=endpoint,
        half=half,
        rows=rows,
        request_ids=request_ids,
        req_pool_indices=req_pool_indices,
        expected_positions=expected_positions,
        writers=writers,
        places=places,
    )


class RowLimit:
    """How many rows of the file each slot has, for each launch tag; None for `per_slot` sets no bound."""

    def __init__(self, groups: Sequence[PoolGroup], *, per_slot: int | None) -> None:
        self._per_slot = per_slot
        self._left = MAX_ROWS
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
    columns: dict[str, Any] = {name: rows[:, i] for i, name in enumerate(_FIELDS)}
    for name in ("event", "forward", "time_ns", "mode", "runner", "group", "endpoint", "half"):  # one value a launch
        kind = VIOLATION_SCHEMA.field(name).type
        columns[name] = pa.array([getattr(launch, name) for launch in launches], type=kind).take(index)
    for name, codes, names in (
        ("launch", 0, _LAUNCH_NAMES),
        ("reasons", 7, _REASON_NAMES),
        ("oracle", 7, _ORACLE_NAMES),
    ):
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(rows[:, codes].astype(np.int8)), names)
    columns |= {
        "request_id": request_ids,
        "request": request_table.name_column(request_ids),
        "req_pool_idx": np.concatenate([launch.req_pool_indices for launch in launches]),
        "expected_position": np.concatenate([launch.expected_positions for launch in launches]),
        "first_forward": columns["forward"],
        "last_forward": columns["forward"],
        "num_forwards": np.ones(len(rows), dtype=np.int64),
        "writer_request": request_table.name_column(writers[:, 2]),
    }
    columns |= {name: writers[:, i] for i, name in enumerate(("writer_event", "writer_forward", "writer_request_id"))}
    found = ((field, columns[field.name]) for field in VIOLATION_SCHEMA)
    arrays = [values if isinstance(values, pa.Array) else pa.array(values).cast(field.type) for field, values in found]
    return pa.table(arrays, schema=VIOLATION_SCHEMA)


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
        self._pending, self._num_pending = [], 0

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
