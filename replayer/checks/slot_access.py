"""Reads and writes of a forward whose slot is free, somebody else's, or written by another token of the same forward."""

from ...kernels.replay_pass.ledger import (
    ALLOC,
    CACHED,
    FREE,
    LEFT,
    OWNER,
    READ_FOREIGN,
    READ_FREE,
    READ_RECYCLED,
    STATE,
    WRITE_CACHED,
    WRITE_FOREIGN,
    WRITE_FREE,
    WRITES_AGAIN,
    WRITTEN_TWICE,
)
from ..report.findings import NO_CAUSE, Cause, Finding
from .check import Access, Covered, Explained, LedgerCheck, changed_hands, happened, held_by, register
from .view import ForwardView


@register
class ReadAfterFree(LedgerCheck):
    """A forward reads a slot that is free.

    Invariant: every prefix slot that a forward reads is held by a request or by the prefix cache. Evidence: the
    allocation, the event that freed the slot, its last write, and the forward. Legitimate exceptions: none if events
    stand in the order of their launches: a forward launched before a free (overlap's one extra forward of a finished
    request) is recorded before it. Judged only if the trace promises to report every slot, since an unreported allocation
    would excuse it.
    """

    kind = "read_after_free"
    finds = "a forward reads a slot that is free"
    covered = Covered.COMPILED
    needs_complete = True
    reads = READ_FREE

    def explain(self, access: Access) -> Explained:
        """Say since when the slot is free, and whose it was."""
        row = access.row
        if not row[LEFT]:
            return "reads a slot that was never given out", happened(row), Cause("never_given_out")
        owner = f"request {self.history.request_table.name(int(row[OWNER]))}" if row[OWNER] >= 0 else "nobody"
        detail = f"reads a slot that is free since event {row[LEFT] - 1}, held before by {owner}"
        return detail, happened(row), Cause("free", int(row[OWNER]))


@register
class ReadOfForeignSlot(LedgerCheck):
    """A forward reads a slot that now belongs to another request alone, or was given out anew since it read it last.

    Invariant: what a request reads is its own, shared with it, or the prefix cache's; and a slot that it goes on reading is
    not given out meanwhile. This is the use after free once the slot has been given out again, and the table row that
    points into another request. Evidence: the allocation that made it the other's, the event before it that freed it, its
    last write, and the forward. Legitimate exceptions: prefix hits and forks join slots (status "shared"); what is in the
    prefix cache is everybody's (status "cached"); a request that was retracted and resumes reads anew. Judged only if the
    trace promises to report every slot, since an unreported hand-over would excuse it.
    """

    kind = "read_of_foreign_slot"
    finds = "a forward reads a slot that is another request's, or was given out anew while it read it"
    covered = Covered.COMPILED
    needs_complete = True
    reads = READ_FOREIGN | READ_RECYCLED

    def explain(self, access: Access) -> Explained:
        """Say whose the slot is, or when it was given out anew."""
        row = access.row
        if not access.bits & READ_FOREIGN:
            detail = f"goes on reading a slot that was given out anew in event {row[ALLOC] - 1}"
            return detail, happened(row), Cause("given_out_anew")
        owner = self.history.request_table.name(int(row[OWNER]))
        return f"reads a slot that is request {owner}'s since event {row[ALLOC] - 1}", happened(row), held_by(row)


@register
class WriteToForeignSlot(LedgerCheck):
    """A forward writes a slot that is not the writing request's.

    Invariant: a token is written to a slot that its request holds, and no two requests of a forward write one slot.
    Evidence: the event that freed the slot, handed it to the prefix cache or gave it to another request, and the forward.
    Legitimate exceptions: the owner of a page goes on writing into it after a fork has joined it. Two requests writing
    one slot in one forward is judged in every trace; the rest only if the trace promises to report every slot.
    """

    kind = "write_to_foreign_slot"
    finds = "a forward writes a slot that is not the writing request's"
    covered = Covered.COMPILED

    @property
    def writes(self) -> int:  # type: ignore[override]  # more is judged in a complete trace
        """The bits that are judged."""
        return WRITTEN_TWICE | (WRITE_FREE | WRITE_CACHED | WRITE_FOREIGN if self.history.complete else 0)

    def explain(self, access: Access) -> Explained:
        """Say whose the slot is."""
        row, events = access.row, changed_hands(access.row)
        if not access.bits & self.writes & ~WRITTEN_TWICE:
            return "writes a slot that another request of the same forward writes", events, Cause("same_forward")
        if row[STATE] == FREE:
            return "writes a slot that is free", events, Cause("free")
        if row[STATE] == CACHED:
            return "writes a slot that the prefix cache holds", events, held_by(row)
        return f"writes a slot of {self.holder(row)}", events, held_by(row)


@register
class SlotWrittenTwice(LedgerCheck):
    """A forward writes two tokens of a request to one slot.

    Invariant: each token of a forward has a slot of its own. Evidence: the slot's allocation and the forward. Legitimate
    exceptions: slot 0 and negative slots, where nothing is kept. Two requests that write one slot are
    `write_to_foreign_slot`; two full slots that lead to one SWA slot are `swa_mapping_stale`. Judged in every trace.
    """

    kind = "slot_written_twice"
    finds = "a forward writes two tokens of a request to one slot"
    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that writes a slot twice."""
        return [
            finding
            for judged in self.history.judge(view)
            if judged.group.pool.group.lut < 0
            for finding in self.write_findings(view, judged, WRITES_AGAIN, self.repeats)
        ]

    def explain(self, access: Access) -> Explained:
        """Say what is left of them."""
        detail = "two tokens of one forward are written to one slot, and the second is what is left"
        return detail, changed_hands(access.row), NO_CAUSE
