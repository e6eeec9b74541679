"""Reads and writes of a forward that a slot's history speaks against, and padding that writes what is in use."""

from collections.abc import Iterator

import numpy as np

from ...kernels.arrays import BoolArray, record_words
from ...kernels.constants import RECORD_POSITION, RECORD_PREV_HASH, RECORD_TOKEN, UNKNOWN_TOKEN
from ...kernels.ops.hash.reference import as_i64, as_u64, mix3, slot_hash
from ...kernels.replay_pass import ledger
from ...kernels.replay_pass.ledger import ALLOC, CACHED, CONTENT, FREE, HELD, LEFT, OWNER, SHARED, STATE
from ...recorder.state.tables import look_up
from ..report.findings import NO_CAUSE, Cause, Finding
from .check import (
    Access,
    Covered,
    Explained,
    HistoryCheck,
    LedgerCheck,
    Repeats,
    changed_hands,
    happened,
    held_by,
    register,
)
from .history import ForwardView, History, Judged


@register
class ReadAfterFree(LedgerCheck):
    """A forward reads a slot that is free.

    A forward launched before a free (overlap's one extra forward of a finished request) is recorded before it. If not every
    slot is reported, a slot that was given back may have been given out since: then only one that its request goes on
    reading is found, if it was given back since the request's last forward and nothing has filled it.
    """

    kind = "read_after_free"
    finds = "a forward reads a slot that is free"
    covered = Covered.COMPILED
    reads = ledger.READ_FREE

    def _explain(self, access: Access) -> Explained:
        row = access.row
        if not row[LEFT]:
            return "reads a slot that was never given out", happened(row), Cause("never_given_out")
        owner = f"request {self.history.request_table.name(int(row[OWNER]))}" if row[OWNER] >= 0 else "nobody"
        detail = f"reads a slot that is free since event {row[LEFT] - 1}, held before by {owner}"
        return detail, happened(row), Cause("free", int(row[OWNER]))


@register
class ReadOfForeignSlot(LedgerCheck):
    """A forward reads a slot that now belongs to another request alone, or was given out anew since it read it last.

    This is the use after free once the slot has been given out again, and the table row that points into another request.
    """

    kind = "read_of_foreign_slot"
    finds = "a forward reads a slot that is another request's, or was given out anew while it read it"
    covered = Covered.COMPILED
    needs = "complete"
    reads = ledger.READ_FOREIGN | ledger.READ_RECYCLED

    def _explain(self, access: Access) -> Explained:
        row = access.row
        if not access.bits & ledger.READ_FOREIGN:
            detail = f"goes on reading a slot that was given out anew in event {row[ALLOC] - 1}"
            return detail, happened(row), Cause("given_out_anew")
        owner = self.history.request_table.name(int(row[OWNER]))
        return f"reads a slot that is request {owner}'s since event {row[ALLOC] - 1}", happened(row), held_by(row)


@register
class WriteToForeignSlot(LedgerCheck):
    """A forward writes a slot that is not the writing request's, or that two requests of the forward write.

    The owner of a page goes on writing into it after a fork has joined it. Two requests that write the same token for the same
    position to one slot in one step do no harm: they were given one page for what both begin with. Nor does one that has joined
    a page in the midst of its prompt, had computed nothing of it, and computes the same tokens for the same positions. Two requests writing one slot is
    judged in every trace, the rest only if the trace promises to report every slot.
    """

    kind = "write_to_foreign_slot"
    finds = "a forward writes a slot that is not the writing request's"
    covered = Covered.COMPILED
    writes = ledger.WRITTEN_TWICE

    def __init__(self, history: History) -> None:
        super().__init__(history)
        if history.complete:
            self.writes |= ledger.WRITE_FREE | ledger.WRITE_CACHED | ledger.WRITE_FOREIGN

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        for judged in self.history.judge(view):
            same = _same_again(view, judged)
            apart = judged._replace(writes=judged.writes[~same], write_bits=judged.write_bits[~same])
            yield from self.found(view, apart, self.writes, is_write=True)

    def _explain(self, access: Access) -> Explained:
        row, events = access.row, changed_hands(access.row)
        if not access.bits & self.writes & ~ledger.WRITTEN_TWICE:
            return "writes a slot that another request of the same forward writes", events, Cause("same_forward")
        if row[STATE] == FREE:
            return "writes a slot that is free", events, Cause("free")
        if row[STATE] == CACHED:
            return "writes a slot that the prefix cache holds", events, held_by(row)
        return f"writes a slot of {self.holder(row)}", events, held_by(row)


