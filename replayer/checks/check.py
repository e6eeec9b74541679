"""What a history check is: it sees every event, in order, and reports what contradicts the events before it.

One finding stands for one forward (or event), kind and request; damage that lasts is reported when it is new.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple, TypeVar

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.replay_pass.ledger import ALLOC, CACHED, CONTENT, LEFT, OWNER, PADDING_WRITER, STATE
from ...recorder.state.events import CopyEvent, SlotEvent, StatusEvent, TransferEvent
from ...recorder.state.forward import Forward
from ...recorder.state.ledger import TIMELESS
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import SlotHistoryTold
from ..report.findings import NO_CAUSE, Cause, Finding, counted, evidence, forward_finding, of_request
from .history import ForwardView, GroupReads, History, Judged, NamedSlots

MAX_REMEMBERED: Final = 4096
MAX_PARTIES: Final = 64

# A finding's words, further events that prove it, and its cause.
Explained = tuple[str, Iterable[int], Cause]


class Covered(IntEnum):
    """By which of the faster ways of replaying a check finds what it finds in stepwise replay; each includes those before.

    NOTHING: by none. INCREMENTAL: it is called for every forward, but the plans may leave out prefix entries that it was
    given before, did not mark, and to which nothing has happened since; of the records only the first half's TAIL is kept,
    without its KV hash. COMPILED: it need not be called for what the compiled pass takes, since `kernels/replay_pass` stops
    in front of every event in which it finds or has to remember something.
    """

    NOTHING = 0
    INCREMENTAL = 1
    COMPILED = 2


class Repeats:
    """Remembers the slots that each request's last forward was reported for, so that lasting damage is reported once."""

    def __init__(self) -> None:
        self._reported: dict[tuple[int, int], Int64Array] = {}

    def new(self, group: int, forward: Forward, flagged: dict[int, Int64Array]) -> dict[int, BoolArray]:
        """Say which slots are new, `flagged[r]` being all that is wrong with request r (past the batch: padding)."""
        if not flagged and not self._reported:
            return {}
        ids = [*forward.request_ids.tolist(), PADDING_WRITER]
        for r, request_id in enumerate(ids):
            if r not in flagged:
                self._reported.pop((group, request_id), None)
        fresh = {}
        for r, slots in flagged.items():
            key = (group, ids[r])
            before = self._reported.get(key)
            fresh[r] = np.ones(len(slots), np.bool_) if before is None else ~np.isin(slots, before)
            self._reported[key] = slots
        if len(self._reported) > MAX_REMEMBERED:
            self._reported.clear()
        return fresh

    def __len__(self) -> int:
        return len(self._reported)

    @property
    def requests(self) -> set[int]:
        """The requests whose last forward was reported, `PADDING_WRITER` for padding."""
        return {request for _, request in self._reported}

    def forget(self) -> None:
        """Forget what was reported."""
        self._reported.clear()


