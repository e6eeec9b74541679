"""Slots that an event gives out, shares, hands over or gives back, and that it must not."""

from collections.abc import Iterator

from ...kernels.replay_pass.ledger import ALLOC, CACHED, HELD, LEFT, OWNER, SHARED, STATE
from ...recorder.state.events import SlotEvent
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import ALLOC_CACHED, ALLOC_SHARED
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, SlotEventCheck, changed_hands, held_by, parties, register
from .history import NamedSlots

_CHANGES = {"alloc": "is given out", "free": "is given back", "evict": "is evicted"}
_JOINS = {ALLOC_SHARED: "is joined", ALLOC_CACHED: "is handed to the prefix cache"}


@register
class SlotOutOfPool(HistoryCheck):
    """An event gives out, gives back or hands over a slot that the pool does not have.

    Invariant: a pool of n slots has the slots 0 to n - 1. Evidence: the event. Legitimate exceptions: none. The other slots
    of the event change hands as it says. Forwards that read or write such slots make the same finding whichever checks are
    chosen. Judged in every trace.
    """

    kind = "slot_out_of_pool"
    finds = "a forward or another event names a slot that the pool does not have"
    covered = Covered.COMPILED
    events = frozenset(_CHANGES)

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each group that does not have slots which the event names."""
        event, groups = self.history.known, self.history.header.groups
        if not isinstance(event, SlotEvent):
            return []
        return [
            self.of_slots(
                event,
                part.group,
                part.beyond,
                f"{_CHANGES[view.kind]}, the pool has {groups[part.group].num_slots} slots",
            )
            for part in event.parts
            if len(part.beyond)
        ]


@register
class SlotDoubleAllocated(SlotEventCheck):
    """The allocator gives out a slot that somebody holds.

    Invariant: a slot that is given out is free. Evidence: the allocation that made it somebody's, the event that handed it
    to the prefix cache if one did, and this allocation; a slot that one event names twice counts too. Legitimate
    exceptions: joining a prefix or a fork's shared pages gives nothing out (status "shared"); handing slots to the cache
    neither (status "cached"). Judged only if the trace promises to report every slot, since an unreported free would
    excuse it.
    """

    kind = "slot_double_allocated"
    finds = "the allocator gave out a slot that somebody holds"
    covered = Covered.COMPILED
    events = frozenset({"alloc"})
    needs_complete = True

    def part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        """Yield a finding for each holder whose slots an allocation gives out again."""
        if event.status:
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

    Invariant: what a request joins (status "shared") is held, by another request or by the prefix cache; what it hands to
    the prefix cache (status "cached") is held too. A prefix cache that goes on naming what it gave back, and a fork of a
    request that is gone, show here before anybody reads the slot. Evidence: the event that freed the slot, and this one.
    Legitimate exceptions: what one other request holds alone may be joined: that is what a fork is. Judged only if the
    trace promises to report every slot, since an unreported allocation would excuse it.
    """

    kind = "free_slot_shared"
    finds = "a request joined a slot that nobody holds, or handed it to the prefix cache"
    covered = Covered.COMPILED
    events = frozenset({"alloc"})
    needs_complete = True

    def part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        """Yield a finding for each earlier event that freed what this one joins."""
        if event.status in _JOINS:
            yield from _of_free(self, event, part, f"{_JOINS[event.status]} though it is free")


@register
class SlotFreedTwice(SlotEventCheck):
    """A slot that is free is given back again.

    Invariant: what is given back or evicted is held. Evidence: the event that freed it before, and this one; a slot that
    one event names twice counts too. Legitimate exceptions: none if every slot is reported; a page shared by several
    requests is given back once, by whoever lets go last. Judged only if the trace promises to report every slot, since an
    unreported allocation would excuse it.
    """

    kind = "slot_freed_twice"
    finds = "a slot that is free was given back again"
    covered = Covered.COMPILED
    events = frozenset({"free", "evict"})
    needs_complete = True

    def part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        """Yield a finding for each earlier event that freed what this one frees."""
        yield from _of_free(self, event, part, f"is given back ({event.note or event.kind}) though it is free")
        if len(part.repeated):
            detail = "is given back twice by one event"
            yield self.of_slots(event, part.group, part.repeated, detail, cause=Cause("same_event"))


@register
class ForeignSlotFreed(SlotEventCheck):
    """A request gives back a slot that is another's, or the prefix cache's.

    Invariant: a request frees what it holds, the cache evicts what it holds, and not what requests share that was never
    handed to it. Evidence: the allocation or hand-over that
    made the slot somebody else's, and this event. This is how pages inserted in the prefix cache and freed by an abort,
    and a stale full-to-SWA entry through which a live slot is freed, show before anybody reads the damage. Legitimate
    exceptions: slots that several requests share are given back by whoever lets go last; an event that names no request
    is nobody's. Judged only if the trace promises to report every slot, since an unreported hand-over would excuse it.
    """

    kind = "foreign_slot_freed"
    finds = "a request gave back a slot that it does not hold"
    covered = Covered.COMPILED
    events = frozenset({"free", "evict"})
    needs_complete = True

    def part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        """Yield a finding for each holder whose slots somebody else gives back."""
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
