"""Slots that an event gives out, shares, hands over, gives back or transfers, and must not, and those that nobody gives back."""

from collections.abc import Iterator

import numpy as np

from ...kernels.replay_pass.ledger import ALLOC, CACHED, FREE, HELD, LEFT, OWNER, SHARED, STATE, UNKNOWN
from ...recorder.state.events import SlotEvent, StatusEvent, TransferEvent
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import ALLOC_CACHED, ALLOC_SHARED, NOBODYS, SEND, STILL_USED
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, SlotEventCheck, changed_hands, held_by, parties, register
from .history import ForwardView, NamedSlots

_CHANGES = {"alloc": "is given out", "free": "is given back", "evict": "is evicted"}
_JOINS = {ALLOC_SHARED: "is joined", ALLOC_CACHED: "is handed to the prefix cache"}


@register
class SlotOutOfPool(HistoryCheck):
    """An event gives out, gives back or hands over a slot that the pool does not have.

    The other slots of the event change hands as it says. Forwards that read or write such slots make the same finding
    whichever checks are chosen.
    """

    kind = "slot_out_of_pool"
    finds = "a forward or another event names a slot that the pool does not have"
    covered = Covered.COMPILED
    events = frozenset(_CHANGES)

    def event(self, view: EventView) -> Iterator[Finding]:
        event, groups = self.history.known, self.history.header.groups
        if isinstance(event, SlotEvent):
            for part in event.parts:
                if len(part.beyond):
                    detail = f"{_CHANGES[view.kind]}, the pool has {groups[part.group].num_slots} slots"
                    yield self.of_slots(event, part.group, part.beyond, detail)


@register
class SlotDoubleAllocated(SlotEventCheck):
    """The allocator gives out a slot that somebody holds, or one slot twice in an event.

    An unreported free would excuse it; joining (status "shared") and handing to the cache ("cached") give nothing out.
    """

    kind = "slot_double_allocated"
    finds = "the allocator gave out a slot that somebody holds"
    covered = Covered.COMPILED
    events = frozenset({"alloc"})
    needs = "allocator"

    def _part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        if event.status or event.note == NOBODYS:
            return
        for _, slots, row in parties(part, part.column(STATE) >= HELD, part.column(OWNER)):
            detail = f"is given out while {self.holder(row)} holds it"
            yield self.of_slots(event, part.group, slots, detail, events=changed_hands(row), cause=held_by(row))
        if len(part.repeated):
            detail = "is given out twice by one event"
            yield self.of_slots(event, part.group, part.repeated, detail, cause=Cause("same_event"))


@register
class FreeSlotShared(SlotEventCheck):
    """A request joins a slot that nobody holds, or hands it to the prefix cache.

    A prefix cache that goes on naming what it gave back, and a fork of a request that is gone, show here before anybody
    reads the slot.
    """

    kind = "free_slot_shared"
    finds = "a request joined a slot that nobody holds, or handed it to the prefix cache"
    covered = Covered.COMPILED
    events = frozenset({"alloc"})
    needs = "complete"

    def _part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        if event.status in _JOINS:
            yield from _of_free(self, event, part, f"{_JOINS[event.status]} though it is free")


@register
class SlotFreedTwice(SlotEventCheck):
    """A slot that is free is given back or evicted again, or twice by one event."""

    kind = "slot_freed_twice"
    finds = "a slot that is free was given back again"
    covered = Covered.COMPILED
    events = frozenset({"free", "evict"})
    needs = "allocator"

    def _part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        yield from _of_free(self, event, part, f"is given back ({event.note or event.kind}) though it is free")
        if len(part.repeated):
            detail = "is given back twice by one event"
            yield self.of_slots(event, part.group, part.repeated, detail, cause=Cause("same_event"))


@register
class ForeignSlotFreed(SlotEventCheck):
    """A request gives back a slot that is another's, or the prefix cache's; or the cache evicts what requests hold.

    Pages inserted in the prefix cache and freed by an abort, and a stale full-to-SWA entry through which a live slot is
    freed, show here before anybody reads the damage. Slots that several share are given back by whoever lets go last.
    """

    kind = "foreign_slot_freed"
    finds = "a request gave back a slot that it does not hold"
    covered = Covered.COMPILED
    events = frozenset({"free", "evict"})
    needs = "complete"

    def _part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        state, owner = part.column(STATE), part.column(OWNER)
        foreign, verb = (state == HELD) | (state == SHARED), "is evicted"
        if event.kind == "free":
            foreign = (event.request_id >= 0) & ((state == CACHED) | ((state == HELD) & (owner != event.request_id)))
            verb = f"is given back ({event.note or 'free'})"
        for _, slots, row in parties(part, foreign, owner):
            holds = "shares it with another" if row[STATE] == SHARED else "holds it"
            detail = f"{verb} while {self.holder(row)} {holds}"
            yield self.of_slots(event, part.group, slots, detail, events=changed_hands(row), cause=held_by(row))


def _of_free(check: HistoryCheck, event: SlotEvent, part: NamedSlots, detail: str) -> Iterator[Finding]:
    """Yield a finding for each event that freed slots which this one names."""
    for left, slots, row in parties(part, check.history.ledger.free(part.ledger, part.slots), part.column(LEFT)):
        since = f"since event {left - 1}" if left else "and was never given out"
        events, cause = [int(row[ALLOC]) - 1, left - 1], Cause("free" if left else "never_given_out")
        yield check.of_slots(event, part.group, slots, f"{detail} {since}", events=events, cause=cause)


