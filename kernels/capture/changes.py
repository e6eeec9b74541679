"""What an engine's tables hold, and what differs between them, or KV bytes, and a shadow of them."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..arrays import ByteArray, Int32Array, Int64Array
from ..dispatch import In8, In32x2, In64, In64x2, InU64x2, Out64, primitive, select
from ..ops.hash.kv_source import KvSource

WORD_BYTES: Final = 8
FAR: Final = 1 << 40  # beyond any position


class RowRuns(NamedTuple):
    """Runs of table cells: run i says `table[rows[i], starts[i] : starts[i] + counts[i]]` = its share of `values`."""

    rows: Int64Array  # [n]
    starts: Int64Array  # [n]
    counts: Int64Array  # [n]; a negative count is none
    values: Int64Array  # [sum(max(counts, 0))]

    def part(self, starts: Int64Array, counts: Int64Array) -> "RowRuns":
        """Return of each run the cells from `starts[i]` on, `counts[i]` of them, all of which it has."""
        own, counts = np.maximum(self.counts, 0), np.maximum(counts, 0)
        values = np.empty(int(counts.sum()), np.int64)
        first = np.cumsum(own) - own + starts - self.starts
        read_runs(table=self.values.reshape(1, -1), rows=np.zeros_like(first), starts=first, counts=counts, out=values)
        return RowRuns(self.rows, starts, counts, values)


NO_RUNS: Final = RowRuns(*[np.empty(0, np.int64)] * 4)


def joined(found: Sequence[RowRuns]) -> RowRuns:
    """Return runs one after another."""
    return RowRuns(*(np.concatenate(parts) for parts in zip(NO_RUNS, *found, strict=True)))


def read_runs(
    *,
    table: npt.NDArray[np.int32] | Int64Array,
    rows: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    out: Int64Array,
    backend: str = "cpu",
) -> None:
    """Read `table[rows[r], starts[r] : starts[r] + counts[r]]` for each r, one after another.

    `rows`, `starts`, `counts` are `[n] int64`, a negative count is none; `out` `[sum(max(counts, 0))] int64` gets -1 for a
    cell that the table does not have. Raises `ValueError` if `out` has another length, or the table another type.
    """
    wanted = int(np.maximum(counts, 0).sum())
    if out.shape[0] != wanted:
        raise ValueError(f"out has length {out.shape[0]}, expected sum(counts), {wanted}")
    if table.dtype == np.int32:
        select(_read_runs_32_loops, backend)(cast("npt.NDArray[np.int32]", table), rows, starts, counts, out)
    elif table.dtype == np.int64:
        select(_read_runs_64_loops, backend)(cast("npt.NDArray[np.int64]", table), rows, starts, counts, out)
    else:
        raise ValueError(f"table has dtype {table.dtype}, expected int32 or int64")


def cells_to_runs(rows: Int64Array, positions: Int64Array, values: Int64Array) -> RowRuns:
    """Return cells, `[n]` each, as runs of neighbouring positions; rows and positions in them ascend."""
    if rows.size == 0:
        return NO_RUNS
    begins = np.ones(rows.size + 1, np.bool_)
    begins[1:-1] = (rows[1:] != rows[:-1]) | (positions[1:] != positions[:-1] + 1)
    bounds = np.flatnonzero(begins)
    first = bounds[:-1]
    return RowRuns(rows[first], positions[first], bounds[1:] - first, values)


def row_changes(given: RowRuns, shadow: Int32Array, *, backend: str = "cpu") -> RowRuns:
    """Return where runs differ from a table's shadow, `[max_reqs, max_context]`, as runs of neighbouring positions.

    Row 0 (padding), rows outside the shadow and positions outside its width are passed over. Raises `ValueError` if the
    counts ask for more values than there are.
    """
    _require_values(given)
    at, size = np.empty(given.values.size, np.int64), np.zeros(1, np.int64)
    select(_row_changes_loops, backend)(*given, shadow, at, size)
    return _cells_at(given, at[: size[0]])


def cell_changes(cells: Int64Array, table: Int64Array, shadow: Int64Array, *, backend: str = "cpu") -> Int64Array:
    """Return those cells `[n]` at which a table is not its shadow, each once, ascending; cells outside either are none."""
    found, size = np.empty(cells.size, np.int64), np.zeros(1, np.int64)
    select(_cell_changes_loops, backend)(cells, table, shadow, found, size)
    return np.unique(found[: size[0]])


def run_differences(given: RowRuns, held: RowRuns, *, backend: str = "cpu") -> RowRuns:
    """Return where runs differ from what is held at the same positions, as runs of neighbouring positions.

    Run i is compared with run i of `held`; positions of which nothing is held, or a negative value, are passed over. Raises
    `ValueError` if the counts ask for more values than there are.
    """
    _require_values(given)
    _require_values(held)
    at, size = np.empty(given.values.size, np.int64), np.zeros(1, np.int64)
    select(_run_differences_loops, backend)(*given[1:], *held[1:], at, size)
    return _cells_at(given, at[: size[0]])


def kv_same(*, source: KvSource, slots: Int64Array, shadow: ByteArray, known: ByteArray, backend: str = "cpu") -> bool:
    """Return whether it is plain that the leading bytes of slots `[n] int64` are those of the shadow.

    `shadow` is `[num_slots, capture_bytes] uint8`; padding, slots beyond it or the source, and those whose `known`
    `[num_slots] uint8` is 0 are passed over. False if a slot differs, or if the bytes do not lie as 64-bit words.
    """
    page_size, token_words = source.page_size, source.bytes_per_token // WORD_BYTES
    tensor, held = _as_words(source.tensor[:, : page_size * source.bytes_per_token]), _as_words(shadow)
    if tensor is None or held is None or held.shape[1] < 2:
        return False
    page_shift = -1 if page_size & (page_size - 1) else page_size.bit_length() - 1
    differing = np.zeros(1, np.int64)
    select(_kv_same_loops, backend)(tensor, page_size, page_shift, token_words, slots, held, known, differing)
    return not differing[0]


def prepare(backend: str) -> None:
    """Compile what there is to compile now, so that no engine waits for it later."""
    every: tuple[Any, ...] = (_row_changes_loops, _run_differences_loops, _cell_changes_loops, _kv_same_loops)
    for loops in (*every, _read_runs_32_loops, _read_runs_64_loops):
        select(loops, backend)


def _as_words(array: ByteArray) -> npt.NDArray[np.uint64] | None:
    """Return bytes as 64-bit words without a copy, or None if they do not lie so."""
    if array.shape[1] % WORD_BYTES or array.strides[0] % WORD_BYTES or array.strides[1] != 1:
        return None
    words = array.view(np.uint64)
    return words if words.flags.aligned else None


def _require_values(given: RowRuns) -> None:
    wanted = int(np.maximum(given.counts, 0).sum())
    if wanted > given.values.size:
        raise ValueError(f"counts ask for {wanted} values, there are {given.values.size}; pass sum(counts) values")


def _cells_at(given: RowRuns, at: Int64Array) -> RowRuns:
    """Return those of the runs' cells whose values stand at these places, ascending, as runs of neighbouring positions."""
    if at.size == 0:
        return NO_RUNS
    ends = np.cumsum(np.maximum(given.counts, 0))
    which = np.searchsorted(ends, at, side="right")
    positions = given.starts[which] + at - (ends - given.counts)[which]
    found = cells_to_runs(which, positions, given.values[at])
    return found._replace(rows=given.rows[found.rows])


