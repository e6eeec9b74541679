"""One forward under the interval executor: which entries must be looked at, and their plan."""

from typing import Final

import numpy as np
import numpy.typing as npt

from ..constants import PADDING_ROW, PADDING_SLOT
from ..dispatch import In8, In32x2, In64, Out8, Out8x2, Out32, Out32x2, Out64, Out64x2, primitive, select
from ..ops.hash.reference import bump
from ..ops.plan.reference import VerifyPlan, look_up_slot, window_start
from .cells import (
    FIRST,
    HI,
    LO,
    PENDING,
    STAMP,
    Cells,
    invalidate_slot,
    led_from,
    next_pending,
    slot_of,
    unwatch,
    watch,
)

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

# How a request's entries are looked at.
NOTHING: Final = 0  # a padding row
WATCHED: Final = 1  # those that are pending
WHOLE: Final = 2  # all of them: its row is none of the table's, or stands in the batch twice


@primitive()
def settle_conflict(
    req_to_token: In32x2,
    lut: In64,
    heads: Out32,
    links: Out32x2,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
    row: int,
    position: int,
) -> None:
    """Have all readers of an SWA slot looked at that an entry about to be looked at reaches from another full slot."""
    slot = slot_of(req_to_token, lut, 1, row, position)
    if not 0 < slot < len(heads) - 1 or heads[slot] == 0:
        return
    if led_from(heads, req_to_token, slot) != int(req_to_token[row, position]):
        invalidate_slot(heads, links, pending, counts, book, slot)


def watch_forward_loops(
    req_pool_indices: In64,
    request_ids: In64,
    prefix_lens: In64,
    event: int,
    serial: int,
    req_to_token: In32x2,
    window: int,
    lut: In64,
    has_lut: int,
    truth_lens: In64,
    token_offset: int,
    heads: Out32,
    links: Out32x2,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
    looks: Out8,
    totals: Out64,
) -> None:
    """Say how each request's entries are looked at, and add up those that it reads and those that are looked at."""
    bs = len(req_pool_indices)
    totals[0] = 0
    totals[1] = 0
    for r in range(bs):
        row = int(req_pool_indices[r])
        if row != PADDING_ROW and 0 <= row < book.shape[0]:
            book[row, STAMP] = -serial if abs(int(book[row, STAMP])) == serial else serial
    for r in range(bs):
        row = int(req_pool_indices[r])
        if row == PADDING_ROW:
            looks[r] = NOTHING
            continue
        end = max(0, int(prefix_lens[r]))
        start = window_start(end, window)
        totals[0] += end - start
        if not 0 <= row < book.shape[0]:
            looks[r] = WHOLE
        elif book[row, STAMP] < 0:
            unwatch(pending, counts, book, row)
            looks[r] = WHOLE
        else:
            truth_len = int(truth_lens[r]) if len(truth_lens) > 0 else 0
            watch(pending, counts, book, row, int(request_ids[r]), event, start, end, truth_len, token_offset)
            looks[r] = WATCHED
    if has_lut != 0:
        for r in range(bs):
            row = int(req_pool_indices[r])
            if looks[r] == WATCHED:
                end = int(book[row, HI])
                position = next_pending(pending, counts, row, max(int(book[row, LO]), int(book[row, FIRST])), end)
                while position < end:
                    settle_conflict(req_to_token, lut, heads, links, pending, counts, book, row, position)
                    position = next_pending(pending, counts, row, position + 1, end)
            elif looks[r] == WHOLE and 0 <= row < book.shape[0]:
                end = max(0, int(prefix_lens[r]))
                for position in range(window_start(end, window), end):
                    settle_conflict(req_to_token, lut, heads, links, pending, counts, book, row, position)
    for r in range(bs):
        if looks[r] == WATCHED:
            totals[1] += book[int(req_pool_indices[r]), PENDING]
        elif looks[r] == WHOLE:
            end = max(0, int(prefix_lens[r]))
            totals[1] += end - window_start(end, window)


