"""What touches cells: slots that are written, given out or freed, table entries and truth tokens that change.

Each is told before the change is made, so that what stands in the tables is what cells are linked by; only what really
changes is taken for changed. Numbers from a file are checked against the cells before they are used.
"""

import numpy as np
import numpy.typing as npt

from ..dispatch import In32x2, In64, Out8x2, Out32, Out32x2, Out64x2, select
from .cells import Cells, bucket_of, invalidate_cell, invalidate_slot, led_from, push

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


def _touch_slots_loops(
    slots: In64, heads: Out32, links: Out32x2, pending: Out8x2, counts: Out32x2, book: Out64x2
) -> None:
    for i in range(slots.shape[0]):
        slot = int(slots[i])
        if 0 < slot < len(heads) - 1 and heads[slot] != 0:
            invalidate_slot(heads, links, pending, counts, book, slot)


def touch_slots(cells: Cells, slots: Int64Array, *, backend: str = "cpu") -> None:
    """Make pending what reads any of `slots` `[n] int64`; slot 0 and what is no slot are nobody's."""
    select(_touch_slots_loops, backend)(slots, cells.heads, cells.links, cells.pending, cells.counts, cells.book)


def _touch_lut_loops(
    places: In64,
    before: In64,
    req_to_token: In32x2,
    heads: Out32,
    links: Out32x2,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
) -> None:
    for i in range(places.shape[0]):
        bucket = bucket_of(heads, int(before[i]))
        if heads[bucket] == 0:
            continue
        if 0 < bucket < len(heads) - 1 and led_from(heads, req_to_token, bucket) != int(places[i]):
            continue
        invalidate_slot(heads, links, pending, counts, book, bucket)


def touch_lut(
    cells: Cells, *, places: Int64Array, before: Int64Array, req_to_token: Int32Array, backend: str = "cpu"
) -> None:
    """Make pending what reads full slots whose entry in the full-to-SWA table changes.

    `places`, `before` `[n] int64`: the full slots, and the SWA slots that they lead to until now.
    """
    if cells.book.shape[0]:
        select(_touch_lut_loops, backend)(
            places, before, req_to_token, cells.heads, cells.links, cells.pending, cells.counts, cells.book
        )


def _touch_table_loops(
    index: int,
    indices: In64,
    rows: In64,
    starts: In64,
    lens: In64,
    values: In64,
    table: In32x2,
    heads: Out32,
    links: Out32x2,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
) -> None:
    at = 0
    for run in range(rows.shape[0]):
        count = min(max(lens[run], 0), values.shape[0] - at)
        row, start = int(rows[run]), int(starts[run])
        if indices[run] == index and 0 <= row < book.shape[0]:
            for i in range(max(0, -start), min(count, pending.shape[1] - start)):
                if int(table[row, start + i]) != values[at + i]:
                    invalidate_cell(heads, links, pending, counts, book, row, start + i)
        at += count


def touch_table(
    cells: Cells,
    *,
    index: int,
    indices: Int64Array,
    rows: Int64Array,
    starts: Int64Array,
    lens: Int64Array,
    values: Int64Array,
    table: Int32Array,
    backend: str = "cpu",
) -> None:
    """Make pending what depends on the entries of a block table that runs will change.

    `indices`, `rows`, `starts`, `lens` `[runs] int64`, of which those of table `index` count, `values` run after run;
    `table` `[rows, width] int32` as it is before.
    """
    if cells.book.shape[0] and len(rows):
        select(_touch_table_loops, backend)(
            index,
            indices,
            rows,
            starts,
            lens,
            values,
            table,
            cells.heads,
            cells.links,
            cells.pending,
            cells.counts,
            cells.book,
        )


def _touch_truth_loops(
    rows: In64,
    starts: In64,
    lens: In64,
    values: In64,
    truth: In32x2,
    token_offset: int,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
) -> None:
    at = 0
    for run in range(rows.shape[0]):
        count = min(max(lens[run], 0), values.shape[0] - at)
        row, start = int(rows[run]), int(starts[run])
        if 0 <= row < min(book.shape[0], truth.shape[0]):
            for i in range(max(0, -start), min(count, truth.shape[1] - start)):
                if int(truth[row, start + i]) != values[at + i]:
                    push(pending, counts, book, row, start + i - token_offset)
        at += count


def touch_truth(
    cells: Cells,
    *,
    rows: Int64Array,
    starts: Int64Array,
    lens: Int64Array,
    values: Int64Array,
    truth: Int32Array,
    token_offset: int,
    backend: str = "cpu",
) -> None:
    """Make pending the entries whose truth token runs will change, given as for `touch_table`."""
    if cells.book.shape[0] and len(rows):
        select(_touch_truth_loops, backend)(
            rows, starts, lens, values, truth, token_offset, cells.pending, cells.counts, cells.book
        )