def _row_changes_loops(
    rows: In64, starts: In64, counts: In64, values: In64, shadow: In32x2, out: Out64, size: Out64
) -> None:
    """List the places of the values that differ."""
    listed = 0
    offset = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        start = starts[r]
        count = max(counts[r], 0)
        # Of the run, the part [first, end) lies in the table. No sum is taken of what may be near an int64's end.
        if 0 < row < shadow.shape[0] and -count < start < shadow.shape[1]:
            for i in range(max(-start, 0), min(shadow.shape[1] - start, count)):
                if shadow[row, start + i] != values[offset + i]:
                    out[listed] = offset + i
                    listed += 1
        offset += count
    size[0] = listed


def _run_differences_loops(
    starts: In64,
    counts: In64,
    values: In64,
    held_starts: In64,
    held_counts: In64,
    held: In64,
    out: Out64,
    size: Out64,
) -> None:
    """List the places of the values that differ."""
    listed = 0
    offset = 0
    held_offset = 0
    for r in range(starts.shape[0]):
        count = max(counts[r], 0)
        held_count = max(held_counts[r], 0)
        start = starts[r]
        held_start = held_starts[r]
        first = max(start, held_start)
        end = first
        # No sum is taken of what may be near an int64's end.
        if 0 <= start < FAR and 0 <= held_start < FAR:
            end = min(start + count, held_start + held_count)
        for position in range(first, end):
            expected = held[held_offset + position - held_start]
            at = offset + position - start
            if expected >= 0 and values[at] != expected:
                out[listed] = at
                listed += 1
        offset += count
        held_offset += held_count
    size[0] = listed


