"""The allocator gives out a slot that somebody holds.

Invariant: a slot that is given out is free. Evidence: the allocation that made it somebody's, the event that handed it
to the prefix cache where that is so, and this allocation; a slot that one event names twice counts too. Legitimate exceptions: joining a prefix or a fork's shared
pages gives nothing out (status "shared"); handing slots to the cache neither (status "cached"). Judged only where the
trace promises to tell of every slot, since an untold free would excuse it.
"""

from ...kernels.replay_pass.ledger import HELD, OWNER, STATE
from ...recorder.state.events import SlotEvent
from ...recorder.trace.reader import EventView
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .reporting import by_row, changed_hands, event_finding, held_by, holder


class SlotDoubleAllocated(HistoryCheck):
    """Looks at every allocation."""

    covered = Covered.COMPILED
    judges = frozenset({"alloc"})

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each holder whose slots an allocation gives out again."""
        del view
        event, history = self._history.known, self._history
        if not history.complete or not isinstance(event, SlotEvent) or event.kind != "alloc" or event.status:
            return []
        findings = []
        for part in history.touched:
            rows = part.rows
            taken = rows[:, STATE] >= HELD
            slots, rows = part.slots[taken], rows[taken]
            for _, mine in by_row(rows, OWNER) if len(slots) else []:
                first = rows[mine][0]
                findings.append(
                    event_finding(
                        "slot_double_allocated",
                        event,
                        history,
                        group=part.group,
                        slots=slots[mine],
                        detail=f"is given out while {holder(first, history)} holds it",
                        events=changed_hands(first),
                        cause=held_by(first),
                    )
                )
            if len(part.repeated):
                findings.append(
                    event_finding(
                        "slot_double_allocated",
                        event,
                        history,
                        group=part.group,
                        slots=part.repeated,
                        detail="is given out twice by one event",
                        cause=Cause("same_event"),
                    )
                )
        return findings
