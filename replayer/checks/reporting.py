"""Findings out of what is wrong: one for each forward, kind and request, damage that lasts told only when it is new."""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.ledger import ALLOC, CACHED, CONTENT, LEFT, OWNER, PADDING_WRITER, STATE
from ...recorder.state.events import SlotEvent, StatusEvent, TransferEvent
from ...recorder.state.forward import BatchTokens, Forward
from ...recorder.state.ledger import TIMELESS
from ...recorder.state.requests import RequestTable
from ..report.findings import NO_CAUSE, Cause, Finding, counted, evidence
from .history import History, Judged
from .view import ForwardView, GroupReads

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MAX_REMEMBERED = 4096
MAX_PARTIES = 64

# From a ledger row and the index of what is wrong to the finding's words, further events that prove it, and its cause.
Explain = Callable[[Int64Array, int], tuple[str, Iterable[int], Cause]]


class Repeats:
    """Remembers the slots that each request's last forward was reported for, so that lasting damage is told once."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], Int64Array] = {}

    def new(self, group: int, forward: Forward, flagged: dict[int, Int64Array]) -> dict[int, BoolArray]:
        """Say which slots are new, `flagged[r]` being all that is wrong with request r (past the batch: padding)."""
        if not flagged and not self._told:
            return {}
        ids = [*forward.request_ids.tolist(), PADDING_WRITER]
        for r, request_id in enumerate(ids):
            if r not in flagged:
                self._told.pop((group, request_id), None)
        fresh = {}
        for r, slots in flagged.items():
            key = (group, ids[r])
            before = self._told.get(key)
            fresh[r] = np.ones(len(slots), np.bool_) if before is None else ~np.isin(slots, before)
            self._told[key] = slots
        if len(self._told) > MAX_REMEMBERED:
            self._told.clear()
        return fresh

    @property
    def nothing_told(self) -> bool:
        """Whether no request's last forward was reported."""
        return not self._told

    @property
    def requests_told(self) -> set[int]:
        """The requests whose last forward was reported, `PADDING_WRITER` for padding."""
        return {request for _, request in self._told}

    def forget(self) -> None:
        """Forget what was told."""
        self._told.clear()


def read_findings(
    kind: str, view: ForwardView, judged: Judged, bits: int, history: History, repeats: Repeats, explain: Explain
) -> list[Finding]:
    """Return the findings of one kind among a group's reads: those whose bits meet `bits`."""
    if not len(judged.reads) and repeats.nothing_told:
        return []
    chosen = judged.reads[(judged.read_bits & bits) != 0]
    group = judged.group
    offsets = group.plan.request_offsets[1 : len(view.forward.request_ids) + 1]
    return entry_findings(
        kind,
        view.forward,
        group,
        requests=np.searchsorted(offsets, chosen, side="right"),
        positions=group.positions[chosen],
        slots=group.slots[chosen],
        entries=chosen,
        ledger=judged.ledger,
        history=history,
        repeats=repeats,
        explain=explain,
    )


def write_findings(
    kind: str, view: ForwardView, judged: Judged, bits: int, history: History, repeats: Repeats, explain: Explain
) -> list[Finding]:
    """Return the findings of one kind among a group's writes: those whose bits meet `bits`."""
    if not len(judged.writes) and repeats.nothing_told:
        return []
    chosen = judged.writes[(judged.write_bits & bits) != 0]
    group, forward = judged.group, view.forward
    return entry_findings(
        kind,
        forward,
        group,
        requests=np.searchsorted(group.write_offsets[1 : len(forward.request_ids) + 1], chosen, side="right"),
        positions=forward.positions[chosen],
        slots=group.written[chosen],
        entries=chosen,
        ledger=judged.ledger,
        history=history,
        repeats=repeats,
        explain=explain,
    )


def entry_findings(
    kind: str,
    forward: Forward,
    group: GroupReads,
    *,
    requests: Int64Array,
    positions: Int64Array,
    slots: Int64Array,
    entries: Int64Array,
    ledger: Int64Array,
    history: History,
    repeats: Repeats,
    explain: Explain,
) -> list[Finding]:
    """Group what is wrong by request: one finding for the slots that were not reported for its last forward.

    `requests`, `positions`, `slots`, `entries` `[n]`: index into the batch (its length for padding), position, slot,
    and the number that `explain` gets, for each thing that is wrong.
    """
    places = {int(r): np.flatnonzero(requests == r) for r in np.unique(requests)}
    fresh = repeats.new(group.pool.index, forward, {r: slots[at] for r, at in places.items()})
    findings = []
    for r, at in places.items():
        new = at[fresh[r]]
        if not len(new):
            continue
        first = int(new[0])
        detail, events, cause = explain(ledger[slots[first]], int(entries[first]))
        findings.append(
            forward_finding(
                kind,
                forward,
                history.request_table,
                request=r,
                group=group.pool.index,
                position=int(positions[first]),
                slot=int(slots[first]),
                detail=detail,
                count=len(new),
                events=events,
                cause=cause,
            )
        )
    return findings


