"""How far the sliding-window pool has diverged from the full one, over what a batch's requests have cached."""

import numpy as np
import numpy.typing as npt

from ..dispatch import In32x2, In64, Out8x2, Out32, Out32x2, Out64, Out64x2, primitive, select
from .cells import (
    FIRST,
    HI,
    LO,
    NO_SLOTS,
    OTHER_SLOTS,
    Cells,
    drop_range,
    link,
    next_pending,
    push_range,
    settle,
)

Int64Array = npt.NDArray[np.int64]


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
def leave_cells(kinds: Out8x2, book: Out64x2, row: int, start: int, end: int) -> None:
    """Take the cells `start .. end - 1` out of their row's figures."""
    for position in range(start, end):
        kind = int(kinds[row, position])
        if kind != 0:
            book[row, NO_SLOTS + kind - 1] -= 1
            kinds[row, position] = 0


def watched_divergence_loops(
    rows: In64,
    starts: In64,
    ends: In64,
    req_to_token: In32x2,
    lut: In64,
    heads: Out32,
    links: Out32x2,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
    kinds: Out8x2,
    figures: Out64,
) -> None:
    """Count as `swa_divergence_loops` does, looking only at cells that are new or whose full slot's entry changed."""
    for r in range(rows.shape[0]):
        row = int(rows[r])
        if row <= 0 or row >= book.shape[0]:
            continue
        end = max(0, min(int(ends[r]), req_to_token.shape[1]))
        start = min(max(int(starts[r]), 0), end)
        lo, hi = int(book[row, LO]), int(book[row, HI])
        if start >= hi or end <= lo:
            drop_range(pending, counts, book, row, lo, hi)
            leave_cells(kinds, book, row, lo, hi)
            lo, hi = start, start
        drop_range(pending, counts, book, row, lo, start)
        leave_cells(kinds, book, row, lo, min(start, hi))
        drop_range(pending, counts, book, row, end, hi)
        leave_cells(kinds, book, row, end, hi)
        book[row, LO] = start
        book[row, HI] = end
        push_range(pending, counts, book, row, start, lo)
        push_range(pending, counts, book, row, hi, end)
        position = next_pending(pending, counts, row, max(start, int(book[row, FIRST])), end)
        while position < end:
            settle(pending, counts, book, row, position)
            leave_cells(kinds, book, row, position, position + 1)
            slot = int(req_to_token[row, position])
            if 0 <= slot < lut.shape[0]:
                link(heads, links, row * req_to_token.shape[1] + position, slot)
                if lut[slot] == 0:
                    kinds[row, position] = 1
                    book[row, NO_SLOTS] += 1
                elif lut[slot] != slot:
                    kinds[row, position] = 2
                    book[row, OTHER_SLOTS] += 1
            position = next_pending(pending, counts, row, position + 1, end)
        figures[0] += book[row, NO_SLOTS]
        figures[1] += book[row, OTHER_SLOTS]


def watched_divergence(
    cells: Cells,
    *,
    rows: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
    req_to_token: npt.NDArray[np.int32],
    lut: Int64Array,
    kinds: npt.NDArray[np.uint8],
    backend: str = "cpu",
) -> tuple[int, int]:
    """Return what `swa_divergence` does, keeping what is known of each cell from call to call.

    `cells` are linked by full slot (`len(lut)` of them) and must be told of every change of the two tables; `kinds`
    `[rows, width] uint8`, kept between calls: 1 for a cell without a sliding-window slot, 2 for one of another index.
    """
    figures = np.zeros(2, np.int64)
    select(watched_divergence_loops, backend)(
        rows,
        starts,
        ends,
        req_to_token,
        lut,
        cells.heads,
        cells.links,
        cells.pending,
        cells.counts,
        cells.book,
        kinds,
        figures,
    )
    return int(figures[0]), int(figures[1])
