"""What a trace holds about the slots and requests that were damaged, gathered in one pass over its events.

Only the places that the report names are looked at, the earliest `MAX_PLACES` of them, and of each slot the last
`FACTS_A_SLOT` things that happened to it until it was found damaged; memory is bounded whatever the trace's length.
Marks are not read: they are the fault lab's ground truth.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Final

from ...kernels.arrays import Int64Array
from ...recorder.trace.header import TraceHeader

MAX_PLACES: Final = 20_000
FACTS_A_SLOT: Final = 16
NOBODY: Final = -1
HANDED_IN: Final = "handed in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that happened to a slot.

    `what` is alloc, shared, cached, let_go (the cache has it alone now), nobodys (whose it is nobody knows, and it is not free),
    free, evict, written, padded (by a padding token), copied (into it, in the pool), loaded (from the host), not_loaded (though
    it was to be: its bytes are what they were before), remapped (a full slot, `via`, that led to another sliding-window slot
    leads to it now), sent, receiving, received, receive_failed, or changed (its bytes, without a write).
    `request_id` is whose event it was, -1 for nobody. A write behind a full-to-SWA table has its full slot in `via`, a
    copy or load its source, and a load in `together` how often that was stored since what it held before was read,
    and in `twin_kind` `SEEN` if nobody saw it stored, only that it has these bytes. For a change `twin`
    names the pool group and slot whose write held those very bytes, `(-1, -1)` for none, `twin_event` that write's event,
    `twin_kind` its kind (forward, transfer, or `HANDED_IN`: the model handed them in for that slot, which got others), `together`
    how many slots changed at once, `emptied` whether it holds zeros now, `via` the last forward before, and `behind` a load
    since then into the slots right in front of those that changed, -1 for none. `token` and `position` are those of a write.
    """

    event: int
    what: str
    request_id: int = NOBODY
    via: int = -1
    twin: tuple[int, int] = (-1, -1)
    twin_event: int = -1
    twin_kind: str = ""
    together: int = 0
    emptied: bool = False
    behind: int = -1
    token: int = -1
    position: int = -1


class SlotFacts:
    """The last things that happened to a slot up to the event `first`, in which it was found damaged, and after it."""

    __slots__ = ("_after", "_before", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self._before: deque[Fact] = deque(maxlen=FACTS_A_SLOT)
        self._after: deque[Fact] = deque(maxlen=FACTS_A_SLOT)

    def add(self, fact: Fact) -> None:
        """Add a fact; they come in order."""
        (self._before if fact.event <= self.first else self._after).append(fact)

    def upto(self, event: int) -> list[Fact]:
        """Return what is known up to an event, oldest first."""
        return [fact for fact in (*self._before, *self._after) if fact.event <= event]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """`count` of a request's table entries inside the `length` that it had computed already, overwritten."""

    event: int
    first_position: int
    count: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What became of a request."""

    event: int
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A request's first forward, the tokens that it found computed, and those that it computes.

    `filled` are the runs of positions, first and end, whose entries of its row changed with it.
    """

    event: int
    forward: int
    prefix_len: int
    extend_len: int
    filled: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True, kw_only=True)
