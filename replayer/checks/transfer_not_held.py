"""A transfer reads or fills slots that its request does not hold.

Invariant: a transfer starts from, and lands in, slots that its request or the prefix cache holds. A transfer that ends
after its pages were freed lands in free slots or in the next owner's. Evidence: the event that gave the slots away and
the transfer's. Legitimate exceptions: a failed transfer does not land; slots that several requests share, or that the
prefix cache holds, may be sent; a transfer that names no request is judged for free slots only. Judged only where the
trace promises to tell of every slot.
"""

from ...kernels.replay_pass.ledger import FREE, HELD, OWNER, STATE
from ...recorder.state.events import TransferEvent
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import SEND
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .reporting import by_row, changed_hands, event_finding, held_by


class TransferNotHeld(HistoryCheck):
    """Looks at transfers that start and at those that land."""

    covered = Covered.COMPILED
    judges = frozenset({"transfer"})

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each holder, or none, whose slots a transfer takes part in."""
        del view
        event, history = self._history.known, self._history
        if not history.complete or not isinstance(event, TransferEvent):
            return []
        if event.status == "failed" or (event.status == "end" and event.direction == SEND):
            return []
        findings = []
        for part in history.touched:
            rows = part.rows
            wrong = history.ledger.free(rows)
            if event.request_id >= 0:
                wrong |= (rows[:, STATE] == HELD) & (rows[:, OWNER] != event.request_id)
            slots, rows = part.slots[wrong], rows[wrong]
            verb = "sends" if event.direction == SEND else "lands in" if event.status == "end" else "will land in"
            for state, mine in by_row(rows, STATE) if len(slots) else []:
                first = rows[mine][0]
                whose = (
                    "that is free" if state == FREE else f"of request {history.request_table.name(int(first[OWNER]))}"
                )
                findings.append(
                    event_finding(
                        "transfer_not_held",
                        event,
                        history,
                        group=part.group,
                        slots=slots[mine],
                        detail=f"a transfer {verb} a slot {whose}",
                        events=changed_hands(first),
                        cause=Cause("free") if state == FREE else held_by(first),
                    )
                )
        return findings
