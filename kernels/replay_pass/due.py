"""One forward of the incremental pass: which prefix entries are due, their plan, and which are verified afterwards."""

import functools
from typing import Final, NamedTuple

import numpy as np

from ..arrays import Int32Array, Int64Array
from ..constants import PADDING_ROW, PADDING_SLOT
from ..dispatch import In8, In32x2, In64, In64x2, Out8, Out64, primitive, select
from ..ops.plan.reference import PlanArrays, VerifyPlan, expected_token_at, look_up_slot, put_entry, window_start
from .entries import (
    FIRST,
    HI,
    LO,
    NUM_DUE,
    STAMP,
    TRUTH,
    EntryStates,
    SlotTable,
    full_slot_of,
    invalidate_slot,
    link_entry,
    mark_verified,
    next_due,
    slot_of,
    unwatch,
    watch,
)
from .ledger import ALLOC, LEDGER_COLUMNS

# Which of a request's entries are due.
NOTHING: Final = 0  # a padding row
WATCHED: Final = 1  # those that `EntryStates` has as due
WHOLE: Final = 2  # all of them: its row is none of the table's, or stands in the batch twice


class Readers(NamedTuple):
    """The requests of a forward, and what of their prefix they read."""

    rows: In64  # [bs]: req_pool_indices
    requests: In64  # [bs]: request ids
    prefix_lens: In64  # [bs], cut to the table's width
    truth_lens: In64  # [bs]; [0] if there are no truth tokens


@primitive()
def resolve_conflict(states: EntryStates, table: SlotTable, row: int, position: int) -> None:
    """Make all readers of an SWA slot due if an entry that is due reaches it from another full slot."""
    slot = slot_of(table, row, position)
    if not 0 < slot < len(states.heads) - 1 or states.heads[slot] == 0:
        return
    if full_slot_of(states, table, slot) != int(table.req_to_token[row, position]):
        invalidate_slot(states, slot)


@primitive()
def watch_forward_loops(
    readers: Readers,
    event: int,
    serial: int,
    table: SlotTable,
    window: int,
    token_offset: int,
    states: EntryStates,
    how: Out8,
    totals: Out64,
) -> None:
    """Say which of each request's entries are due; `totals` takes how many entries it reads, and how many are due."""
    bs = len(readers.rows)
    totals[0] = 0
    totals[1] = 0
    for r in range(bs):
        row = int(readers.rows[r])
        if row != PADDING_ROW and 0 <= row < states.rows.shape[0]:
            states.rows[row, STAMP] = -serial if abs(int(states.rows[row, STAMP])) == serial else serial
    for r in range(bs):
        row = int(readers.rows[r])
        if row == PADDING_ROW:
            how[r] = NOTHING
            continue
        end = max(0, int(readers.prefix_lens[r]))
        start = window_start(end, window)
        totals[0] += end - start
        if not 0 <= row < states.rows.shape[0]:
            how[r] = WHOLE
        elif states.rows[row, STAMP] < 0:
            unwatch(states, row)
            how[r] = WHOLE
        else:
            truth_len = int(readers.truth_lens[r]) if len(readers.truth_lens) > 0 else 0
            watch(states, row, int(readers.requests[r]), event, start, end, truth_len, token_offset)
            how[r] = WATCHED
    if len(table.lut) > 0:
        for r in range(bs):
            row = int(readers.rows[r])
            if how[r] == WATCHED:
                end = int(states.rows[row, HI])
                position = next_due(states, row, max(int(states.rows[row, LO]), int(states.rows[row, FIRST])), end)
                while position < end:
                    resolve_conflict(states, table, row, position)
                    position = next_due(states, row, position + 1, end)
            elif how[r] == WHOLE and 0 <= row < states.rows.shape[0]:
                end = max(0, int(readers.prefix_lens[r]))
                for position in range(window_start(end, window), end):
                    resolve_conflict(states, table, row, position)
    for r in range(bs):
        if how[r] == WATCHED:
            totals[1] += states.rows[int(readers.rows[r]), NUM_DUE]
        elif how[r] == WHOLE:
            end = max(0, int(readers.prefix_lens[r]))
            totals[1] += end - window_start(end, window)


