"""What a trace holds about the slots and requests that were damaged, gathered in one pass over its events.

Only the places that the report names are looked at, the earliest `MAX_PLACES` of them, and of each slot the last
`FACTS_A_SLOT` things that happened to it until it was found damaged; memory is bounded whatever the trace's length.
Marks are not read: they are the fault lab's ground truth.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...kernels.arrays import BoolArray, Int64Array
from ...recorder.trace.header import TraceHeader

MAX_PLACES: Final = 20_000
FACTS_A_SLOT: Final = 16
MAX_STATUSES: Final = 32
MAX_REWRITES: Final = 16
NOBODY: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that happened to a slot.

    `what` is alloc, shared, cached, free, evict, written, padded (by a padding token), copied (into it, in the pool),
    loaded (from the host), remapped (a full slot, `via`, that led to another sliding-window slot leads to it now), sent, receiving, received, receive_failed, or changed (its bytes, without a write).
    `request_id` is whose event it was, -1 for nobody. A write behind a full-to-SWA table has its full slot in `via`, and
    every write its `position`. For a change `twin` names the pool group and slot whose write held those very bytes,
    `(-1, -1)` for none, `twin_event` that write's event, `twin_kind` its kind (forward or transfer), and `together` how
    many slots changed at once.
    """

    event: int
    what: str
    request_id: int = NOBODY
    row: int = -1
    via: int = -1
    position: int = -1
    twin: tuple[int, int] = (-1, -1)
    twin_event: int = -1
    twin_kind: str = ""
    together: int = 0


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
    """A request's table entries inside what it had computed already, overwritten: positions and the new slots."""

    event: int
    table: int
    row: int
    first_position: int
    slots: tuple[int, ...]
    count: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A request's status, and the row that it is about."""

    event: int
    status: str
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A request's first forward: its event, mode, and the tokens that it found computed."""

    event: int
    forward: int
    mode: str
    prefix_len: int
    row: int


@dataclass(slots=True, kw_only=True)
class Facts:
    """What is known; empty if the trace is not at hand (`header` is None then).

    `slots` by pool group and slot, oldest first; `statuses`, `begins`, `rewrites` by request; `named` holds, by event,
    the slots that it names, by pool group, for the events behind findings, `modes` the modes of the forwards among
    them, `prefixes` the tokens before, by event and request. `late_samples` counts events with samples that came after
    their forward. `padding_nowhere` are the last forwards whose padding was sent to no slot, ascending.
    """

    header: TraceHeader | None = None
    slots: dict[tuple[int, int], SlotFacts] = field(default_factory=dict)
    statuses: dict[int, list[Status]] = field(default_factory=lambda: defaultdict(list))
    begins: dict[int, Begin] = field(default_factory=dict)
    rewrites: dict[int, list[Rewrite]] = field(default_factory=lambda: defaultdict(list))
    named: dict[int, dict[int, Int64Array]] = field(default_factory=dict)
    late_samples: int = 0
    prefixes: dict[tuple[int, int], int] = field(default_factory=dict)
    modes: dict[int, str] = field(default_factory=dict)
    padding_nowhere: deque[int] = field(default_factory=lambda: deque(maxlen=4096))

    def of(self, group: int, slot: int, *, upto: int) -> list[Fact]:
        """Return what happened to a slot up to an event, oldest first."""
        history = self.slots.get((group, slot))
        return history.upto(upto) if history is not None else []

    def last(self, group: int, slot: int, whats: Iterable[str], *, upto: int) -> Fact | None:
        """Return the last of certain things that happened to a slot up to an event."""
        chosen = frozenset(whats)
        return next((fact for fact in reversed(self.of(group, slot, upto=upto)) if fact.what in chosen), None)

    def status_before(self, request_id: int, event: int) -> Status | None:
        """Return the last status of a request before an event."""
        found = [status for status in self.statuses.get(request_id, ()) if status.event < event]
        return found[-1] if found else None

    def status_after(self, request_id: int, event: int) -> Status | None:
        """Return the first status of a request after an event."""
        return next((status for status in self.statuses.get(request_id, ()) if status.event > event), None)

    def retracted_before(self, request_id: int, event: int) -> bool:
        """Whether a request had been put back, and was taken up again, before an event."""
        return any(s.event < event and s.status == "retracted" for s in self.statuses.get(request_id, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to look for: a mask of slots for each pool group, each slot's first and last events of interest, requests, events."""

    slots: Sequence[BoolArray]
    first: dict[tuple[int, int], int]
    until: dict[tuple[int, int], int]
    requests: frozenset[int]
    events: frozenset[int]