class HistoryCheck:
    """A check that finds nothing; each check overrides what it looks at, and is registered with `register`.

    `kind` is the kind of its findings and its name, `finds` what a finding says, in a sentence; `covered` says by which faster
    ways of replaying it finds the same, every forward is stepped if it does not say; `events` are the kinds of event, beside
    forwards, that `event` looks at; it is silent unless the trace promises at least as much of the slots' history as `needs`.
    What it finds is a list or a generator, taken to its end before anything else happens.
    """

    kind: ClassVar[str] = ""
    finds: ClassVar[str] = ""
    covered: ClassVar[Covered] = Covered.NOTHING
    events: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[SlotHistoryTold] = ""

    @classmethod
    def concerns(cls, header: TraceHeader) -> bool:  # noqa: ARG003  # for those that override it
        """Say whether there is anything to judge in traces with this header; if not, it is passed over."""
        return True

    def __init__(self, history: History) -> None:
        self.history = history
        self.repeats = Repeats()

    def forward(self, view: ForwardView) -> Iterable[Finding]:
        """Judge a forward that is about to run; tables and pools are as it finds them."""
        return []

    def event(self, view: EventView) -> Iterable[Finding]:
        """Judge an event between two forwards; `history.known` is what it says.

        Raise `UnusableEventError` if its columns contradict one another, before anything is changed.
        """
        return []

    def batch(self, batch: TraceBatch) -> None:
        """Take note of a batch of events that was replayed to its end, whichever way."""

    def ends(self) -> Iterable[Finding]:
        """Judge what the batches since the last call have shown: a file ends here, or nothing before is known any more."""
        return []

    def pending(self) -> bool:
        """Say whether something is remembered that whatever comes next may contradict, and no keyframe holds."""
        return False

    def finish(self) -> Iterable[Finding]:
        """Judge what is left at the whole end of a complete trace."""
        return []

    def forget(self) -> None:
        """Take all that was remembered for unknown, after a gap in the trace."""
        for repeats in self._all_repeats():
            repeats.forget()

    def requests_reported(self) -> set[int]:
        """Return the requests whose forwards and ends it has to see: their last one was reported, or they were put back."""
        return set[int]().union(*(repeats.requests for repeats in self._all_repeats()))

    def _all_repeats(self) -> list[Repeats]:
        return [part for part in vars(self).values() if isinstance(part, Repeats)]

    def of_request(
        self,
        forward: Forward,
        request: int,
        detail: str,
        *,
        count: int = 1,
        events: Iterable[int] = (),
        cause: Cause = NO_CAUSE,
        **place: int,
    ) -> Finding:
        """Return a finding about entry `request` of a forward, past the batch its padding; `place`: group, position, slot."""
        fields = {"count": count, "evidence": evidence(events, forward.event), **cause._asdict(), **place}
        names = self.history.request_table
        return forward_finding(self.kind, forward, counted(detail, count), names, request=request, **fields)

    def of_entries(
        self,
        view: ForwardView,
        group: GroupReads,
        explain: Callable[[int], Explained],
        *,
        requests: Int64Array,
        positions: Int64Array,
        slots: Int64Array,
        repeats: Repeats | None = None,
    ) -> list[Finding]:
        """Return a finding for each request with entries, of those that `repeats` has not for its last forward.

        `requests`, `positions`, `slots` `[n]`: of each entry that is wrong the index into the batch (its length for padding),
        position and slot; `explain` gets the number of the first new one of a request.
        """
        places = {int(r): np.flatnonzero(requests == r) for r in np.unique(requests)}
        if repeats is not None:
            fresh = repeats.new(group.pool.index, view.forward, {r: slots[at] for r, at in places.items()})
            places = {r: at[fresh[r]] for r, at in places.items()}
        findings = []
        for r, at in places.items():
            if len(at):
                n = int(at[0])
                detail, events, cause = explain(n)
                place = {"group": group.pool.index, "position": int(positions[n]), "slot": int(slots[n])}
                found = self.of_request(view.forward, r, detail, count=len(at), events=events, cause=cause, **place)
                findings.append(found)
        return findings

    def of_tokens(
        self, view: ForwardView, group: GroupReads, explain: Callable[[int], Explained], tokens: Int64Array
    ) -> list[Finding]:
        """Return a finding for each request with some of `tokens` `[n]`, ascending; `explain` gets a number among them."""
        positions, slots = view.forward.positions[tokens], group.written[tokens]
        requests = group.writers(tokens)
        return self.of_entries(view, group, explain, requests=requests, positions=positions, slots=slots)

    def of_slots(
        self,
        event: SlotEvent | CopyEvent | TransferEvent | StatusEvent,
        group: int,
        slots: Int64Array,
        detail: str,
        *,
        events: Iterable[int] = (),
        cause: Cause = NO_CAUSE,
    ) -> Finding:
        """Return a finding about slots that an event between two forwards names; its forward is the one before it."""
        history = self.history
        return Finding(
            kind=self.kind,
            event=event.event,
            forward=history.last_forward,
            time_ns=event.time_ns,
            runner=history.header.groups[group].runner,
            group=group,
            **of_request(history.request_table, event.request_id),
            req_pool_idx=event.row,
            slot=int(slots[0]),
            detail=counted(detail, len(slots)),
            count=len(slots),
            evidence=evidence(events, event.event),
            **cause._asdict(),
        )

    def holder(self, row: Int64Array) -> str:
        """Return in words who holds a slot, by its ledger row."""
        if row[STATE] == CACHED:
            return "the prefix cache"
        return f"request {self.history.request_table.name(int(row[OWNER]))}"


_Check = TypeVar("_Check", bound=type[HistoryCheck])

CHECKS: Final[dict[str, type[HistoryCheck]]] = {}


def register(check: _Check) -> _Check:
    """Add a check to those that there are, under the name of its findings."""
    CHECKS[check.kind] = check
    return check


class Access(NamedTuple):
    """A read or write that the ledger speaks against: plan entry or token, the slot's ledger row, what is wrong as bits."""

    group: GroupReads
    entry: int
    row: Int64Array
    bits: int
    is_write: bool


