"""Applying what a trace recorded to the rebuilt state: runs of table entries, a forward's own slots, KV bytes.

Slots, rows and positions come from a file, so every index is checked against its array before it is used: what falls
outside is passed over and counted, never written elsewhere.
"""

import numpy as np
import numpy.typing as npt

from ..arrays import Int32Array, Int64Array
from ..constants import SLOT_OUT_OF_RANGE
from ..dispatch import In8x2, In64, Out8x2, Out32x2, Out64, Out64x2, primitive, select

INT32_MIN = -(1 << 31)
INT32_MAX = (1 << 31) - 1

ByteArray = npt.NDArray[np.uint8]


def prepare(backend: str) -> None:
    """Compile what there is to compile now, so that nobody waits for it later."""
    for loops in (
        apply_runs_loops,
        apply_forward_loops,
        translate_loops,
        store_bytes_loops,
        mark_writer_loops,
    ):
        select(loops, backend)


def apply_runs_loops(
    index: int,
    indices: In64,
    rows: In64,
    starts: In64,
    counts: In64,
    values: In64,
    table: Out32x2,
    outside: Out64,
) -> None:
    """Write runs into a table; see `apply_runs`."""
    at = 0
    for run in range(rows.shape[0]):
        count = counts[run]
        if count < 0 or count > values.shape[0] - at:
            outside[0] = -1
            return
        if indices[run] == index:
            row = rows[run]
            start = starts[run]
            if row < 0 or row >= table.shape[0] or start < 0 or start > table.shape[1]:
                outside[0] += count
            else:
                inside = min(count, table.shape[1] - start)
                for i in range(inside):
                    value = values[at + i]
                    if INT32_MIN <= value <= INT32_MAX:
                        table[row, start + i] = value
                    else:
                        outside[0] += 1
                outside[0] += count - inside
        at += count
    if at != values.shape[0]:
        outside[0] = -1


def apply_runs(
    *,
    index: int,
    indices: Int64Array,
    rows: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    values: Int64Array,
    table: Int32Array,
    backend: str = "cpu",
) -> int:
    """Write the runs whose `indices[run]` is `index` into `table`.

    Args:
        index: the table to write; runs of other tables are passed over.
        indices, rows, starts, counts: `[runs] int64`.
        values: `[sum(counts)] int64`, run after run.
        table: `[rows, width] int32`, changed in place.
        backend: see `dispatch.select`.

    Returns:
        How many values fell outside the table or are no int32, or -1 when `counts` and `values` do not fit one another.
    """
    outside = np.zeros(1, dtype=np.int64)
    select(apply_runs_loops, backend)(index, indices, rows, starts, counts, values, table, outside)
    return int(outside[0])


@primitive()
def apply_forward_loops(rows: In64, prefix_lens: In64, lens: In64, values: In64, table: Out32x2) -> None:
    """Write each request's run; see `apply_forward`."""
    at = 0
    for r in range(rows.shape[0]):
        # Never past the values: hostile lengths must add up neither to an overflow nor to an endless loop.
        count = min(max(lens[r], 0), values.shape[0] - at)
        row = rows[r]
        if row == 0:
            continue  # a padding row takes no part, and its tokens come last
        for i in range(count):
            position = prefix_lens[r] + i
            if 0 < row < table.shape[0] and 0 <= position < table.shape[1]:
                table[row, position] = values[at + i]
        at += count


def apply_forward(
    *,
    rows: Int64Array,
    prefix_lens: Int64Array,
    lens: Int64Array,
    values: Int64Array,
    table: Int32Array,
    backend: str = "cpu",
) -> None:
    """Write each request's run of `values` at `table[row, prefix ...]`, as both sides do after a forward.

    Args:
        rows, prefix_lens, lens: `[bs] int64`; row 0 (padding) takes no values, a negative length counts as 0.
        values: `[>= sum(lens)] int64`: `out_cache_loc` for a block table, sampled tokens for the truth table.
        table: `[rows, width] int32`, changed in place.
        backend: see `dispatch.select`.
    """
    select(apply_forward_loops, backend)(rows, prefix_lens, lens, values, table)


@primitive()
def translate_loops(slots: In64, lut: In64, out: Out64, outside: Out64) -> None:
    """Translate each slot; see `translate`."""
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot < 0:
            out[i] = slot
        elif slot >= lut.shape[0]:
            out[i] = SLOT_OUT_OF_RANGE
            outside[0] += 1
        else:
            out[i] = lut[slot]


def translate(*, slots: Int64Array, lut: Int64Array, out: Int64Array, backend: str = "cpu") -> int:
    """Translate full-pool slots to SWA slots; negative slots pass through.

    Args:
        slots: `[n] int64`.
        lut: `[full slots] int64`, the full-to-SWA table.
        out: `[n] int64`; a slot beyond `lut` becomes `SLOT_OUT_OF_RANGE`.
        backend: see `dispatch.select`.

    Returns:
        How many slots were beyond `lut`.
    """
    outside = np.zeros(1, dtype=np.int64)
    select(translate_loops, backend)(slots, lut, out, outside)
    return int(outside[0])


def store_bytes_loops(slots: In64, data: In8x2, pool: Out8x2) -> None:
    """Store each slot's bytes; see `store_bytes`."""
    width = pool.shape[1]
    for i in range(slots.shape[0]):
        slot = slots[i]
        if 0 <= slot < pool.shape[0]:
            for k in range(width):
                pool[slot, k] = data[i, k]


def store_bytes(*, slots: Int64Array, data: ByteArray, pool: ByteArray, backend: str = "cpu") -> None:
    """Put the captured bytes of each slot into a rebuilt pool, in order, so that a repeated slot keeps the last.

    Args:
        slots: `[n] int64`; slots outside the pool are passed over.
        data: `[n, capture_bytes] uint8`.
        pool: `[num_slots, capture_bytes] uint8`, changed in place.
        backend: see `dispatch.select`.
    """
    select(store_bytes_loops, backend)(slots, data, pool)


@primitive()
def mark_writer_loops(
    slots: In64, offsets: In64, request_ids: In64, event: int, forward: int, writers: Out64x2
) -> None:
    """Note who wrote each slot; see `mark_writers`."""
    for r in range(request_ids.shape[0]):
        for i in range(offsets[r], min(offsets[r + 1], slots.shape[0])):
            slot = slots[i]
            if 0 <= slot < writers.shape[0]:
                writers[slot, 0] = event
                writers[slot, 1] = forward
                writers[slot, 2] = request_ids[r]


def mark_writers(
    *,
    slots: Int64Array,
    offsets: Int64Array,
    request_ids: Int64Array,
    event: int,
    forward: int,
    writers: Int64Array,
    backend: str = "cpu",
) -> None:
    """Note who wrote each slot: `writers[slot] = event, forward, request id`.

    Args:
        slots: `[tokens] int64`; slots outside the pool are passed over.
        offsets: `[bs + 1] int64`, prefix sums of the requests' written tokens.
        request_ids: `[bs] int64`.
        event, forward: the numbers of the writing event and forward.
        writers: `[num_slots, 3] int64`, changed in place.
        backend: see `dispatch.select`.
    """
    select(mark_writer_loops, backend)(slots, offsets, request_ids, event, forward, writers)
