"""A request gives back a slot that is another's, or the prefix cache's.

Invariant: a request frees what it holds, the cache evicts what it holds. Evidence: the allocation or hand-over that
made the slot somebody else's, and this event. This is how pages inserted in the prefix cache and freed by an abort,
and a stale full-to-SWA entry through which a live slot is freed, show before anybody reads the damage. Legitimate
exceptions: slots that several requests share are given back by whoever lets go last; an event that names no request
is nobody's. Judged only where the trace promises to tell of every slot, since an untold hand-over would excuse it.
"""

from ...kernels.replay_pass.ledger import CACHED, HELD, OWNER, STATE
from ...recorder.state.events import SlotEvent
from ...recorder.trace.reader import EventView
from ..report.findings import Finding
from .check import Covered, HistoryCheck
from .reporting import by_row, changed_hands, event_finding, held_by, holder


class ForeignSlotFreed(HistoryCheck):
    """Looks at everything that is given back."""

    covered = Covered.COMPILED
    judges = frozenset({"free", "evict"})

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each holder whose slots somebody else gives back."""
        del view
        event, history = self._history.known, self._history
        if not history.complete or not isinstance(event, SlotEvent) or event.kind == "alloc":
            return []
        findings = []
        for part in history.touched:
            rows = part.rows
            if event.kind == "evict":
                foreign = rows[:, STATE] == HELD
            elif event.request_id >= 0:
                foreign = (rows[:, STATE] == CACHED) | ((rows[:, STATE] == HELD) & (rows[:, OWNER] != event.request_id))
            else:
                continue
            slots, rows = part.slots[foreign], rows[foreign]
            for _, mine in by_row(rows, OWNER) if len(slots) else []:
                first = rows[mine][0]
                verb = "is evicted" if event.kind == "evict" else f"is given back ({event.note or 'free'})"
                findings.append(
                    event_finding(
                        "foreign_slot_freed",
                        event,
                        history,
                        group=part.group,
                        slots=slots[mine],
                        detail=f"{verb} while {holder(first, history)} holds it",
                        events=changed_hands(first),
                        cause=held_by(first),
                    )
                )
        return findings
