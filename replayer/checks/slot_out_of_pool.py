"""An event gives out, gives back or hands over a slot that the pool does not have.

Invariant: a pool of n slots has the slots 0 to n - 1. Evidence: the event. Legitimate exceptions: none. The other slots
of the event change hands as it says. Forwards that read or write such slots make the same finding whichever checks are
chosen. Judged in every trace.
"""

from ...recorder.state.events import SlotEvent
from ...recorder.trace.reader import EventView
from ..report.findings import Finding
from .check import Covered, HistoryCheck
from .reporting import event_finding

_VERBS = {"alloc": "is given out", "free": "is given back", "evict": "is evicted"}


class SlotOutOfPool(HistoryCheck):
    """Looks at every event that names slots which change hands."""

    covered = Covered.COMPILED
    judges = frozenset(_VERBS)

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each group of which the event names slots that there are not."""
        event, history = self._history.known, self._history
        if not isinstance(event, SlotEvent):
            return []
        return [
            event_finding(
                "slot_out_of_pool",
                event,
                history,
                group=part.group,
                slots=part.beyond,
                detail=f"{_VERBS[view.kind]}, the pool has {history.header.groups[part.group].num_slots} slots",
            )
            for part in event.parts
            if len(part.beyond)
        ]
