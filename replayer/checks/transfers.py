"""Slots of a transfer that are given away meanwhile, or that are not its request's."""

from collections.abc import Iterator

from ...kernels.replay_pass.ledger import FREE, HELD, OWNER, STATE
from ...recorder.state.events import SlotEvent, TransferEvent
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import SEND
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, SlotEventCheck, changed_hands, held_by, parties, register
from .history import NamedSlots

_CHANGES = {"alloc": "is given out", "free": "is given back", "evict": "is evicted"}


@register
class FreedDuringTransfer(SlotEventCheck):
    """Slots are given back, or given to somebody else, while a transfer of them is under way.

    Invariant: between a transfer's start and its end or failure its slots stay where they are. An abort that frees the
    pages of a request whose transfer has not stopped shows here, before the late write lands on the next owner. Evidence:
    the transfer's start and the event that gave the slots away. Legitimate exceptions: handing the slots to the prefix
    cache keeps them; after "failed" they may go. If the trace does not promise to report every slot, only what goes back to
    the pool is judged.
    """

    kind = "freed_during_transfer"
    finds = "slots were given back or given out while a transfer of them was under way"
    covered = Covered.COMPILED
    events = frozenset(_CHANGES)

    def part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        """Yield a finding for each transfer whose slots this event gives away."""
        if event.kind == "alloc" and (event.status or not self.history.complete):
            return
        for start, slots, _ in parties(part, part.transfer > 0, part.transfer):
            detail = f"{_CHANGES[event.kind]} while the transfer that began in event {start - 1} is under way"
            yield self.of_slots(event, part.group, slots, detail, events=[start - 1])


@register
class TransferNotHeld(HistoryCheck):
    """A transfer reads or fills slots that its request does not hold.

    Invariant: a transfer starts from, and lands in, slots that its request or the prefix cache holds. A transfer that ends
    after its pages were freed lands in free slots or in the next owner's. Evidence: the event that gave the slots away and
    the transfer's. Legitimate exceptions: a failed transfer does not land; slots that several requests share, or that the
    prefix cache holds, may be sent; a transfer that names no request is judged for free slots only. Judged only if the
    trace promises to report every slot.
    """

    kind = "transfer_not_held"
    finds = "a transfer reads or fills slots that its request does not hold"
    covered = Covered.COMPILED
    events = frozenset({"transfer"})
    needs_complete = True

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each holder, or none, whose slots a transfer takes part in."""
        event, history, findings = self.history.known, self.history, []
        if not isinstance(event, TransferEvent) or event.status == "failed":
            return []
        if event.status == "end" and event.direction == SEND:
            return []
        verb = "sends" if event.direction == SEND else "lands in" if event.status == "end" else "will land in"
        for part in history.named:
            state, owner = part.column(STATE), part.column(OWNER)
            wrong = history.ledger.free(part.ledger, part.slots)
            if event.request_id >= 0:
                wrong |= (state == HELD) & (owner != event.request_id)
            for held, slots, row in parties(part, wrong, state):
                free = held == FREE
                detail = f"a transfer {verb} a slot {'that is free' if free else f'of {self.holder(row)}'}"
                cause = Cause("free") if free else held_by(row)
                findings.append(self.of_slots(event, part.group, slots, detail, events=changed_hands(row), cause=cause))
        return findings
