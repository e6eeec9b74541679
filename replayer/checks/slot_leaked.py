"""A request is gone, or its row has moved on, and a slot is still held in its name.

Invariant: when a request finishes, is aborted or retracted, all it held was given back or handed to the prefix cache
before; and when a forward overwrites a row's entry, the slot that stood there is given back at the latest before the
request's next forward. Evidence: the slot's allocation and the status event, or the two forwards. Legitimate
exceptions: slots that are shared or cached are not the request's to give back; an entry overwritten by de-duplication
is freed at once. Judged only where the trace promises to tell of every slot.
"""

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.ledger import ALLOC
from ...recorder.state.events import StatusEvent
from ...recorder.trace.reader import EventView
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .reporting import event_finding, forward_finding
from .view import ForwardView

Int64Array = npt.NDArray[np.int64]


class SlotLeaked(HistoryCheck):
    """Looks at requests that leave, and at table entries that are overwritten."""

    covered = Covered.COMPILED
    judges = frozenset({"status"})

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each group in which a request that leaves still holds slots."""
        del view
        event, history = self._history.known, self._history
        if not history.complete or not isinstance(event, StatusEvent) or event.status == "admitted":
            return []
        findings = []
        for part in history.ledger.held_slots(event.request_id):
            rows = history.ledger.rows[part.group][part.slots]
            findings.append(
                event_finding(
                    "slot_leaked",
                    event,
                    history,
                    group=part.group,
                    slots=part.slots,
                    detail=f"request {history.request_table.name(event.request_id)} is {event.status} and still holds it",
                    events=[int(rows[0, ALLOC]) - 1],
                    cause=Cause("request_left"),
                )
            )
        return findings

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request whose row dropped slots in its forward before that it still holds."""
        if not self._history.complete:
            return []
        history, forward = self._history, view.forward
        findings = [
            forward_finding(
                "slot_leaked",
                forward,
                history.request_table,
                request=r,
                group=one.group,
                position=-1,
                slot=int(one.slots[0]),
                detail="still holds a slot that its row no longer names",
                count=len(one.slots),
                events=[one.event, int(one.alloc[0]) - 1],
                cause=Cause("row_moved_on"),
            )
            for r, one in history.dropped.still_held(forward, history.ledger)
        ]
        for group in view.groups:
            tokens = history.tokens(view)
            history.dropped.note(forward, tokens, group.pool, group.written, view.tables, history.ledger)
        return findings

    def finish(self) -> list[Finding]:
        """Return a finding for each request that is gone and was given slots afterwards."""
        history = self._history
        if not history.complete:
            return []
        findings = []
        for request_id in sorted(set(history.ledger.held_by) & set(history.ended)):
            gone = StatusEvent(event=history.ended[request_id], time_ns=0, status="gone", request_id=request_id, row=-1)
            for part in history.ledger.held_slots(request_id):
                rows = history.ledger.rows[part.group][part.slots]
                findings.append(
                    event_finding(
                        "slot_leaked",
                        gone,
                        history,
                        group=part.group,
                        slots=part.slots,
                        detail=f"was given to request {history.request_table.name(request_id)}, which was gone, and never given back",
                        events=[int(rows[0, ALLOC]) - 1],
                        cause=Cause("given_after_end"),
                    )
                )
        return findings
