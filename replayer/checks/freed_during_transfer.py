"""Slots are given back, or given to somebody else, while a transfer of them is under way.

Invariant: between a transfer's start and its end or failure its slots stay where they are. An abort that frees the
pages of a request whose transfer has not stopped shows here, before the late write lands on the next owner. Evidence:
the transfer's start and the event that gave the slots away. Legitimate exceptions: handing the slots to the prefix
cache keeps them; after "failed" they may go. Where the trace does not promise to tell of every slot, only what is said
to go back to the pool is judged.
"""

import numpy as np

from ...recorder.state.events import SlotEvent
from ...recorder.trace.reader import EventView
from ..report.findings import Finding
from .check import Covered, HistoryCheck
from .reporting import by_row, event_finding


class FreedDuringTransfer(HistoryCheck):
    """Looks at everything that changes hands."""

    covered = Covered.COMPILED
    judges = frozenset({"alloc", "free", "evict"})

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each transfer whose slots this event gives away."""
        del view
        event, history = self._history.known, self._history
        if not isinstance(event, SlotEvent):
            return []
        if event.kind == "alloc" and (event.status or not history.complete):
            return []
        findings = []
        for part in history.touched:
            moving = np.flatnonzero(part.transfer)
            slots, started = part.slots[moving], part.transfer[moving]
            verb = {"alloc": "is given out", "free": "is given back", "evict": "is evicted"}[event.kind]
            for start, mine in by_row(started[:, None], 0) if len(slots) else []:
                findings.append(
                    event_finding(
                        "freed_during_transfer",
                        event,
                        history,
                        group=part.group,
                        slots=slots[mine],
                        detail=f"{verb} while the transfer that began in event {start - 1} is under way",
                        events=[start - 1],
                    )
                )
        return findings
