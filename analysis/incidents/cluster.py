"""What a rule sees of a cluster of damage: its earliest signs, what else was found, and what the trace says."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...recorder.trace.header import PoolGroup
from .facts import Fact, Facts, Rewrite
from .sign import KV_HASH, POSITION, Sign


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a rule makes of a cluster.

    `score`: how much of what its mechanism leaves behind is there, 0 to 1. `sentence` explains, in plain words.
    `evidence` are queries beside those that every incident has. `cause_event` is the event in which it went wrong, -1 if
    the trace does not show it; clusters of one kind with one cause are one incident. `follows_event` is one that did
    something else wrong, of which this is a part: whatever cluster has signs there, this belongs to it.
    """

    score: float
    sentence: str
    evidence: tuple[str, ...] = ()
    cause_event: int = -1
    follows_event: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`signs` are the earliest ones, in order; `kinds` counts findings, `reasons` rows by reason bits.

    `facts` is empty if the trace is not at hand; rules then go by the signs alone, and score lower.
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
        """The signs of the first event; of the next if that is where what the first one read was written.

        A step that reads what it writes is recorded as two forwards, and the bytes are seen behind both.
        """
        head = [sign for sign in self.signs if sign.event == self.first.event]
        here = {(sign.group, sign.slot) for sign in head}
        if all(sign.kind == "token_bytes" for sign in head):
            # Bytes that were other than the token's and that changed once more: they were not computed that way.
            changed = next((s for s in self.signs if s.bits == KV_HASH and (s.group, s.slot) in here), None)
            return head if changed is None else [sign for sign in self.signs if sign.event == changed.event]
        if all(sign.bits == KV_HASH for sign in head):
            then = [sign for sign in self.signs if sign.event == self.first.event + 1]
            if any(s.kind == "write_to_foreign_slot" and (s.group, s.slot) in here for s in then):
                return then
        return head

    @property
    def has_trace(self) -> bool:
        """Whether the trace was at hand."""
        return self.facts.header is not None

    @property
    def complete(self) -> bool:
        """Whether the trace promises to have every allocation and free."""
        return self.facts.header is not None and self.facts.header.slot_history == "complete"

    @property
    def allocations_told(self) -> bool:
        """Whether it promises to have all that the allocators give out and take back."""
        return self.facts.header is not None and bool(self.facts.header.slot_history)

    @property
    def tells_shares(self) -> bool:
        """Whether it says who joins slots, and what the prefix cache is given."""
        return self.complete or self.facts.shares_told

    @property
    def groups(self) -> tuple[PoolGroup, ...]:
        """The header's pool groups; none without a trace."""
        return self.facts.header.groups if self.facts.header is not None else ()

    def finding(self, *kinds: str, anywhere: bool = False) -> Sign | None:
        """Return the first finding of certain kinds among the head, or among all signs."""
        return next((sign for sign in (self.signs if anywhere else self.head) if sign.kind in kinds), None)

    def violation(self, bits: int) -> Sign | None:
        """Return the head's first violation that has one of certain reasons."""
        return next((sign for sign in self.head if sign.bits & bits), None)

    def only_kv_hash(self) -> Sign | None:
        """Return the first violation if the head says nothing but that KV bytes are not those written."""
        head = self.head
        return head[0] if all(sign.bits == KV_HASH for sign in head) else None

    def group(self, sign: Sign) -> int:
        """Return a sign's pool group; of one that names the block table's slot, the first full group of its runner."""
        if sign.group >= 0 or sign.slot < 0:
            return sign.group
        return next((g for g, known in enumerate(self.groups) if known.lut < 0 and known.runner == sign.runner), 0)

    def group_name(self, sign: Sign) -> str:
        """Return a sign's pool group by its name, if the trace is at hand."""
        group = self.group(sign)
        return f"pool {self.groups[group].name}" if 0 <= group < len(self.groups) else f"group {group}"

    def is_sliding(self, sign: Sign) -> bool:
        """Whether a sign is about slots behind a full-to-SWA table."""
        group = self.group(sign)
        return 0 <= group < len(self.groups) and self.groups[group].lut >= 0

    def last(self, sign: Sign, *whats: str, before: int | None = None) -> Fact | None:
        """Return the last of certain things that happened to a sign's slot, up to its event."""
        upto = sign.event if before is None else before - 1
        facts = (fact for fact in reversed(self.history(sign)) if fact.event <= upto)
        return next((fact for fact in facts if fact.what in whats), None)

    def history(self, sign: Sign) -> list[Fact]:
        """Return what happened to a sign's slot up to its event."""
        facts = self.facts.of(self.group(sign), sign.slot, upto=sign.event)
        joined = self._began_with(sign, facts)
        return facts if joined is None else sorted([*facts, joined], key=lambda fact: fact.event)

    def _began_with(self, sign: Sign, facts: Sequence[Fact]) -> Fact | None:
        """Return how a request came to a slot that it began with, where nobody tells who shares slots: its row was filled with it,
        or it was given no row, and so goes on with one that another turn of its session has left.

        What stands at another position than the request has it at was no hit, unless it came there later. Of a request that had
        begun before the trace did, nobody knows what it began with.
        """
        begin = self.facts.begins.get(sign.request_id)
        if self.tells_shares or begin is None or self.is_sliding(sign) or sign.request_id not in self.facts.prompts:
            return None
        if not 0 <= sign.position < begin.prefix_len or begin.event > sign.event:
            return None
        filled = any(start <= sign.position < end for start, end in begin.filled)
        kept = self.facts.rows_told and not self.facts.statuses.get(sign.request_id)
        change = self.rewrite_of(sign)
        changed = change is not None and change.event > begin.event
        later = any(fact.event > begin.event and fact.what in ("free", "evict") for fact in facts)
        known = any(fact.request_id == sign.request_id and fact.what in ("alloc", "shared") for fact in facts)
        if not (filled or kept) or changed or known or (sign.bits & POSITION and not later):
            return None
        if self.facts.retracted_before(sign.request_id, sign.event):
            return None
        return Fact(event=begin.event, what="shared", request_id=sign.request_id)

    def filled_between(self, sign: Sign, first: int, last: int, *whats: str) -> bool:
        """Whether certain things happened to a sign's slot between two events."""
        return any(fact.what in whats and first < fact.event < last for fact in self.history(sign))

    def rewrite_of(self, sign: Sign) -> Rewrite | None:
        """Return the last change of the sign's request's row that covers its position, before it."""
        for change in reversed(self.facts.rewrites.get(sign.request_id, ())):
            inside = change.first_position <= sign.position < change.first_position + change.count
            if inside and change.event <= sign.event:
                return change
        return None

    def joined(self, sign: Sign, since: int = -1) -> bool:
        """Whether a sign's request had joined its slot as cached, since an event."""
        return any(
            fact.what == "shared" and fact.request_id == sign.request_id and fact.event >= since
            for fact in self.history(sign)
        )

    @property
    def _can_fork(self) -> bool:
        """Whether the engine has forks: vLLM and SGLang share the pages of a prefix and copy none."""
        return self.facts.header is None or self.facts.header.engine.name.lower() not in ("vllm", "sglang")

    def forked(self, sign: Sign) -> bool:
        """Whether a sign's request may be a fork: it began with all but its last token, and was never put back."""
        begin = self.facts.begins.get(sign.request_id)
        whole = begin is None or begin.extend_len <= 1
        return self._can_fork and whole and not self.facts.retracted_before(sign.request_id, sign.event)

    def window(self, sign: Sign) -> int:
        """Return the window of a sign's pool group, 0 for full attention or if that is not known."""
        group = self.group(sign)
        return self.groups[group].window if 0 <= group < len(self.groups) else 0

    def in_ring(self, sign: Sign) -> bool:
        """Whether a sign's pool group is a ring, whose rows are read before the forward writes its own."""
        group = self.group(sign)
        return 0 <= group < len(self.groups) and self.groups[group].reads_before_write

    def enough(self, sign: Sign) -> bool:
        """Whether a sign's request had been given as many slots as it takes to hold the sign's position."""
        group = self.group(sign)
        plain = self.complete and 0 <= group < len(self.groups) and self.groups[group].lut < 0 and not self.window(sign)
        return plain and 0 <= sign.position < self.facts.holds(sign.request_id, group, sign.event)

    def reads(self, sign: Sign) -> bool:
        """Whether a sign is about a position that its forward reads and does not compute."""
        return 0 <= sign.position < self.facts.prefixes.get((sign.event, sign.request_id), -1)

    def wrote(self, sign: Sign) -> tuple[int, int] | None:
        """Return event and slot of the request's own last write of a sign's position before it."""
        return self.facts.wrote_before(sign.request_id, sign.position, sign.event)

    def filled(self, sign: Sign) -> Fact | None:
        """Return what filled a sign's slot last, before its event."""
        return self.last(sign, "written", "copied", "loaded", "received", "receive_failed", before=sign.event)

    def not_loaded(self, sign: Sign) -> Fact | None:
        """Return the load of a sign's slot that has changed none of its bytes, if nothing has filled it since."""
        last = self.last(sign, "not_loaded", "written", "copied", "loaded", "received", before=sign.event)
        return last if last is not None and last.what == "not_loaded" else None

    def was_given(self, sign: Sign) -> bool:
        """Whether a sign's request was ever given or joined its slot."""
        return any(f.request_id == sign.request_id and f.what in ("alloc", "shared") for f in self.history(sign))

    def gave_up(self, sign: Sign) -> bool:
        """Whether a sign's slot was its request's, which gave it back, and not since: its row names it still."""
        mine = [
            f for f in self.history(sign) if f.request_id == sign.request_id and f.what in ("alloc", "shared", "free")
        ]
        return bool(mine) and mine[-1].what == "free"

    def places(self) -> set[tuple[int, int]]:
        """Return pool group and slot of all that the head says."""
        return {(self.group(sign), sign.slot) for sign in self.head}

    def evidence(self, sign: Sign, *events: int) -> tuple[str, ...]:
        """Return the queries for all that happened to a sign's slot, and for events if there are any."""
        return slot_query(self.group(sign), sign.slot), *([events_query(events)] if events else [])

    def diagnosis(
        self,
        score: float,
        sentence: str,
        sign: Sign,
        *events: int,
        queries: tuple[str, ...] | None = None,
        cause: int = -1,
        follows: int = -1,
    ) -> Diagnosis:
        """Return a diagnosis whose evidence is a sign's slot and events, or else `queries`."""
        evidence = self.evidence(sign, *events) if queries is None else queries
        return Diagnosis(score=score, sentence=sentence, evidence=evidence, cause_event=cause, follows_event=follows)

    def said_by(self, kind: str, words: str, score: float = 0.95) -> Diagnosis | None:
        """Return the diagnosis that a finding of the head says by itself, None without one; `{0.detail}` is the finding's."""
        sign = self.finding(kind)
        if sign is None:
            return None
        return self.diagnosis(score, words.format(sign), sign, *sign.evidence, cause=sign.event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A kind of incident, a fault class, with a `title` of three or four words.

    `mechanism` says what goes wrong in the engine and what that leaves behind, and ends with the class's reference.
    `branch` is what went wrong where, one of `BRANCHES`. `diagnose` scores a cluster, None if nothing speaks for this
    kind. `aftermath`: what this kind leaves behind comes of other mistakes as well; if one hit the same request before, it
    is a part of that.
    """

    kind: str
    title: str
    mechanism: str
    branch: str
    diagnose: Callable[[Cluster], Diagnosis | None]
    aftermath: bool = False


def rule(
    title: str, *, branch: str, aftermath: bool = False
) -> Callable[[Callable[[Cluster], Diagnosis | None]], Rule]:
    """Make a rule of the function that diagnoses: its name is the kind, its docstring the mechanism."""

    def make(diagnose: Callable[[Cluster], Diagnosis | None]) -> Rule:
        mechanism = " ".join((diagnose.__doc__ or "").split())
        return Rule(
            kind=diagnose.__name__,
            title=title,
            mechanism=mechanism,
            branch=branch,
            diagnose=diagnose,
            aftermath=aftermath,
        )

    return make


def slot_query(group: int, slot: int) -> str:
    """The query for all that happened to a slot."""
    return f"from slot_history({slot}, in_group := {max(group, 0)})"


def request_query(request_id: int) -> str:
    """The query for a request's life."""
    return f"from request_timeline({request_id})"


def samples_query(sign: Sign, before: int) -> str:
    """The query for what was sampled in a sign's forward and some before it."""
    return (
        f"select forward, request_id, number, token from samples where forward between {sign.forward - before} and "
        f"{sign.forward} order by forward, request_id, number"
    )


def events_query(events: Iterable[int]) -> str:
    """The query for single events."""
    wanted = ", ".join(str(event) for event in sorted({event for event in events if event >= 0}))
    return f"select event, kind, forward, request_id, status, mode from events where event in ({wanted or 'null'}) order by event"
