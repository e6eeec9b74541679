"""What is clean after a forward: the entries that it looked at and nobody found anything about."""

import numpy as np
import numpy.typing as npt

from ..dispatch import In8, In32x2, In64, In64x2, Out8x2, Out32, Out32x2, Out64x2, select
from ..ops.plan.reference import VerifyPlan
from .cells import TRUTH, Cells, link_entry, settle
from .ledger import ALLOC, LEDGER_COLUMNS
from .looks import WATCHED, ForwardLook

Int64Array = npt.NDArray[np.int64]


def settle_forward_loops(
    req_pool_indices: In64,
    event: int,
    req_to_token: In32x2,
    lut: In64,
    has_lut: int,
    truth_lens: In64,
    token_offset: int,
    looks: In8,
    slots: In64,
    positions: In64,
    request_offsets: In64,
    marks: In8,
    ledger: In64x2,
    heads: Out32,
    links: Out32x2,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
) -> None:
    """Take the entries for clean that were looked at and not marked."""
    for r in range(len(req_pool_indices)):
        if looks[r] != WATCHED:
            continue
        row = int(req_pool_indices[r])
        truth_len = max(0, int(truth_lens[r])) if len(truth_lens) > 0 else 0
        for i in range(int(request_offsets[r]), int(request_offsets[r + 1])):
            if marks[i] != 0:
                continue
            slot, position = int(slots[i]), int(positions[i])
            # Given out later than it is read: only a damaged file says so, and it may be news to the next forward.
            if 0 < slot < ledger.shape[0] and ledger[slot, ALLOC] > event + 1:
                continue
            if link_entry(req_to_token, lut, has_lut, heads, links, row, position) == 0:
                continue
            settle(pending, counts, book, row, position)
            if truth_len <= position + token_offset < book[row, TRUTH]:
                book[row, TRUTH] = max(0, position + token_offset)


def settle_forward(
    cells: Cells,
    look: ForwardLook,
    *,
    req_pool_indices: Int64Array,
    event: int,
    req_to_token: npt.NDArray[np.int32],
    full_to_swa: Int64Array | None,
    truth_lens: Int64Array | None,
    token_offset: int,
    verify_plan: VerifyPlan,
    ledger: Int64Array | None,
    backend: str = "cpu",
) -> None:
    """Take what was looked at and not marked for clean; tables are still as the plan found them.

    `ledger` `[num_slots, 8] int64` as the history checks have it, None without any. Slots that the forward wrote must
    be invalidated afterwards.
    """
    select(settle_forward_loops, backend)(
        req_pool_indices,
        event,
        req_to_token,
        _NO_INTS if full_to_swa is None else full_to_swa,
        int(full_to_swa is not None),
        _NO_INTS if truth_lens is None else truth_lens,
        token_offset,
        look.looks,
        verify_plan.slots,
        verify_plan.expected_positions,
        verify_plan.request_offsets,
        look.marks,
        _NO_LEDGER if ledger is None else ledger,
        cells.heads,
        cells.links,
        cells.pending,
        cells.counts,
        cells.book,
    )


_NO_INTS = np.zeros(0, np.int64)
_NO_LEDGER = np.zeros((0, LEDGER_COLUMNS), np.int64)