@register
class SlotWrittenTwice(LedgerCheck):
    """A forward writes two tokens of a request to one slot.

    Two requests that write one slot are `write_to_foreign_slot`, two full slots that lead to one SWA slot
    `swa_mapping_stale`.
    """

    kind = "slot_written_twice"
    finds = "a forward writes two tokens of a request to one slot"
    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        for judged in self.history.judge(view):
            if judged.group.pool.group.lut < 0:
                yield from self.found(view, judged, ledger.WRITES_AGAIN, is_write=True)

    def _explain(self, access: Access) -> Explained:
        detail = "two tokens of one forward are written to one slot, and the second is what is left"
        return detail, changed_hands(access.row), NO_CAUSE


@register
class HitNeverWritten(LedgerCheck):
    """A forward reads a slot that nobody has written since it was given out.

    A prefix hit in the very forward that is still writing the content, a failed load-back or transfer that is taken for
    done, and a prefix that counts tokens never computed show here. If the trace does not promise to report every slot, only
    two cases are judged: another request of the same forward writes the slot, and a slot given out afresh to another request
    still has the content from before.
    """

    kind = "hit_never_written"
    finds = "a forward reads a slot that nobody has written since it was given out"
    covered = Covered.COMPILED
    reads = ledger.NEVER_WRITTEN | ledger.BEING_WRITTEN

    def _explain(self, access: Access) -> Explained:
        row = access.row
        if access.bits & ledger.BEING_WRITTEN:
            detail = "reads a slot that another request of the same forward is writing"
            return detail, happened(row), Cause("same_forward")
        since = f"was written in event {row[CONTENT] - 1}" if row[CONTENT] else "was never written"
        cause = Cause("written_before" if row[CONTENT] else "never_written")
        return f"reads a slot that was given out in event {row[ALLOC] - 1} and {since}", happened(row), cause


@register
class HitDiffers(LedgerCheck):
    """A request starts from slots that hold other tokens or positions than its own.

    That is, where it reads a position for the first time and somebody else wrote the slot: prefix hit, fork, load-back, a
    table row that points elsewhere. A prefix node whose tokens were cut while its hash was kept shows here. Positions that
    the request has read before are the canary's own business; without truth tokens only positions are compared.
    """

    kind = "hit_differs"
    finds = "a request starts from slots that hold other tokens or positions than its own"
    covered = Covered.COMPILED
    reads = ledger.DIFFERS

    def _explain(self, access: Access) -> Explained:
        pool, plan = access.group.pool, access.group.plan
        slot, token = int(plan.slots[access.entry]), int(plan.expected_tokens[access.entry])
        record = record_words(pool.pool.tail[pool.group.halves[0]], written=False)[slot]
        event, forward, writer = pool.last_writers(np.array([slot]))[0].tolist()
        expected = f"position {int(plan.expected_positions[access.entry])}"
        if token != -1:
            expected = f"token {token}, {expected}"
        detail = (
            f"starts from a slot with token {int(record[RECORD_TOKEN])}, position {int(record[RECORD_POSITION])}, "
            f"written by request {self.history.request_table.name(writer)} in forward {forward}; expected {expected}"
        )
        return detail, [event], Cause("", writer, int(record[RECORD_TOKEN]), token)


@register
class PaddedWrite(LedgerCheck):
    """A padding token writes a slot that is in use.

    Padded rows that keep the slots of the step before show here; a padding slot -1 that wraps to the last slot on the device
    does not, since -1 is what the engine tells, and shows in the KV hash. If the trace does not promise to report every
    slot, only slots that the same forward reads or writes count as in use.
    """

    kind = "padded_write"
    finds = "a padding token writes a slot that is in use"
    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.written = Repeats()

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        complete = self.history.complete
        for judged in self.history.judge(view):
            bits = ledger.PADDED_WRITTEN | (ledger.PADDED_LIVE if complete else 0)
            yield from self.found(view, judged, bits, is_write=True, repeats=self.written)
            if not complete:
                yield from self.found(view, judged, ledger.PADDED, is_write=False)

    def _explain(self, access: Access) -> Explained:
        row = access.row
        if not access.is_write:
            return "reads a slot that padding of the same forward writes", happened(row), Cause("same_forward")
        owner, cause = "a request of the same forward", Cause("same_forward")
        if self.history.complete and row[STATE] in (HELD, SHARED, CACHED):
            owner, cause = self.holder(row), held_by(row)
        return f"padding writes a slot of {owner}", happened(row), cause


