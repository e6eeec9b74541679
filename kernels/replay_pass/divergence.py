"""How far the sliding-window pool has diverged from the full one, over what a batch's requests have cached."""

import numpy as np
import numpy.typing as npt

from ..arrays import Int64Array
from ..dispatch import In32x2, In64, Out8x2, Out64, primitive, select
from .entries import (
    FIRST,
    HI,
    LO,
    NO_SLOTS,
    OTHER_SLOTS,
    EntryStates,
    SlotTable,
    drop_range,
    link,
    make_range_due,
    mark_verified,
    next_due,
)


def swa_divergence_loops(rows: In64, starts: In64, ends: In64, req_to_token: In32x2, lut: In64, counts: Out64) -> None:
    """Count, over positions starts .. ends - 1, slots without a sliding-window half and slots with another index."""
    for r in range(rows.shape[0]):
        row = rows[r]
        if row <= 0 or row >= req_to_token.shape[0]:
            continue
        for position in range(max(starts[r], 0), min(ends[r], req_to_token.shape[1])):
            slot = req_to_token[row, position]
            if slot < 0 or slot >= lut.shape[0]:
                continue
            swa = lut[slot]
            if swa == 0:
                counts[0] += 1
            elif swa != slot:
                counts[1] += 1


def swa_divergence(
    *,
    rows: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
    req_to_token: npt.NDArray[np.int32],
    lut: Int64Array,
    backend: str = "cpu",
) -> tuple[int, int]:
    """Return how many cached positions have no sliding-window slot, and how many have one of another index.

    `rows`, `starts`, `ends` `[bs] int64`: positions starts .. ends - 1 of each row (row 0 is padding); `req_to_token`
    `[rows, width] int32`; `lut` `[full slots] int64`. Slots that the table does not have are passed over.
    """
    counts = np.zeros(2, np.int64)
    select(swa_divergence_loops, backend)(rows, starts, ends, req_to_token, lut, counts)
    return int(counts[0]), int(counts[1])


@primitive()
def uncount(kinds: Out8x2, states: EntryStates, row: int, start: int, end: int) -> None:
    """Take the cells `start .. end - 1` out of their row's figures."""
    for position in range(start, end):
        kind = int(kinds[row, position])
        if kind != 0:
            states.rows[row, NO_SLOTS + kind - 1] -= 1
            kinds[row, position] = 0


@primitive()
def watched_divergence_loops(
    rows: In64, starts: In64, ends: In64, table: SlotTable, states: EntryStates, kinds: Out8x2, figures: Out64
) -> None:
    """Add up what `swa_divergence_loops` counts, of cells that are new or whose full slot's entry changed."""
    width, lut = table.req_to_token.shape[1], table.lut
    for r in range(rows.shape[0]):
        row = int(rows[r])
        if row <= 0 or row >= states.rows.shape[0]:
            continue
        end = max(0, min(int(ends[r]), width))
        start = min(max(int(starts[r]), 0), end)
        lo, hi = int(states.rows[row, LO]), int(states.rows[row, HI])
        if start >= hi or end <= lo:
            drop_range(states, row, lo, hi)
            uncount(kinds, states, row, lo, hi)
            lo, hi = start, start
        drop_range(states, row, lo, start)
        uncount(kinds, states, row, lo, min(start, hi))
        drop_range(states, row, end, hi)
        uncount(kinds, states, row, end, hi)
        states.rows[row, LO] = start
        states.rows[row, HI] = end
        make_range_due(states, row, start, lo)
        make_range_due(states, row, hi, end)
        position = next_due(states, row, max(start, int(states.rows[row, FIRST])), end)
        while position < end:
            mark_verified(states, row, position)
            uncount(kinds, states, row, position, position + 1)
            slot = int(table.req_to_token[row, position])
            if 0 <= slot < lut.shape[0]:
                link(states, row * width + position, slot)
                if lut[slot] == 0:
                    kinds[row, position] = 1
                    states.rows[row, NO_SLOTS] += 1
                elif lut[slot] != slot:
                    kinds[row, position] = 2
                    states.rows[row, OTHER_SLOTS] += 1
            position = next_due(states, row, position + 1, end)
        figures[0] += states.rows[row, NO_SLOTS]
        figures[1] += states.rows[row, OTHER_SLOTS]


def watched_divergence(
    states: EntryStates,
    *,
    rows: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
    table: SlotTable,
    kinds: npt.NDArray[np.uint8],
    backend: str = "cpu",
) -> tuple[int, int]:
    """Return what `swa_divergence` does, keeping what is known of each cell from call to call.

    `states` are linked by full slot (`len(table.lut)` of them), and every change of the two tables makes them due; `kinds`
    `[rows, width] uint8`, kept between calls: 1 for a cell without a sliding-window slot, 2 for one of another index.
    """
    figures = np.zeros(2, np.int64)
    select(watched_divergence_loops, backend)(rows, starts, ends, table, states, kinds, figures)
    return int(figures[0]), int(figures[1])
