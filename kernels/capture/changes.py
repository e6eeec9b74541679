"""Changes: what differs between a table, or KV bytes, as an engine reads them and as a shadow holds them."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..dispatch import In8, In8x2, In32x2, In64, InU64x2, Out8x2, Out64, primitive, select
from ..ops.hash.kv_source import KvSource

WORD_BYTES: Final = 8
FAR: Final = 1 << 40  # beyond any position


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRuns:
    """Runs of table cells: run i says `table[rows[i], starts[i] : starts[i] + counts[i]]` = its share of `values`.

    `rows`, `starts`, `counts` are `[n] int64`, `values` `[sum(counts)] int64`.
    """

    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64]

    @classmethod
    def allocate(cls, capacity: int) -> "RowRuns":
        """Return uninitialised runs with room for `capacity` values, each its own run at worst."""
        return cls(
            rows=np.empty(capacity, np.int64),
            starts=np.empty(capacity, np.int64),
            counts=np.empty(capacity, np.int64),
            values=np.empty(capacity, np.int64),
        )

    def cut(self, num_runs: int, num_values: int) -> "RowRuns":
        """Return copies of the first `num_runs` runs and `num_values` values."""
        return RowRuns(
            rows=self.rows[:num_runs].copy(),
            starts=self.starts[:num_runs].copy(),
            counts=self.counts[:num_runs].copy(),
            values=self.values[:num_values].copy(),
        )


def row_changes(
    *,
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: npt.NDArray[np.int64],
    shadow: npt.NDArray[np.int32],
    runs: RowRuns,
    sizes: npt.NDArray[np.int64],
    backend: str = "cpu",
) -> None:
    """List where `values` differ from the shadow, as runs of neighbouring positions.

    Args:
        rows: `[bs] int64`; row 0 (padding) and rows outside the shadow are passed over.
        starts: `[bs] int64`, the position of each request's first value.
        counts: `[bs] int64`; a negative count is none.
        values: `[sum(max(counts, 0))] int64`; positions outside the shadow's width are passed over.
        shadow: `[max_reqs, max_context] int32`; only read.
        runs: where the runs go, with room for `values.size` of them.
        sizes: `[2] int64`: the number of runs and of values written.
        backend: "cpu" or "reference".

    Raises:
        ValueError: the counts ask for more values than there are.
    """
    _require_values(counts, values)
    select(_row_changes_loops, backend)(
        rows, starts, counts, values, shadow, runs.rows, runs.starts, runs.counts, runs.values, sizes
    )


def run_differences(
    *,
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: npt.NDArray[np.int64],
    held_starts: npt.NDArray[np.int64],
    held_counts: npt.NDArray[np.int64],
    held: npt.NDArray[np.int64],
    runs: RowRuns,
    sizes: npt.NDArray[np.int64],
    backend: str = "cpu",
) -> None:
    """List where `values` differ from what is held at the same positions, as runs of neighbouring positions.

    Args:
        starts: `[bs] int64`, the position of each request's first value.
        counts: `[bs] int64`; a negative count is none.
        values: `[sum(max(counts, 0))] int64`; positions of which nothing is held are passed over.
        held_starts: `[bs] int64`.
        held_counts: `[bs] int64`; a negative count is none.
        held: `[sum(max(held_counts, 0))] int64`; a negative one holds nothing.
        runs: where the runs go, with room for `values.size` of them; `rows` gets the index of the request.
        sizes: `[2] int64`: the number of runs and of values written.
        backend: "cpu" or "reference".

    Raises:
        ValueError: the counts ask for more values than there are.
    """
    _require_values(counts, values)
    _require_values(held_counts, held)
    select(_run_differences_loops, backend)(
        *(starts, counts, values, held_starts, held_counts, held),
        *(runs.rows, runs.starts, runs.counts, runs.values, sizes),
    )


def new_slots(
    *,
    slots: npt.NDArray[np.int64],
    stamps: npt.NDArray[np.int64],
    stamp: int,
    out: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    backend: str = "cpu",
) -> None:
    """List each slot once: those whose stamp is not yet `stamp`, in order, stamping them.

    Args:
        slots: `[n] int64`; slot 0 (padding), negative slots and those beyond `stamps` are passed over.
        stamps: `[num_slots] int64`.
        stamp: a number that no earlier call used on `stamps`, unless its slots are to be left out.
        out: `[n] int64`.
        size: `[1] int64`: how many were listed.
        backend: "cpu" or "reference".
    """
    select(_new_slots_loops, backend)(slots, stamps, stamp, out, size)


def kv_changes(
    *,
    source: KvSource,
    slots: npt.NDArray[np.int64],
    shadow: npt.NDArray[np.uint8],
    known: npt.NDArray[np.uint8],
    out_slots: npt.NDArray[np.int64],
    out_bytes: npt.NDArray[np.uint8],
    size: npt.NDArray[np.int64],
    backend: str = "cpu",
) -> None:
    """List the slots whose leading bytes are no longer those of the shadow.

    Args:
        source: where the bytes lie.
        slots: `[n] int64`, each inside `known`; a slot beyond the source's rows is passed over.
        shadow: `[num_slots, capture_bytes] uint8`; only read.
        known: `[num_slots] uint8`; a slot with 0 has no bytes in the shadow and is passed over.
        out_slots: `[n] int64`.
        out_bytes: `[n, capture_bytes] uint8`, the bytes found.
        size: `[1] int64`: how many were listed.
        backend: "cpu" or "reference".
    """
    select(_kv_changes_loops, backend)(
        source.tensor, source.page_size, source.bytes_per_token, slots, shadow, known, out_slots, out_bytes, size
    )


def kv_same(
    *,
    source: KvSource,
    slots: npt.NDArray[np.int64],
    shadow: npt.NDArray[np.uint8],
    known: npt.NDArray[np.uint8],
    backend: str = "cpu",
) -> bool:
    """Return whether it is plain that `kv_changes` would list nothing: much sooner said than which slots it would list.

    False if a slot differs, or if the bytes do not lie as 64-bit words, slot after slot. Slot 0, negative slots
    and those beyond the shadow or the source are passed over. Shapes as `kv_changes`.
    """
    tensor_words, shadow_words = _slot_words(source), _as_words(shadow)
    if tensor_words is None or shadow_words is None or shadow_words.shape[1] < 2:
        return False
    differing = np.zeros(1, np.int64)
    select(_kv_same_loops, backend)(tensor_words, slots, shadow_words, known, differing)
    return not differing[0]


def cell_changes(
    *,
    cells: npt.NDArray[np.int64],
    table: npt.NDArray[np.int64],
    shadow: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    backend: str = "cpu",
) -> None:
    """List the cells at which a table is no longer as its shadow.

    Args:
        cells: `[n] int64`; those outside the table or the shadow are passed over.
        table: `[length] int64`.
        shadow: `[length] int64`.
        out: `[n] int64`, the cells that differ, in their order, as often as they come.
        size: `[1] int64`: how many were listed.
        backend: "cpu" or "reference".
    """
    select(_cell_changes_loops, backend)(cells, table, shadow, out, size)


def prepare(backend: str) -> None:
    """Compile what there is to compile now, so that no engine waits for it later."""
    tables = (_row_changes_loops, _run_differences_loops, _cell_changes_loops)
    for loops in (*tables, _new_slots_loops, _kv_changes_loops, _kv_same_loops):
        select(loops, backend)


def _slot_words(source: KvSource) -> npt.NDArray[np.uint64] | None:
    """Return a source as `[num_slots, words] uint64` without a copy, or None if its slots do not lie so."""
    rows, row_bytes = source.tensor.shape
    if row_bytes != source.page_size * source.bytes_per_token or not source.tensor.flags.c_contiguous:
        return None
    return _as_words(source.tensor.reshape(rows * source.page_size, source.bytes_per_token))


def _as_words(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64] | None:
    """Return bytes as 64-bit words without a copy, or None if they do not lie so."""
    if array.shape[1] % WORD_BYTES or array.strides[0] % WORD_BYTES or array.strides[1] != 1:
        return None
    words = array.view(np.uint64)
    return words if words.flags.aligned else None


def _require_values(counts: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
    wanted = int(np.maximum(counts, 0).sum())
    if wanted > values.size:
        raise ValueError(f"counts ask for {wanted} values, there are {values.size}; pass sum(counts) values")


@primitive()
def begin_run(rows: Out64, starts: Out64, counts: Out64, at: int, row: int, start: int) -> None:
    """Begin run number `at`, which has no values yet."""
    rows[at] = row
    starts[at] = start
    counts[at] = 0


def _row_changes_loops(
    rows: In64,
    starts: In64,
    counts: In64,
    values: In64,
    shadow: In32x2,
    run_rows: Out64,
    run_starts: Out64,
    run_counts: Out64,
    run_values: Out64,
    sizes: Out64,
) -> None:
    num_runs = 0
    num_values = 0
    offset = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        count = max(counts[r], 0)
        in_run = False
        if 0 < row < shadow.shape[0]:
            # Most rows have not changed, and this shows it soonest.
            same = 0
            if 0 <= starts[r] <= shadow.shape[1] - count:
                while same < count and shadow[row, starts[r] + same] == values[offset + same]:
                    same += 1
            for i in range(same, count):
                position = starts[r] + i
                if position < 0 or position >= shadow.shape[1] or shadow[row, position] == values[offset + i]:
                    in_run = False
                    continue
                if not in_run:
                    begin_run(run_rows, run_starts, run_counts, num_runs, row, position)
                    num_runs += 1
                    in_run = True
                run_counts[num_runs - 1] += 1
                run_values[num_values] = values[offset + i]
                num_values += 1
        offset += count
    sizes[0] = num_runs
    sizes[1] = num_values


def _run_differences_loops(
    starts: In64,
    counts: In64,
    values: In64,
    held_starts: In64,
    held_counts: In64,
    held: In64,
    run_rows: Out64,
    run_starts: Out64,
    run_counts: Out64,
    run_values: Out64,
    sizes: Out64,
) -> None:
    num_runs = 0
    num_values = 0
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
        in_run = False
        for position in range(first, end):
            expected = held[held_offset + position - held_start]
            value = values[offset + position - start]
            if expected < 0 or value == expected:
                in_run = False
                continue
            if not in_run:
                begin_run(run_rows, run_starts, run_counts, num_runs, r, position)
                num_runs += 1
                in_run = True
            run_counts[num_runs - 1] += 1
            run_values[num_values] = value
            num_values += 1
        offset += count
        held_offset += held_count
    sizes[0] = num_runs
    sizes[1] = num_values


def _new_slots_loops(slots: In64, stamps: Out64, stamp: int, out: Out64, size: Out64) -> None:
    listed = 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if 0 < slot < stamps.shape[0] and stamps[slot] != stamp:
            stamps[slot] = stamp
            out[listed] = slot
            listed += 1
    size[0] = listed


def _cell_changes_loops(cells: In64, table: In64, shadow: In64, out: Out64, size: Out64) -> None:
    listed = 0
    for i in range(cells.shape[0]):
        cell = cells[i]
        if 0 <= cell < table.shape[0] and cell < shadow.shape[0] and table[cell] != shadow[cell]:
            out[listed] = cell
            listed += 1
    size[0] = listed


def _kv_same_loops(tensor: InU64x2, slots: In64, shadow: InU64x2, known: In8, differing: Out64) -> None:
    end = min(tensor.shape[0], shadow.shape[0])
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot <= 0 or slot >= end:
            continue
        differs = tensor[slot, 0] != shadow[slot, 0] or tensor[slot, 1] != shadow[slot, 1]
        for w in range(2, shadow.shape[1]):
            differs = differs or tensor[slot, w] != shadow[slot, w]
        if differs and known[slot] != 0:
            differing[0] += 1
            return


def _kv_changes_loops(
    tensor: In8x2,
    page_size: int,
    bytes_per_token: int,
    slots: In64,
    shadow: In8x2,
    known: In8,
    out_slots: Out64,
    out_bytes: Out8x2,
    size: Out64,
) -> None:
    num_slots = tensor.shape[0] * page_size
    listed = 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot >= num_slots or known[slot] == 0:
            continue
        row = slot // page_size
        column = (slot % page_size) * bytes_per_token
        same = True
        for b in range(shadow.shape[1]):
            if tensor[row, column + b] != shadow[slot, b]:
                same = False
                break
        if not same:
            out_slots[listed] = slot
            for b in range(shadow.shape[1]):
                out_bytes[listed, b] = tensor[row, column + b]
            listed += 1
    size[0] = listed