@register
class PaddingSlotRead(HistoryCheck):
    """A forward reads a padding slot for a position of a request.

    Everybody's padding is written over it, and no record of it is verified: a table entry that was never filled, or was
    cleared too early, and a token that was written to the padding slot show here. Not judged: positions before a sliding
    window, which lead nowhere, windows behind a full-to-SWA table, and traces that have lost something.
    """

    kind = "padding_slot_read"
    finds = "a forward reads a padding slot for a position of a request"
    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        for group in view.groups if not self.history.had_gap else ():
            known = group.pool.group
            if known.lut >= 0 or group.pool.any_unknown:
                continue
            entries = np.flatnonzero(np.isin(group.slots, known.padding_slots))
            if known.window and len(entries):
                first = view.forward.prefix_lens[group.readers(entries)] - known.window
                entries = entries[group.positions[entries] >= first]
            group.mark(entries)
            yield from self.of_entries(
                view,
                group,
                lambda _: ("reads a padding slot, which keeps nobody's K and V", [], NO_CAUSE),
                requests=group.readers(entries),
                positions=group.positions[entries],
                slots=group.slots[entries],
                repeats=self.repeats,
            )


def _same_again(view: ForwardView, judged: Judged) -> BoolArray:
    """Say which of the writes that are wrong `[n]` leave in their slot what it holds, or what another request writes there.

    Another request of the same step writes the same token for the same position. Or the request has joined a page of which it
    had computed nothing, and computes it all the same (an engine that de-duplicates what a chunk is about to compute).
    """
    slots, wrong = judged.group.request_slots, judged.writes
    if not len(wrong):
        return np.zeros(0, np.bool_)
    owners = judged.group.writers(np.arange(len(slots)))
    tokens, positions = view.forward.input_ids[: len(slots)], view.forward.positions[: len(slots)]
    others = np.flatnonzero(np.isin(slots, slots[wrong[wrong < len(slots)]]))
    found = np.zeros(len(wrong), np.bool_)
    for n, entry in enumerate(wrong.tolist()):
        if entry < len(slots) and tokens[entry] != UNKNOWN_TOKEN:
            mine = others[(slots[others] == slots[entry]) & (owners[others] != owners[entry])]
            same = (tokens[mine] == tokens[entry]) & (positions[mine] == positions[entry])
            found[n] = bool(same.all())
            found[n] &= len(mine) > 0 or (
                _holds_it(view, judged, entry)
                and (_written_in_an_earlier_part(view, judged, entry) or _joined_whole(view, judged, entry))
            )
    by = judged.group.writers(wrong)
    return found & ~np.isin(by, by[~found])  # who writes anything else there as well shares it with nobody


def _holds_it(view: ForwardView, judged: Judged, entry: int) -> bool:
    """Whether a token's slot holds the same token for the same position."""
    pool, slot = judged.group.pool, int(judged.group.request_slots[entry])
    record = record_words(pool.pool.tail[pool.group.halves[0]], written=False)[slot]
    same_token = record[RECORD_TOKEN] == view.forward.input_ids[entry]
    return bool(same_token and record[RECORD_POSITION] == view.forward.positions[entry])


def _written_in_an_earlier_part(view: ForwardView, judged: Judged, entry: int) -> bool:
    """Whether a token's slot has been written by an earlier forward of the same step, which may be told as several."""
    slot = int(judged.group.request_slots[entry])
    _, by, _ = judged.group.pool.last_writers(np.array([slot]))[0].tolist()
    return bool(view.forward.forward - view.forward.part <= by < view.forward.forward)


def _joined_whole(view: ForwardView, judged: Judged, entry: int) -> bool:
    """Whether a token's request was the last to join the slot, in a page of several of which it had counted nothing as computed, and
    which begins behind the very tokens that the request has before it.
    """
    group, slot = judged.group, int(judged.group.request_slots[entry])
    row = int(group.writers(np.array([entry]))[0])
    owner, prefix, pool = int(view.forward.request_ids[row]), int(view.forward.prefix_lens[row]), group.pool.group
    within = (slot - pool.slot_shift) % max(1, pool.page_size)
    if pool.page_size == 1 or pool.lut >= 0 or int(judged.ledger[slot, ledger.JOINER]) != owner:
        return False
    first = entry - within  # the page's
    if int(view.forward.positions[entry]) - within < prefix or first < int(group.write_offsets[row]):
        return False
    records = record_words(group.pool.pool.tail[pool.halves[0]], written=False)
    table, rows = view.tables.req_to_token[pool.table], view.forward.req_pool_indices[row : row + 1]
    before, known = look_up(table, rows, np.array([prefix - 1]))
    if prefix and not (known[0] and 0 < before[0] < len(records)):
        return False
    chain = slot_hash(records, int(before[0]) if prefix else -1)
    for n in range(int(group.write_offsets[row]), first):
        chain = mix3(chain, as_u64(view.forward.input_ids[n]), as_u64(view.forward.positions[n]))
    return int(records[slot - within, RECORD_PREV_HASH]) == as_i64(chain)