@register
class SlotLeaked(HistoryCheck):
    """A request is gone, or its row has moved on, and a slot is still held in its name.

    What it held was to be given back, or handed to the prefix cache, before it left; and a slot that a forward took out of
    its row before the request's next forward. What is the prefix cache's leaks where the engine
    counts a user of it whom nobody knows; and if no request is left, what is neither free nor the cache's. That is all that is
    judged if only what the allocator does is recorded.
    """

    kind = "slot_leaked"
    finds = "a request is gone, or its row has moved on, and still holds a slot"
    covered = Covered.COMPILED
    events = frozenset({"alloc", "status"})
    needs = "allocator"

    def event(self, view: EventView) -> Iterator[Finding]:
        event = self.history.known
        if isinstance(event, SlotEvent) and event.note == NOBODYS:
            for part in self.history.named:  # what is unknown has leaked before
                yield from self._of_nobody(event, part)
        if isinstance(event, SlotEvent) and event.note == STILL_USED:
            name = self.history.request_table.name(event.request_id)
            detail = f"request {name} let go of it, and it has a user whom nobody knows"
            for part in self.history.named:
                if len(part.slots):
                    given = changed_hands(part.row(0))
                    yield self.of_slots(event, part.group, part.slots, detail, events=given, cause=Cause("still_used"))
        if self.history.complete and isinstance(event, StatusEvent) and event.status != "admitted":
            name = self.history.request_table.name(event.request_id)
            detail = f"request {name} is {event.status} and still holds it"
            yield from self._held(event, detail, Cause("request_left"))

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        history, forward = self.history, view.forward
        if not history.complete:
            return
        for r, one in history.dropped.still_held(forward, history.ledger):
            yield self.of_request(
                forward,
                r,
                "still holds a slot that its row no longer names",
                group=one.group,
                slot=int(one.slots[0]),
                count=len(one.slots),
                events=[one.event, int(one.alloc[0]) - 1],
                cause=Cause("row_moved_on"),
            )
        for group in view.groups:
            tokens = history.tokens(view)
            history.dropped.note(forward, tokens, group.pool, group.written, view.tables, history.ledger)

    def _of_nobody(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        state, owner = part.column(STATE), part.column(OWNER)
        for _, slots, row in parties(
            part, (state != UNKNOWN) | (not self.history.complete), np.where(state == HELD, owner, -1)
        ):
            had = f": it was {self.holder(row)}'s" if row[STATE] == HELD else ""
            detail = f"no request is left, no cache has it, and it is not free{had}"
            yield self.of_slots(event, part.group, slots, detail, events=changed_hands(row), cause=Cause("nobodys"))

    def finish(self) -> Iterator[Finding]:
        if not self.history.complete:
            return
        ended, names = self.history.ended, self.history.request_table
        for request_id in sorted(set(self.history.ledger.held_by) & set(ended)):
            gone = StatusEvent(event=ended[request_id], time_ns=0, status="gone", request_id=request_id, row=-1)
            detail = f"was given to request {names.name(request_id)}, which was gone, and never given back"
            yield from self._held(gone, detail, Cause("given_after_end"))

    def _held(self, event: StatusEvent, detail: str, cause: Cause) -> Iterator[Finding]:
        ledger = self.history.ledger
        for part in ledger.held_slots(event.request_id):
            given = int(ledger.rows[part.group][part.slots[0], ALLOC]) - 1
            yield self.of_slots(event, part.group, part.slots, detail, events=[given], cause=cause)


@register
class FreedDuringTransfer(SlotEventCheck):
    """Slots are given back, or given to somebody else, while a transfer of them is under way.

    An abort that frees the pages of a request whose transfer has not stopped shows here, before the late write lands on
    the next owner. In a trace that does not promise to report every slot only what goes back to the pool is judged.
    """

    kind = "freed_during_transfer"
    finds = "slots were given back or given out while a transfer of them was under way"
    covered = Covered.COMPILED
    events = frozenset(_CHANGES)

    def _part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        if event.kind == "alloc" and (event.status or not self.history.complete):
            return
        for start, slots, _ in parties(part, part.transfer > 0, part.transfer):
            detail = f"{_CHANGES[event.kind]} while the transfer that began in event {start - 1} is under way"
            yield self.of_slots(event, part.group, slots, detail, events=[start - 1])


@register
class TransferNotHeld(HistoryCheck):
    """A transfer reads or fills slots that neither its request nor the prefix cache holds.

    One that ends after its pages were freed lands in free slots or in the next owner's. A failed one does not land.
    """

    kind = "transfer_not_held"
    finds = "a transfer reads or fills slots that its request does not hold"
    covered = Covered.COMPILED
    events = frozenset({"transfer"})
    needs = "complete"

    def event(self, view: EventView) -> Iterator[Finding]:
        event, history = self.history.known, self.history
        if not isinstance(event, TransferEvent) or event.status == "failed":
            return
        if event.status == "end" and event.direction == SEND:
            return
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
                yield self.of_slots(event, part.group, slots, detail, events=changed_hands(row), cause=cause)