class Facts:
    """What is known; empty if the trace is not at hand (`header` is None then).

    `slots` by pool group and slot, oldest first; `statuses`, `begins`, `rewrites` by request; `named` holds, by event,
    the slots that it names, by pool group, for the events behind findings, `modes` the modes of the forwards among
    them, `prefixes` the tokens before, by event and request. `prompts` are the lengths of the prompts of requests that are
    new in this trace, -1 for unknown. `wrote` holds where a request wrote a position of its last, by request and position:
    event and slot of the block table. `given` holds what a request was given or joined: event,
    pool group, number of slots, less than none for those it gave back. `loads` holds the events in which
    something was loaded from the host for a request; `landed` are those of copies behind which all lay where it was to, as
    was seen. `strayed` holds, by event and request, the row that a request had when it was computed on the row of another in
    its batch. `late_samples` counts events with samples that came after their forward.
    `ahead` holds, by event and request, where the running request's forward before had ended, if this one begins further on.
    `padding_nowhere` are the last forwards whose padding was sent to no slot, ascending; `nowhere` holds, by event and request,
    the positions of tokens that were.
    `frees_of_nobody`: frees are recorded where the allocator gets slots back, which knows no request and misses none.
    `shares_told`: some request was said to join slots of others; `rows_told`: some was said to be given a row.
    """

    header: TraceHeader | None = None
    slots: dict[tuple[int, int], SlotFacts] = field(default_factory=dict)
    statuses: dict[int, list[Status]] = field(default_factory=lambda: defaultdict(list))
    begins: dict[int, Begin] = field(default_factory=dict)
    rewrites: dict[int, list[Rewrite]] = field(default_factory=lambda: defaultdict(list))
    named: dict[int, dict[int, Int64Array]] = field(default_factory=dict)
    late_samples: int = 0
    frees_of_nobody: bool = False
    shares_told: bool = False
    rows_told: bool = False
    landed: set[int] = field(default_factory=set)
    loads: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    prefixes: dict[tuple[int, int], int] = field(default_factory=dict)
    ahead: dict[tuple[int, int], int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    modes: dict[int, str] = field(default_factory=dict)
    strayed: dict[tuple[int, int], int] = field(default_factory=dict)
    wrote: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    given: dict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    nowhere: dict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    padding_nowhere: deque[int] = field(default_factory=lambda: deque(maxlen=4096))

    def of(self, group: int, slot: int, *, upto: int) -> list[Fact]:
        """Return what happened to a slot up to an event, oldest first."""
        history = self.slots.get((group, slot))
        return history.upto(upto) if history is not None else []

    def status_before(self, request_id: int, event: int) -> Status | None:
        """Return the last status of a request before an event."""
        return next((s for s in reversed(self.statuses.get(request_id, ())) if s.event < event), None)

    def status_after(self, request_id: int, event: int) -> Status | None:
        """Return the first status of a request after an event."""
        return next((s for s in self.statuses.get(request_id, ()) if s.event > event), None)

    def wrote_before(self, request_id: int, position: int, event: int) -> tuple[int, int] | None:
        """Return event and slot of the last write of a request's position before an event."""
        return next((w for w in reversed(self.wrote.get((request_id, position), ())) if w[0] < event), None)

    def holds(self, request_id: int, group: int, event: int) -> int:
        """Return how many slots of a pool group a request was given or joined in its present life, up to an event."""
        ends = [s.event for s in self.statuses.get(request_id, ()) if s.event < event and s.status == "retracted"]
        since = ends[-1] if ends else NOBODY
        return sum(n for at, of, n in self.given.get(request_id, ()) if since < at <= event and of == group)

    def left_out(self, request_id: int, position: int, event: int) -> bool:
        """Whether a running request goes on behind a position to which it had not come, and nothing was loaded for it."""
        ended, prefix = (of.get((event, request_id), 0) for of in (self.ahead, self.prefixes))
        return 0 < ended <= position < prefix and not self.loads.get(request_id)

    def retractions(self, request_id: int) -> list[Status]:
        """Return when a request was put back."""
        return [s for s in self.statuses.get(request_id, ()) if s.status == "retracted"]

    def came_back(self, request_id: int, event: int) -> bool:
        """Whether a request had been put back, or something was loaded for it after it had begun, before an event."""
        begin = self.begins.get(request_id)
        loaded = begin is not None and any(begin.event < load < event for load in self.loads.get(request_id, ()))
        return loaded or self.retracted_before(request_id, event)

    def retracted_before(self, request_id: int, event: int) -> bool:
        """Whether a request had been put back, and was taken up again, before an event."""
        return any(s.event < event for s in self.retractions(request_id))
