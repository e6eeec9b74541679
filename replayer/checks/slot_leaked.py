"""Slots that are still held for a request that is gone, or that its row no longer names."""

from ...kernels.replay_pass.ledger import ALLOC
from ...recorder.state.events import StatusEvent
from ...recorder.trace.reader import EventView
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, register
from .view import ForwardView


@register
class SlotLeaked(HistoryCheck):
    """A request is gone, or its row has moved on, and a slot is still held in its name.

    Invariant: when a request finishes, is aborted or retracted, all it held was given back or handed to the prefix cache
    before; and when a forward overwrites a row's entry, the slot that stood there is given back at the latest before the
    request's next forward. Evidence: the slot's allocation and the status event, or the two forwards. Legitimate
    exceptions: slots that are shared or cached are not the request's to give back; an entry overwritten by de-duplication
    is freed at once. Judged only if the trace promises to report every slot.
    """

    kind = "slot_leaked"
    finds = "a request is gone, or its row has moved on, and still holds a slot"
    covered = Covered.COMPILED
    events = frozenset({"status"})
    needs_complete = True

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each group in which a request that leaves still holds slots."""
        event = self.history.known
        if not isinstance(event, StatusEvent) or event.status == "admitted":
            return []
        name = self.history.request_table.name(event.request_id)
        return self._held(event, f"request {name} is {event.status} and still holds it", Cause("request_left"))

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request whose row dropped slots in its forward before that it still holds."""
        history, forward = self.history, view.forward
        findings = [
            self.of_request(
                forward,
                r,
                "still holds a slot that its row no longer names",
                group=one.group,
                slot=int(one.slots[0]),
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
        history, findings = self.history, []
        for request_id in sorted(set(history.ledger.held_by) & set(history.ended)):
            gone = StatusEvent(event=history.ended[request_id], time_ns=0, status="gone", request_id=request_id, row=-1)
            detail = (
                f"was given to request {history.request_table.name(request_id)}, which was gone, and never given back"
            )
            findings += self._held(gone, detail, Cause("given_after_end"))
        return findings

    def _held(self, event: StatusEvent, detail: str, cause: Cause) -> list[Finding]:
        """Return a finding for each group in which a request holds slots alone."""
        ledger = self.history.ledger
        return [
            self.of_slots(
                event,
                part.group,
                part.slots,
                detail,
                events=[int(ledger.rows[part.group][part.slots[0], ALLOC]) - 1],
                cause=cause,
            )
            for part in ledger.held_slots(event.request_id)
        ]
