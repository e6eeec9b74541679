"""A request joins a slot that nobody holds, or hands it to the prefix cache.

Invariant: what a request joins (status "shared") is held, by another request or by the prefix cache; what it hands to
the prefix cache (status "cached") is held too. A prefix cache that
goes on naming what it gave back, and a fork of a request that is gone, show here before anybody reads the slot. Evidence:
the event that freed the slot, and this one. Legitimate exceptions: what one other request holds alone may be joined: that
is what a fork is. Judged only where the trace promises to tell of every slot, since an untold allocation would excuse it.
"""

from ...kernels.replay_pass.ledger import ALLOC, LEFT
from ...recorder.state.events import SlotEvent
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import ALLOC_CACHED, ALLOC_SHARED
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .reporting import by_row, event_finding

_VERBS = {ALLOC_SHARED: "is joined", ALLOC_CACHED: "is handed to the prefix cache"}


class FreeSlotShared(HistoryCheck):
    """Looks at everything that is joined or handed over."""

    covered = Covered.COMPILED
    judges = frozenset({"alloc"})

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each earlier event that freed what this one joins."""
        del view
        event, history = self._history.known, self._history
        if not history.complete or not isinstance(event, SlotEvent) or event.status not in _VERBS:
            return []
        findings = []
        for part in history.touched:
            free = history.ledger.free(part.rows)
            slots, rows = part.slots[free], part.rows[free]
            for left, mine in by_row(rows, LEFT) if len(slots) else []:
                before = f"since event {left - 1}" if left else "and was never given out"
                findings.append(
                    event_finding(
                        "free_slot_shared",
                        event,
                        history,
                        group=part.group,
                        slots=slots[mine],
                        detail=f"{_VERBS[event.status]} though it is free {before}",
                        events=[int(rows[mine][0][ALLOC]) - 1, left - 1],
                        cause=Cause("free" if left else "never_given_out"),
                    )
                )
        return findings
