"""A slot that is free is given back again.

Invariant: what is given back or evicted is held. Evidence: the event that freed it before, and this one; a slot that
one event names twice counts too. Legitimate exceptions: none where every slot is told of; a page shared by several
requests is given back once, by whoever lets go last. Judged only where the trace promises to tell of every slot,
since an untold allocation would excuse it.
"""

from ...kernels.replay_pass.ledger import ALLOC, LEFT
from ...recorder.state.events import SlotEvent
from ...recorder.trace.reader import EventView
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .reporting import by_row, event_finding


class SlotFreedTwice(HistoryCheck):
    """Looks at everything that is given back."""

    covered = Covered.COMPILED
    judges = frozenset({"free", "evict"})

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each earlier event that freed what this one frees."""
        del view
        event, history = self._history.known, self._history
        if not history.complete or not isinstance(event, SlotEvent) or event.kind == "alloc":
            return []
        findings = []
        for part in history.touched:
            rows = part.rows
            free = history.ledger.free(rows)
            slots, rows = part.slots[free], rows[free]
            for left, mine in by_row(rows, LEFT) if len(slots) else []:
                before = f"since event {left - 1}" if left else "and was never given out"
                findings.append(
                    event_finding(
                        "slot_freed_twice",
                        event,
                        history,
                        group=part.group,
                        slots=slots[mine],
                        detail=f"is given back ({event.note or event.kind}) though it is free {before}",
                        events=[int(rows[mine][0][ALLOC]) - 1, left - 1],
                        cause=Cause("free" if left else "never_given_out"),
                    )
                )
            if len(part.repeated):
                findings.append(
                    event_finding(
                        "slot_freed_twice",
                        event,
                        history,
                        group=part.group,
                        slots=part.repeated,
                        detail="is given back twice by one event",
                        cause=Cause("same_event"),
                    )
                )
        return findings
