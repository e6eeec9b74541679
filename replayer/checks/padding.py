"""Padding that writes where somebody's KV is, and padding slots that are read."""

import numpy as np

from ...kernels.replay_pass.ledger import CACHED, HELD, PADDED, PADDED_LIVE, PADDED_WRITTEN, SHARED, STATE
from ..report.findings import NO_CAUSE, Cause, Finding
from .check import Access, Covered, Explained, HistoryCheck, LedgerCheck, Repeats, happened, held_by, register
from .history import History
from .view import ForwardView


@register
class PaddedWrite(LedgerCheck):
    """A padding token writes a slot that is in use.

    Invariant: padding rows and tokens behind the last request write slot 0, or a slot that nobody uses. Padded rows that
    keep the slots of the step before show here; a padding slot -1 that wraps to the last slot on the device does not, since
    -1 is what the engine tells, and shows in the KV hash. Evidence: the slot's allocation and the forward. Legitimate
    exceptions: none; if the trace does not promise to report every slot, only slots that the same forward reads or writes
    count as in use.
    """

    kind = "padded_write"
    finds = "a padding token writes a slot that is in use"
    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.written = Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding if padding writes slots in use that were not reported already."""
        complete, findings = self.history.complete, []
        for judged in self.history.judge(view):
            bits = PADDED_WRITTEN | (PADDED_LIVE if complete else 0)
            findings += self.write_findings(view, judged, bits, self.written)
            if not complete:
                findings += self.read_findings(view, judged, PADDED)
        return findings

    def explain(self, access: Access) -> Explained:
        """Say whose slot padding writes, or that it is read."""
        row = access.row
        if not access.is_write:
            return "reads a slot that padding of the same forward writes", happened(row), Cause("same_forward")
        in_use = self.history.complete and row[STATE] in (HELD, SHARED, CACHED)
        owner = self.holder(row) if in_use else "a request of the same forward"
        cause = held_by(row) if in_use else Cause("same_forward")
        return f"padding writes a slot of {owner}", happened(row), cause

    def forget(self) -> None:
        """Forget what was reported."""
        super().forget()
        self.written.forget()


@register
class PaddingSlotRead(HistoryCheck):
    """A forward reads a padding slot for a position of a request.

    Invariant: every position of a prefix has a slot that keeps its K and V; in a padding slot everybody's padding is written
    over it, and no record of it is verified. A table entry that was never filled, or was cleared too early, and a token that
    was written to the padding slot show here. Evidence: the forward. Legitimate exceptions: sliding windows, whose early
    positions lead nowhere; slots that lost events may have named. Judged in traces that have lost nothing.
    """

    kind = "padding_slot_read"
    finds = "a forward reads a padding slot for a position of a request"
    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that reads a padding slot and was not reported for it already."""
        findings: list[Finding] = []
        for group in view.groups if not self.history.had_gap else ():
            known = group.pool.group
            if known.window or known.lut >= 0 or known.reads_before_write or group.pool.any_unknown:
                continue
            entries = np.flatnonzero(np.isin(group.slots, known.padding_slots))
            group.mark(entries)
            findings += self.of_entries(
                view,
                group,
                lambda _: ("reads a padding slot, which keeps nobody's K and V", [], NO_CAUSE),
                requests=group.readers(entries),
                positions=group.positions[entries],
                slots=group.slots[entries],
            )
        return findings