def forward_finding(
    kind: str,
    forward: Forward,
    request_table: RequestTable,
    *,
    request: int,
    group: int,
    position: int,
    slot: int,
    detail: str,
    count: int = 1,
    events: Iterable[int] = (),
    cause: Cause = NO_CAUSE,
) -> Finding:
    """Return a finding about request number `request` of a forward; past the batch, about its padding."""
    padding = request >= len(forward.request_ids)
    request_id = -1 if padding else int(forward.request_ids[request])
    return Finding(
        kind=kind,
        event=forward.event,
        forward=forward.forward,
        time_ns=forward.time_ns,
        runner=forward.runner,
        group=group,
        request_id=request_id,
        request=request_table.name(request_id),
        req_pool_idx=0 if padding else int(forward.req_pool_indices[request]),
        position=position,
        slot=slot,
        detail=counted(detail, count),
        count=count,
        evidence=evidence(events, forward.event),
        **cause._asdict(),
    )


def input_finding(
    kind: str,
    detail: str,
    forward: Forward,
    tokens: BatchTokens,
    token: int,
    request_table: RequestTable,
    cause: Cause,
    events: Iterable[int] = (),
) -> Finding:
    """Return the finding that token `token` of the batch is wrong."""
    return forward_finding(
        kind,
        forward,
        request_table,
        request=int(tokens.request[token]),
        group=-1,
        position=int(tokens.position[token]),
        slot=int(forward.out_cache_loc[0][token]) if forward.out_cache_loc else -1,
        detail=detail,
        events=events,
        cause=cause,
    )


def event_finding(
    kind: str,
    event: SlotEvent | TransferEvent | StatusEvent,
    history: History,
    *,
    group: int,
    slots: Int64Array,
    detail: str,
    events: Iterable[int] = (),
    request_id: int | None = None,
    cause: Cause = NO_CAUSE,
) -> Finding:
    """Return a finding about slots that an event between two forwards names; its forward is the one before it."""
    request_id = event.request_id if request_id is None else request_id
    return Finding(
        kind=kind,
        event=event.event,
        forward=history.last_forward,
        time_ns=event.time_ns,
        runner=history.header.groups[group].runner,
        group=group,
        request_id=request_id,
        request=history.request_table.name(request_id),
        req_pool_idx=event.row,
        position=-1,
        slot=int(slots[0]),
        detail=counted(detail, len(slots)),
        count=len(slots),
        evidence=evidence(events, event.event),
        **cause._asdict(),
    )


def by_row(rows: Int64Array, column: int) -> list[tuple[int, BoolArray]]:
    """Return each value of a ledger column with the rows that have it: damage is told by its other party.

    Past `MAX_PARTIES` values the last one stands for the rest, so that every row is counted.
    """
    values = np.unique(rows[:, column])
    parties = [(int(value), rows[:, column] == value) for value in values[: MAX_PARTIES - 1]]
    if len(values) >= MAX_PARTIES:
        parties.append((int(values[MAX_PARTIES - 1]), rows[:, column] >= values[MAX_PARTIES - 1]))
    return parties


def holder(row: Int64Array, history: History) -> str:
    """Return in words who holds a slot, by its ledger row."""
    return "the prefix cache" if row[STATE] == CACHED else f"request {history.request_table.name(int(row[OWNER]))}"


def held_by(row: Int64Array) -> Cause:
    """Return as a cause who holds a slot, by its ledger row."""
    return Cause("held_by_cache") if row[STATE] == CACHED else Cause("held_by_request", int(row[OWNER]))


def changed_hands(row: Int64Array) -> list[int]:
    """Return the events in which a slot was given out last, and in which it left its holder last."""
    return [int(row[column]) - 1 for column in (ALLOC, LEFT) if row[column]]


def happened(row: Int64Array) -> list[int]:
    """Return the events that a ledger row remembers: given out, left its holder, written."""
    return changed_hands(row) + ([int(row[CONTENT]) - 1] if 0 < row[CONTENT] < TIMELESS else [])