def plan_looks_loops(
    req_pool_indices: In64,
    prefix_lens: In64,
    req_to_token: In32x2,
    window: int,
    lut: In64,
    has_lut: int,
    truth_tokens: In32x2,
    truth_lens: In64,
    token_offset: int,
    looks: In8,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
    num_slots: int,
    slots: Out64,
    expected_tokens: Out64,
    expected_positions: Out64,
    prev_slots: Out64,
    num_valid: Out32,
    enable: Out32,
    request_offsets: Out64,
    marks: Out8,
    out_of_range: Out64,
) -> None:
    """Write the entries that are looked at, as `plan_entries_loops` writes all; mark those that cannot be clean."""
    bs = len(req_pool_indices)
    entry = 0
    for r in range(bs):
        request_offsets[r] = entry
        if looks[r] == NOTHING:
            continue
        row = int(req_pool_indices[r])
        end = max(0, int(prefix_lens[r]))
        position = window_start(end, window)
        truth_len = int(truth_lens[r]) if len(truth_lens) > 0 else 0
        watched = looks[r] == WATCHED
        if watched:
            position = next_pending(pending, counts, row, max(position, int(book[row, FIRST])), end)
            book[row, FIRST] = position
        before, before_slot = -2, 0
        while position < end:
            prev = -1
            if position > 0:
                prev = before_slot
                if before != position - 1:
                    prev = look_up_slot(req_to_token, lut, has_lut, row, position - 1, out_of_range)
            slot = look_up_slot(req_to_token, lut, has_lut, row, position, out_of_range)
            expected_token = -1
            unclean = slot < 0 or slot >= num_slots or prev >= num_slots or (has_lut != 0 and slot == PADDING_SLOT)
            truth_position = position + token_offset
            if 0 <= truth_position < truth_len:
                if 0 <= row < truth_tokens.shape[0] and truth_position < truth_tokens.shape[1]:
                    expected_token = int(truth_tokens[row, truth_position])
                else:
                    bump(out_of_range, 1)
                    unclean = True
            slots[entry] = slot
            expected_tokens[entry] = expected_token
            expected_positions[entry] = position
            prev_slots[entry] = prev
            marks[entry] = 1 if unclean else 0
            entry += 1
            before, before_slot = position, slot
            position = next_pending(pending, counts, row, position + 1, end) if watched else position + 1
    for r in range(bs, len(request_offsets)):
        request_offsets[r] = entry
    num_valid[0] = entry
    enable[0] = 1


class ForwardLook:
    """One group's part of one forward: `looks` `[bs] uint8`, how many entries it reads, and how many are looked at.

    `marks` `[entries] uint8` says which entries of the plan are not clean; whoever finds something about one sets it.
    """

    __slots__ = ("entries", "looks", "marks", "reads")

    def __init__(self, looks: ByteArray, reads: int, entries: int) -> None:
        self.looks = looks
        self.reads = reads
        self.entries = entries
        self.marks = np.zeros(entries, np.uint8)


def watch_forward(
    cells: Cells,
    *,
    req_pool_indices: Int64Array,
    request_ids: Int64Array,
    prefix_lens: Int64Array,
    event: int,
    serial: int,
    req_to_token: npt.NDArray[np.int32],
    window: int,
    full_to_swa: Int64Array | None,
    truth_lens: Int64Array | None,
    token_offset: int,
    backend: str = "cpu",
) -> ForwardLook:
    """Bring the cells up to a forward about to run, and return which entries it must look at.

    `req_pool_indices`, `request_ids`, `prefix_lens` (cut to the table's width), `truth_lens` `[bs] int64`; `serial` > 0, a
    number that no other forward has; the rest as for `kernels.plan.plan`. Slots that the forward writes must have been
    invalidated before.
    """
    looks = np.zeros(len(req_pool_indices), np.uint8)
    totals = np.zeros(2, np.int64)
    select(watch_forward_loops, backend)(
        req_pool_indices,
        request_ids,
        prefix_lens,
        event,
        serial,
        req_to_token,
        window,
        _NO_INTS if full_to_swa is None else full_to_swa,
        int(full_to_swa is not None),
        _NO_INTS if truth_lens is None else truth_lens,
        token_offset,
        cells.heads,
        cells.links,
        cells.pending,
        cells.counts,
        cells.book,
        looks,
        totals,
    )
    return ForwardLook(looks, int(totals[0]), int(totals[1]))


def plan_looks(
    cells: Cells,
    look: ForwardLook,
    *,
    req_pool_indices: Int64Array,
    prefix_lens: Int64Array,
    req_to_token: npt.NDArray[np.int32],
    window: int,
    full_to_swa: Int64Array | None,
    truth_tokens: npt.NDArray[np.int32] | None,
    truth_lens: Int64Array | None,
    token_offset: int,
    num_slots: int,
    verify_plan: VerifyPlan,
    out_of_range: Int64Array,
    backend: str = "cpu",
) -> None:
    """Fill the verify plan with what a forward looks at; `verify_plan` has room for `look.entries` and the batch."""
    select(plan_looks_loops, backend)(
        req_pool_indices,
        prefix_lens,
        req_to_token,
        window,
        _NO_INTS if full_to_swa is None else full_to_swa,
        int(full_to_swa is not None),
        _NO_TRUTH if truth_tokens is None else truth_tokens,
        _NO_INTS if truth_lens is None else truth_lens,
        token_offset,
        look.looks,
        cells.pending,
        cells.counts,
        cells.book,
        num_slots,
        verify_plan.slots,
        verify_plan.expected_tokens,
        verify_plan.expected_positions,
        verify_plan.prev_slots,
        verify_plan.num_valid,
        verify_plan.enable,
        verify_plan.request_offsets,
        look.marks,
        out_of_range,
    )


_NO_INTS = np.zeros(0, np.int64)
_NO_TRUTH = np.zeros((0, 0), np.int32)
