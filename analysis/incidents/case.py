"""What a rule gets to see of a cluster of damage: its earliest signs, what else was found, and what the trace tells."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...kernels.constants import FailReason
from ...recorder.trace.header import PoolGroup
from .facts import Fact, Facts

CHAIN: Final = int(FailReason.VERIFY_CHAIN_HASH)
POSITION: Final = int(FailReason.VERIFY_POSITION)
KV_HASH: Final = int(FailReason.VERIFY_KV_HASH)
TOKEN: Final = int(FailReason.VERIFY_TOKEN)
WRITE_TOKEN: Final = int(FailReason.WRITE_TOKEN)
WRITE_POSITION: Final = int(FailReason.WRITE_POSITION)
CONTENT: Final = CHAIN | POSITION | TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A violation (`bits` are its reasons, `kind` is empty) or a finding (`kind`), as in the report's row.

    `position` is where the request expects the slot, `stored_position` what the slot's record says. -1 where a field
    does not apply. A finding's `stored_token` is what was fed or stands in the slot; `cause` tells findings of one kind
    apart; `detail` is for sentences alone.
    """

    kind: str
    bits: int
    event: int
    forward: int
    mode: str
    runner: int
    group: int
    request_id: int
    request: str
    row: int
    position: int
    slot: int
    count: int = 1
    stored_token: int = -1
    expected_token: int = -1
    stored_position: int = -1
    writer_event: int = -1
    writer_forward: int = -1
    writer_request_id: int = -1
    writer_request: str = ""
    oracle: str = ""
    launch: str = ""
    detail: str = ""
    cause: str = ""
    evidence: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a rule makes of a case.

    `score`: how much of what its mechanism leaves behind is there, 0 to 1. `sentence` explains, in plain words.
    `evidence` are queries beside those that every incident has. `cause_event` is the event in which it went wrong,
    where the trace tells; clusters of one kind with one cause are one incident. `follows_event` is an event that did
    something else wrong, of which this is a part: whatever cluster has signs there, this belongs to it.
    """

    score: float
    sentence: str
    evidence: tuple[str, ...] = ()
    cause_event: int = -1
    follows_event: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A kind of incident.

    Attributes:
        kind: its name: a fault class.
        title: in three or four words.
        mechanism: what goes wrong in the engine, and what that leaves behind; the class's reference at its end.
        judge: scores a case, None where nothing speaks for this kind.
        recurs: the mistake is in code that runs again and again, so that clusters of this kind are one incident even
            where they share neither slot nor request.
        aftermath: what this kind leaves behind comes of other mistakes as well: where one hit the same request before,
            it is a part of that.
    """

    kind: str
    title: str
    mechanism: str
    judge: "Callable[[Case], Judgement | None]"
    recurs: bool = False
    aftermath: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster: `signs` are its earliest ones, in order; `kinds` counts findings, `reasons` rows by reason bits.

    `facts` is empty where the trace is not at hand; rules then go by the signs alone, and score lower.
    """

    signs: Sequence[Sign]
    kinds: Counter[str]
    reasons: Counter[int]
    facts: Facts = field(default_factory=Facts)

    @property
    def first(self) -> Sign:
        """The earliest sign."""
        return self.signs[0]

    @property
    def head(self) -> list[Sign]:
        """The signs of the first event."""
        return [sign for sign in self.signs if sign.event == self.first.event]

    @property
    def has_trace(self) -> bool:
        """Whether the trace was at hand."""
        return self.facts.header is not None

    @property
    def tells_all(self) -> bool:
        """Whether the trace promises to tell of every allocation and free."""
        return self.facts.header is not None and self.facts.header.slot_history == "complete"

    @property
    def groups(self) -> tuple[PoolGroup, ...]:
        """The header's pool groups; none without a trace."""
        return self.facts.header.groups if self.facts.header is not None else ()

    def finding(self, *kinds: str, anywhere: bool = False) -> Sign | None:
        """Return the first finding of certain kinds among the head, or among all signs."""
        return next((sign for sign in (self.signs if anywhere else self.head) if sign.kind in kinds), None)

    def violation(self, bits: int, *, anywhere: bool = False) -> Sign | None:
        """Return the first violation that has one of certain reasons."""
        return next((sign for sign in (self.signs if anywhere else self.head) if sign.bits & bits), None)

    def only_kv_hash(self) -> Sign | None:
        """Return the first violation where the head says nothing but that KV bytes are not those written."""
        if all(sign.bits == KV_HASH for sign in self.head):
            return self.first
        return None

    def group(self, sign: Sign) -> int:
        """Return a sign's pool group; of one that names the block table's slot, the first full group of its runner."""
        if sign.group >= 0 or sign.slot < 0:
            return sign.group
        return next((g for g, known in enumerate(self.groups) if known.lut < 0 and known.runner == sign.runner), 0)

    def is_sliding(self, sign: Sign) -> bool:
        """Whether a sign is about slots behind a full-to-SWA table."""
        group = self.group(sign)
        return 0 <= group < len(self.groups) and self.groups[group].lut >= 0

    def last(self, sign: Sign, whats: Iterable[str], *, before: int | None = None) -> Fact | None:
        """Return the last of certain things that happened to a sign's slot, up to its event."""
        upto = sign.event if before is None else before - 1
        return self.facts.last(self.group(sign), sign.slot, whats, upto=upto)

    def history(self, sign: Sign) -> list[Fact]:
        """Return what happened to a sign's slot up to its event."""
        return self.facts.of(self.group(sign), sign.slot, upto=sign.event)