def _cell_changes_loops(cells: In64, table: In64, shadow: In64, out: Out64, size: Out64) -> None:
    listed = 0
    for i in range(cells.shape[0]):
        cell = cells[i]
        if 0 <= cell < table.shape[0] and cell < shadow.shape[0] and table[cell] != shadow[cell]:
            out[listed] = cell
            listed += 1
    size[0] = listed


def _kv_same_loops(
    tensor: InU64x2,
    page_size: int,
    page_shift: int,
    token_words: int,
    slots: In64,
    shadow: InU64x2,
    known: In8,
    differing: Out64,
) -> None:
    end = min(tensor.shape[0] * page_size, shadow.shape[0])
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot <= 0 or slot >= end:
            continue
        row = slot >> page_shift if page_shift >= 0 else slot // page_size
        at = (slot - row * page_size) * token_words
        differs = tensor[row, at] != shadow[slot, 0] or tensor[row, at + 1] != shadow[slot, 1]
        for w in range(2, shadow.shape[1]):
            differs = differs or tensor[row, at + w] != shadow[slot, w]
        if differs and known[slot] != 0:
            differing[0] += 1
            return


@primitive()
def read_run(table: Any, row: int, start: int, count: int, at: int, out: Any) -> None:
    """Write `table[row, start : start + count]` to `out[at :]`, -1 for what the table does not have."""
    # Of the run, the part [first, end) lies in the table. No sum is taken of what may be near an int64's end.
    first = count
    end = count
    if 0 <= row < table.shape[0] and -count < start < table.shape[1]:
        first = max(-start, 0)
        end = min(table.shape[1] - start, count)
    for i in range(first):
        out[at + i] = -1
    for i in range(first, end):
        out[at + i] = table[row, start + i]
    for i in range(end, count):
        out[at + i] = -1


# Compiled code has one signature each: two entries, one body.
def _read_runs_32_loops(table: In32x2, rows: In64, starts: In64, counts: In64, out: Out64) -> None:
    at = 0
    for r in range(rows.shape[0]):
        count = max(counts[r], 0)
        read_run(table, rows[r], starts[r], count, at, out)
        at += count


def _read_runs_64_loops(table: In64x2, rows: In64, starts: In64, counts: In64, out: Out64) -> None:
    at = 0
    for r in range(rows.shape[0]):
        count = max(counts[r], 0)
        read_run(table, rows[r], starts[r], count, at, out)
        at += count
