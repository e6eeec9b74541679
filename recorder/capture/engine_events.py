"""The events that tell what an engine did between forwards: slots that changed hands, copies, sweeps, transfers.

Each function checks what it was told and returns the event; `Recorder` sends it off.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..trace.event import NO_LISTS, TraceEvent
from ..trace.schema import ALLOC_STATUSES, PHASE_AFTER, REQUEST_STATUSES, TRANSFER_DIRECTIONS, TRANSFER_STATUSES
from .host_arrays import Int64Array, ordered_runs, own_int64
from .kv_shadow import GroupKvShadow


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEntries:
    """What a walk of the prefix cache found, `[n] int64` each; slots in their group's own numbering."""

    groups: Int64Array
    slots: Int64Array
    positions: Int64Array
    prev_slots: Int64Array
    locked: Int64Array


def slots_event(
    kind: str,
    *,
    time_ns: int,
    group: Any,
    slots: Any,
    runs: tuple[Any, Any] | None,
    request_id: int,
    row: int,
    status: str,
    note: str,
) -> TraceEvent:
    """Return the event of slots that were allocated, freed or evicted; raise `ValueError` for another kind or status."""
    _one_of("kind", kind, ("alloc", "free", "evict"))
    _one_of(f"status of {kind}", status, ALLOC_STATUSES if kind == "alloc" else ("",))
    starts, counts = (own_int64(part) for part in runs) if runs is not None else ordered_runs(np.sort(own_int64(slots)))
    ints = {"slot_group": np.full(starts.size, group, np.int64), "slot_start": starts, "slot_count": counts}
    if row >= 0:
        ints["req_pool_indices"] = np.array([row], np.int64)
    scalars: dict[str, int | str] = {"request_id": int(request_id), "status": status, "note": note}
    return TraceEvent(kind=kind, time_ns=time_ns, scalars=scalars, ints=ints)


def status_event(*, time_ns: int, request_id: int, status: str, row: int, note: str) -> TraceEvent:
    """Return the event of a request that got its row or gave it back; raise `ValueError` for another status."""
    _one_of("status", status, REQUEST_STATUSES)
    ints = {"req_pool_indices": np.array([row], np.int64)} if row >= 0 else NO_LISTS
    scalars: dict[str, int | str] = {"request_id": int(request_id), "status": status, "note": note}
    return TraceEvent(kind="status", time_ns=time_ns, scalars=scalars, ints=ints, bytes=NO_LISTS)


def sample_event(*, time_ns: int, forward: int, sampled_tokens: Any, sampled_lens: Any) -> TraceEvent:
    """Return the event of tokens that an earlier forward sampled; raise `ValueError` where lengths do not fit."""
    lens, tokens = own_int64(sampled_lens), own_int64(sampled_tokens)
    if tokens.size != int(np.maximum(lens, 0).sum()):
        raise ValueError(f"sampled_lens ask for {int(np.maximum(lens, 0).sum())} tokens, {tokens.size} came")
    ints = {"sampled_lens": lens, "sampled_tokens": tokens}
    return TraceEvent(kind="sample", time_ns=time_ns, scalars={"forward": int(forward)}, ints=ints)


def sweep_entries(groups: Any, slots: Any, positions: Any, prev_slots: Any, locked: Any) -> SweepEntries:
    """Copy what a walk found; raise `ValueError` where lengths differ."""
    own = own_int64(slots)
    of_group = own_int64(groups)
    entries = SweepEntries(
        groups=np.full(own.size, of_group[0]) if of_group.size == 1 else of_group,
        slots=own,
        positions=own_int64(positions),
        prev_slots=own_int64(prev_slots),
        locked=own_int64(locked),
    )
    for name in ("groups", "positions", "prev_slots", "locked"):
        if getattr(entries, name).size != own.size:
            raise ValueError(f"{name} has length {getattr(entries, name).size}, expected {own.size}, one for each slot")
    return entries


def sweep_event(entries: SweepEntries, *, time_ns: int, forward: int, runner: int) -> TraceEvent:
    """Return the event of a walk of the prefix cache after `forward`."""
    ints = {
        "sweep_group": entries.groups,
        "sweep_slot": entries.slots,
        "sweep_position": entries.positions,
        "sweep_prev": entries.prev_slots,
        "sweep_locked": entries.locked,
    }
    return TraceEvent(
        kind="sweep",
        time_ns=time_ns,
        scalars={"forward": int(forward), "runner": int(runner)},
        ints={name: values for name, values in ints.items() if values.size},
    )


def transfer_event(
    status: str,
    *,
    time_ns: int,
    forward: int,
    runner: int,
    direction: str,
    room: int,
    group: int,
    slots: Int64Array,
    start_position: int,
    request_id: int,
    row: int,
    peer: str,
    num_bytes: int,
    note: str,
) -> TraceEvent:
    """Return the event of a transfer between two engines after `forward`.

    Raises:
        ValueError: there is no such status or direction.
    """
    _one_of("status", status, TRANSFER_STATUSES)
    _one_of("direction", direction, TRANSFER_DIRECTIONS)
    starts, counts = ordered_runs(slots)
    ints = {
        "slot_group": np.full(starts.size, group, np.int64),
        "slot_start": starts,
        "slot_count": counts,
        "prefix_lens": np.array([start_position], np.int64),
    }
    if row >= 0:
        ints["req_pool_indices"] = np.array([row], np.int64)
    scalars: dict[str, int | str] = {
        "status": status,
        "mode": direction,
        "forward": forward,
        "runner": runner,
        "room": int(room),
        "request_id": int(request_id),
        "peer": peer,
        "num_bytes": int(num_bytes),
        "note": note,
    }
    return TraceEvent(kind="transfer", time_ns=time_ns, scalars=scalars, ints=ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenChange:
    """Bytes of a group's stream that are not those written: `slots` `[n]`, `content` `[n, capture_bytes]`."""

    group: int
    stream: int
    slots: Int64Array
    content: Any


def seen_changes(groups: list[GroupKvShadow], group: int, slots: Int64Array) -> list[SeenChange]:
    """Compare slots of a group, between forwards, with what a replay knows of their bytes."""
    inside = slots[(slots > 0) & (slots < groups[group].group.num_slots)]
    return [
        SeenChange(group=group, stream=stream, slots=changed, content=content)
        for stream, changed, content in groups[group].changes(inside, inside[:0])
    ]


def add_changes(event: TraceEvent, changes: list[SeenChange], groups: list[GroupKvShadow], runner: int) -> None:
    """Put observed changes into an event; streams are numbered as in a forward of `runner`."""
    if not changes:
        return
    base, at = {}, 0
    for number, kv in enumerate(groups):
        if kv.group.runner == runner:
            base[number] = at
            at += len(kv.sources)
    stream = [np.full(c.slots.size, base[c.group] + c.stream, np.int64) for c in changes]
    event.ints["kv_change_stream"] = np.concatenate(stream)
    event.ints["kv_change_slot"] = np.concatenate([c.slots for c in changes])
    event.ints["kv_change_phase"] = np.full(event.ints["kv_change_slot"].size, PHASE_AFTER, np.int64)
    event.bytes["kv_change_bytes"] = np.concatenate([c.content.reshape(-1) for c in changes])


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}, expected {', '.join(repr(name) for name in allowed)}")