class LedgerCheck(HistoryCheck):
    """Reports reads and writes of a forward by the ledger: those with any of the bits `reads`, `writes`."""

    reads = 0
    writes = 0

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        """Find each request whose entries have these bits, and were not reported already."""
        for judged in self.history.judge(view):
            if self.reads:
                yield from self.found(view, judged, self.reads, is_write=False)
            if self.writes:
                yield from self.found(view, judged, self.writes, is_write=True)

    def _explain(self, access: Access) -> Explained:
        raise NotImplementedError

    def found(
        self, view: ForwardView, judged: Judged, bits: int, *, is_write: bool, repeats: Repeats | None = None
    ) -> list[Finding]:
        """Return the findings among a group's reads or writes; `repeats` are the check's own unless others are given."""
        repeats, group = self.repeats if repeats is None else repeats, judged.group
        wrong, found = (judged.writes, judged.write_bits) if is_write else (judged.reads, judged.read_bits)
        if not len(wrong) and not len(repeats):
            return []
        mine = (found & bits) != 0
        entries, found = wrong[mine], found[mine]
        slots = (group.written if is_write else group.slots)[entries]

        def explain(n: int) -> Explained:
            return self._explain(Access(group, int(entries[n]), judged.ledger[slots[n]], int(found[n]), is_write))

        requests = group.writers(entries) if is_write else group.readers(entries)
        positions = (view.forward.positions if is_write else group.positions)[entries]
        return self.of_entries(
            view, group, explain, requests=requests, positions=positions, slots=slots, repeats=repeats
        )


class SlotEventCheck(HistoryCheck):
    """Judges the slots that change hands in an event, one pool group's at a time."""

    def event(self, view: EventView) -> Iterator[Finding]:
        """Find what `_part` finds in each group's part of an event."""
        event = self.history.known
        if isinstance(event, SlotEvent):
            for part in self.history.named:
                yield from self._part(event, part)

    def _part(self, event: SlotEvent, part: NamedSlots) -> Iterator[Finding]:
        raise NotImplementedError


def parties(part: NamedSlots, wrong: BoolArray, values: Int64Array) -> Iterator[tuple[int, Int64Array, Int64Array]]:
    """Yield what is wrong, `[n] bool`, by its other party, which `values` `[n] int64` name: damage is reported by it.

    Each time party, slots, and the first one's ledger row. Past `MAX_PARTIES` the last one stands for the rest.
    """
    at = np.flatnonzero(wrong)
    if not len(at):
        return
    named = np.unique(values[at])
    for number, value in enumerate(named[:MAX_PARTIES].tolist()):
        mine = at[values[at] >= value] if number == MAX_PARTIES - 1 else at[values[at] == value]
        yield value, part.slots[mine], part.row(int(mine[0]))


def held_by(row: Int64Array) -> Cause:
    """Return as a cause who holds a slot, by its ledger row."""
    return Cause("held_by_cache") if row[STATE] == CACHED else Cause("held_by_request", int(row[OWNER]))


def changed_hands(row: Int64Array) -> list[int]:
    """Return the events in which a slot was given out last, and in which it left its holder last."""
    return [int(row[column]) - 1 for column in (ALLOC, LEFT) if row[column]]


def happened(row: Int64Array) -> list[int]:
    """Return the events that a ledger row remembers: given out, left its holder, written."""
    return changed_hands(row) + ([int(row[CONTENT]) - 1] if 0 < row[CONTENT] < TIMELESS else [])


class CheckSet(HistoryCheck):
    """Asks each of `checks` about the forwards and the kinds of event that it judges; `history` is what they share."""

    def __init__(self, history: History, checks: Sequence[type[HistoryCheck]]) -> None:
        super().__init__(history)
        self.checks = [check(history) for check in checks if history.tells(check.needs)]
        self._of_forwards = [check for check in self.checks if type(check).forward is not HistoryCheck.forward]
        kinds = {kind for check in self.checks for kind in check.events}
        self._of_events = {kind: [check for check in self.checks if kind in check.events] for kind in kinds}

    def forward(self, view: ForwardView) -> list[Finding]:
        """Judge a forward, then move on by it."""
        findings = [finding for check in self._of_forwards for finding in check.forward(view)]
        self.history.apply_view(view)
        return findings

    def event(self, view: EventView) -> list[Finding]:
        """Judge another event, then move on by it; raise `UnusableEventError` before anything has changed."""
        self.history.open(view)
        findings = [finding for check in self._of_events.get(view.kind, ()) for finding in check.event(view)]
        self.history.apply_event(view)
        return findings

    def batch(self, batch: TraceBatch) -> None:
        for check in self.checks:
            check.batch(batch)

    def ends(self) -> list[Finding]:
        return [finding for check in self.checks for finding in check.ends()]

    def pending(self) -> bool:
        return any(check.pending() for check in self.checks)

    def requests_reported(self) -> set[int]:
        return set[int]().union(*(check.requests_reported() for check in self.checks))

    def finish(self) -> list[Finding]:
        return [finding for check in self.checks for finding in check.finish()]

    def forget(self) -> None:
        self.history.forget()
        for check in self.checks:
            check.forget()