@primitive()
def plan_due_loops(
    readers: Readers,
    table: SlotTable,
    window: int,
    truth_tokens: In32x2,
    token_offset: int,
    how: In8,
    states: EntryStates,
    num_slots: int,
    plan: PlanArrays,
    marks: Out8,
    out_of_range: Out64,
) -> None:
    """Write the entries that are due, as `plan_entries_loops` writes all; mark those that cannot be clean."""
    bs = len(readers.rows)
    has_lut = 1 if len(table.lut) > 0 else 0
    entry = 0
    for r in range(bs):
        plan.request_offsets[r] = entry
        if how[r] == NOTHING:
            continue
        row = int(readers.rows[r])
        end = max(0, int(readers.prefix_lens[r]))
        position = window_start(end, window)
        truth_len = int(readers.truth_lens[r]) if len(readers.truth_lens) > 0 else 0
        watched = how[r] == WATCHED
        if watched:
            position = next_due(states, row, max(position, int(states.rows[row, FIRST])), end)
            states.rows[row, FIRST] = position
        before, before_slot = -2, 0
        while position < end:
            prev = -1
            if position > 0:
                prev = before_slot
                if before != position - 1:
                    prev = look_up_slot(table.req_to_token, table.lut, has_lut, row, position - 1, out_of_range)
            slot = look_up_slot(table.req_to_token, table.lut, has_lut, row, position, out_of_range)
            failed = out_of_range[0]
            expected = expected_token_at(truth_tokens, truth_len, row, position + token_offset, out_of_range)
            unclean = slot < 0 or slot >= num_slots or prev >= num_slots or (has_lut != 0 and slot == PADDING_SLOT)
            put_entry(plan, entry, slot, expected, position, prev)
            marks[entry] = 1 if unclean or out_of_range[0] != failed else 0
            entry += 1
            before, before_slot = position, slot
            position = next_due(states, row, position + 1, end) if watched else position + 1
    for r in range(bs, len(plan.request_offsets)):
        plan.request_offsets[r] = entry
    plan.num_valid[0] = entry
    plan.enable[0] = 1


@primitive()
def mark_verified_loops(
    readers: Readers,
    event: int,
    table: SlotTable,
    token_offset: int,
    how: In8,
    plan: PlanArrays,
    marks: In8,
    ledger: In64x2,
    states: EntryStates,
) -> None:
    """Take the entries for clean that were due and are not marked."""
    for r in range(len(readers.rows)):
        if how[r] != WATCHED:
            continue
        row = int(readers.rows[r])
        truth_len = max(0, int(readers.truth_lens[r])) if len(readers.truth_lens) > 0 else 0
        for i in range(int(plan.request_offsets[r]), int(plan.request_offsets[r + 1])):
            if marks[i] != 0:
                continue
            slot, position = int(plan.slots[i]), int(plan.expected_positions[i])
            # Given out later than it is read: only a damaged file says so, and it may be news to the next forward.
            if 0 < slot < ledger.shape[0] and ledger[slot, ALLOC] > event + 1:
                continue
            if link_entry(states, table, row, position) == 0:
                continue
            mark_verified(states, row, position)
            if truth_len <= position + token_offset < states.rows[row, TRUTH]:
                states.rows[row, TRUTH] = max(0, position + token_offset)


class ForwardReads:
    """One group's part of one forward about to run, whose own slots must have been invalidated before.

    `reads`: how many entries it reads; `entries`: how many of them are due, and so in its plan; `marks` `[entries] uint8` says
    which of those are not clean: whoever finds something about one sets it. `event` is the forward's, `serial` > 0 a number
    that no other has.
    """

    __slots__ = ("_event", "_how", "_readers", "_select", "_states", "_table", "_token_offset", "_window", "entries",
                 "marks", "reads")  # fmt: skip

    def __init__(
        self,
        states: EntryStates,
        readers: Readers,
        table: SlotTable,
        *,
        event: int,
        serial: int,
        window: int,
        token_offset: int,
        backend: str,
    ) -> None:
        self._states, self._readers, self._table = states, readers, table
        self._event, self._window, self._token_offset = event, window, token_offset
        self._select = functools.partial(select, backend=backend)
        self._how, totals = np.zeros(len(readers.rows), np.uint8), np.zeros(2, np.int64)
        watch = self._select(watch_forward_loops)
        watch(readers, event, serial, table, window, token_offset, states, self._how, totals)
        self.reads, self.entries = totals.tolist()
        self.marks = np.zeros(self.entries, np.uint8)

    def plan(
        self, verify_plan: VerifyPlan, truth_tokens: Int32Array | None, num_slots: int, out_of_range: Int64Array
    ) -> None:
        """Fill a plan, which has room for `entries` and the batch, with what is due; the rest as for `ops.plan`."""
        truth = _NO_TRUTH if truth_tokens is None else truth_tokens
        given = self._readers, self._table, self._window, truth, self._token_offset, self._how, self._states, num_slots
        self._select(plan_due_loops)(*given, verify_plan, self.marks, out_of_range)

    def mark_verified(self, verify_plan: VerifyPlan, ledger: Int64Array | None) -> None:
        """Take what was due and is not marked for clean; tables are still as the plan found them.

        `ledger` `[num_slots, 8] int64` as the history checks have it, None without any. Slots that the forward wrote must
        be invalidated afterwards.
        """
        given = self._readers, self._event, self._table, self._token_offset, self._how, verify_plan, self.marks
        self._select(mark_verified_loops)(*given, _NO_LEDGER if ledger is None else ledger, self._states)


_NO_TRUTH: Final = np.zeros((0, 0), np.int32)
_NO_LEDGER: Final = np.zeros((0, LEDGER_COLUMNS), np.int64)
