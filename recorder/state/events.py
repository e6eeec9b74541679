"""What the events between forwards say about slots, checked: nothing in a file is believed before it fits its pools.

Each reader returns a frozen value or raises `UnusableEventError`; nothing larger than the pools is ever allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.sparse import require_memory_for
from ..capture.host_arrays import runs_to_slots
from ..trace import schema
from ..trace.header import PoolGroup
from ..trace.reader import EventView
from .forward import UnusableEventError, add_up, columns, stream_bytes

MAX_SLOT: Final = 1 << 62  # so that a run behind it does not wrap around

_NO_SLOTS: Final = np.empty(0, np.int64)
_RUN: Final = ("group", "start", "count")
_COPY: Final = ("group", "src_tier", "src", "dst_tier", "dst", "count")

# What adapters wrote in `note` before `status` could say that slots are somebody's already.
SHARED_NOTES: Final = frozenset({"prefix hit", "shared by fork"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlots:
    """Slots of one pool group, `slots` `[n] int64` in the event's order; slot 0 is left out. `repeated` holds,
    ascending, the slots that the event names more than once; `beyond` those that it names and the pool does not have,
    which are not among `slots`.
    """

    group: int
    slots: Int64Array
    repeated: Int64Array
    beyond: Int64Array = field(default_factory=lambda: _NO_SLOTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCopy:
    """Slots of a group that were copied between two tiers: `src[i]` to `dst[i]`, `[n] int64` each. All of them are read
    before one is written: a run may begin where another one ends.
    """

    group: int
    src_tier: int
    src: Int64Array
    dst_tier: int
    dst: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEvent:
    """What an event between forwards says; `row` is -1 if it names none, `parts` are the slots of the pools."""

    event: int
    time_ns: int
    status: str
    request_id: int
    row: int = -1
    parts: tuple[GroupSlots, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEvent(KnownEvent):
    """Slots that changed hands; `status` of an "alloc" is "", "shared" or "cached", of the others ""."""

    kind: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEvent(KnownEvent):
    """Slots that were overwritten with copies; `note` is whose word it is."""

    copies: tuple[SlotCopy, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent(KnownEvent):
    """A transfer's start or end; `direction` is "send" or "receive". `slots` `[n] int64` of pool group `group` in order
    of position, from `start_position` on; `group` is -1 where the event names no slot. `landed` holds what a receiver
    saw arrive, `[n, capture_bytes] uint8` a stream, nothing if it was `unread`.
    """

    forward: int
    direction: str
    room: int
    peer: str
    start_position: int
    group: int
    slots: Int64Array
    landed: tuple[ByteArray, ...]
    unread: bool  # nobody has read what landed
    pulled: bool  # of what is sent, the other side takes what it lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusEvent(KnownEvent):
    """What became of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEvent(KnownEvent):
    """Tokens that an earlier forward sampled: `lens` `[bs of that forward]`, `tokens` `[sum(lens)] int64`."""

    forward: int
    lens: Int64Array
    tokens: Int64Array


def read_known_event(view: EventView, groups: Sequence[PoolGroup]) -> KnownEvent | None:
    """Return what an event says about slots, rows or samples, None for an event of another kind. Raises
    `UnusableEventError` if its columns contradict one another or the pools.
    """
    match view.kind:
        case "alloc" | "free" | "evict":
            return _slot_event(view, groups)
        case "kv_copy":
            return _copy_event(view, groups)
        case "transfer":
            return _transfer_event(view, groups)
        case "status":
            return StatusEvent(**_named(view, schema.REQUEST_STATUSES), row=_event_row(view))
        case "sample":
            lens, tokens = view.ints("sampled_lens"), view.ints("sampled_tokens")
            if not add_up(lens, len(tokens)):
                raise UnusableEventError(f"sampled_lens do not add up to the {len(tokens)} sampled tokens")
            return SampleEvent(**_named(view), forward=int(view.scalar("forward")), lens=lens, tokens=tokens)
    return None


def _named(view: EventView, statuses: Sequence[str] = ()) -> dict[str, Any]:
    """Return what every event says; raise `UnusableEventError` for a status that is none of those, if any are given."""
    status = str(view.scalar("status"))
    if statuses and status not in statuses:
        named = ", ".join(map(repr, statuses))
        raise UnusableEventError(f"a {view.kind} event of status {status!r}, expected one of {named}")
    request_id = int(view.scalar("request_id"))
    return {"event": view.number, "time_ns": view.time_ns, "status": status, "request_id": request_id}


def _slot_event(view: EventView, groups: Sequence[PoolGroup]) -> SlotEvent:
    named, note = _named(view, schema.ALLOC_STATUSES if view.kind == "alloc" else ()), str(view.scalar("note"))
    if view.kind == "alloc" and named["status"] == schema.ALLOC_FRESH and note in SHARED_NOTES:
        named["status"] = schema.ALLOC_SHARED
    try:
        parts = _expanded(*_slot_runs(view, groups))
    except UnusableEventError:
        parts = _parted(view, groups)
    return SlotEvent(**named, kind=view.kind, note=note, row=_event_row(view), parts=parts)


def _transfer_event(view: EventView, groups: Sequence[PoolGroup]) -> TransferEvent:
    named, direction = _named(view, schema.TRANSFER_STATUSES), str(view.scalar("mode"))
    if direction not in schema.TRANSFER_DIRECTIONS:
        raise UnusableEventError(f"a transfer of direction {direction!r}")
    numbers, starts, counts = _slot_runs(view, groups)
    if len(numbers) and bool((numbers != numbers[0]).any()):
        raise UnusableEventError("a transfer of several groups, expected an event for each")
    group = int(numbers[0]) if len(numbers) else -1
    slots = runs_to_slots(starts, counts)
    lands = named["status"] == "end" and direction != schema.SEND and group >= 0
    was_read = lands and (len(view.bytes("kv_bytes")) > 0 or not len(slots) or not groups[group].streams)
    first = view.ints("prefix_lens")
    return TransferEvent(
        **named,
        row=_event_row(view),
        forward=int(view.scalar("forward")),
        direction=direction,
        room=int(view.scalar("room")),
        peer=str(view.scalar("peer")),
        start_position=int(first[0]) if len(first) else 0,
        group=group,
        slots=slots,
        pulled=str(view.scalar("note")) == schema.PULLED,
        landed=stream_bytes(view, "kv_bytes", groups[group].streams, len(slots)) if was_read else (),
        unread=lands and not was_read,
        parts=_expanded(numbers, starts, counts),
    )


def _event_row(view: EventView) -> int:
    """Return the one row that an event names, -1 for none; raise `UnusableEventError` where it names more."""
    rows = view.ints("req_pool_indices")
    if len(rows) > 1:
        raise UnusableEventError(f"{len(rows)} rows, expected one or none")
    return int(rows[0]) if len(rows) else -1


def _slot_runs(view: EventView, groups: Sequence[PoolGroup]) -> list[Int64Array]:
    """Return group, start and count of an event's runs of slots, which lie in their pools."""
    found = columns(view, "slot", _RUN)
    require_inside(found, [group.num_slots for group in groups])
    return found


def read_lost_slots(view: EventView, groups: Sequence[PoolGroup]) -> list[tuple[int, int, int]]:
    """Return group, start and end of the runs of slots that a loss event lists; a run may end behind its pool. Raises
    `UnusableEventError` if there are no such groups or slots.
    """
    found = []
    for group, start, count in zip(*(column.tolist() for column in columns(view, "slot", _RUN)), strict=True):
        if not 0 <= group < len(groups) or start < 0 or count < 0:
            raise UnusableEventError(f"a run of {count} slots from {start} in group {group}")
        found.append((group, min(start, groups[group].num_slots), min(start + count, groups[group].num_slots)))
    return found


def _parted(view: EventView, groups: Sequence[PoolGroup]) -> tuple[GroupSlots, ...]:
    """Return an event's slots; of runs that end behind their pool the slots inside and those beyond."""
    groups_, starts, counts = columns(view, "slot", _RUN)
    sizes = np.array([*(group.num_slots for group in groups), 0], np.int64)
    known = (groups_ >= 0) & (groups_ < len(groups))
    limits = sizes[np.where(known, groups_, len(groups))]
    # Differences, not sums: hostile numbers wrap around. Runs of more slots than there are are no engine's.
    leaves = known & (starts >= 0) & (starts <= MAX_SLOT) & (counts > limits - starts) & (counts <= limits)
    for group in np.unique(groups_[leaves]).tolist():
        leaves &= (groups_ != group) | (counts[leaves & (groups_ == group)].sum() <= sizes[group])
    inside = np.where(leaves, np.maximum(limits - starts, 0), counts)
    kept = ~leaves | (inside > 0)
    runs = [groups_[kept], starts[kept], inside[kept]]
    require_inside(runs, sizes[:-1].tolist())
    parts = {part.group: part for part in _expanded(*runs)}
    for group in np.unique(groups_[leaves]).tolist():
        mine = leaves & (groups_ == group)
        beyond = runs_to_slots(np.maximum(starts, limits)[mine], (counts - inside)[mine])
        part = parts.get(group, GroupSlots(group=group, slots=_NO_SLOTS, repeated=_NO_SLOTS))
        parts[group] = replace(part, beyond=np.unique(beyond))
    return tuple(parts[group] for group in sorted(parts))


def _copy_event(view: EventView, groups: Sequence[PoolGroup]) -> CopyEvent:
    group, src_tier, src, dst_tier, dst, count = columns(view, "copy", _COPY)
    for name, tiers in (("src_tier", src_tier), ("dst_tier", dst_tier)):
        if not bool(np.isin(tiers, (schema.TIER_POOL, schema.TIER_HOST)).all()):
            raise UnusableEventError(f"copy_{name} names a tier other than {schema.TIER_POOL} and {schema.TIER_HOST}")
    to_pool = dst_tier == schema.TIER_POOL
    runs = [column[to_pool] for column in (group, dst, count)]
    require_inside(runs, [known.num_slots for known in groups])
    if bool(((group < 0) | (group >= len(groups))).any()):
        raise UnusableEventError(f"a copy in group {group.max()}, the header names {len(groups)}")
    sizes = np.array([(known.num_slots, known.host_num_slots) for known in groups], np.int64).reshape(-1, 2)
    beyond = (count < 0) | (count > sizes.max(axis=1, initial=0)[group])
    for tiers, starts in ((src_tier, src), (dst_tier, dst)):
        beyond |= (starts < 0) | (starts > sizes[group, tiers] - count)
    for index in np.unique(group).tolist():
        if bool(beyond.any()) or int(count[group == index].sum()) > int(sizes[index].max()):
            raise UnusableEventError(
                f"a copy in group {index} leaves its tier, or is of more slots than the larger one has"
            )
    copies: dict[tuple[int, int, int], list[int]] = {}
    for run, key in enumerate(zip(group.tolist(), src_tier.tolist(), dst_tier.tolist(), strict=True)):
        copies.setdefault(key, []).append(run)
    made = []
    for (index, source, target), mine in copies.items():
        read, written = (runs_to_slots(starts[mine], count[mine]) for starts in (src, dst))
        made.append(SlotCopy(group=index, src_tier=source, src=read, dst_tier=target, dst=written))
    note = str(view.scalar("note") or "")
    return CopyEvent(**_named(view), copies=tuple(made), parts=_expanded(*runs), note=note)


def require_inside(runs: list[Int64Array], num_slots: list[int]) -> None:
    """Raise `UnusableEventError` where runs (group, start, count) leave their pools; nothing is expanded before."""
    groups, starts, counts = runs
    if len(groups) == 1:  # by far the most frequent: a decode's next page
        _require_run_inside(int(groups[0]), int(starts[0]), int(counts[0]), num_slots)
        require_memory_for(int(counts[0]))
        return
    for group in np.unique(groups).tolist():
        mine = groups == group
        limit = num_slots[group] if 0 <= group < len(num_slots) else 0
        # Differences, not sums: hostile numbers wrap around.
        beyond = (starts < 0) | (counts < 0) | (starts > limit) | (counts > limit - starts)
        for at in np.flatnonzero(mine & (beyond | (limit == 0)))[:1].tolist():
            _require_run_inside(group, int(starts[at]), int(counts[at]), num_slots)
        if np.count_nonzero(mine) > limit or int(counts[mine].sum()) > limit:
            raise UnusableEventError(f"runs of more slots than group {group} has, {limit}")
    require_memory_for(int(counts.sum()))


def _require_run_inside(group: int, start: int, count: int, num_slots: list[int]) -> None:
    if not 0 <= group < len(num_slots):
        raise UnusableEventError(f"a run of group {group}, the header names {len(num_slots)}")
    if start < 0 or count < 0 or start + count > num_slots[group]:
        has = f"group {group}, which has {num_slots[group]}"
        raise UnusableEventError(f"a run of {count} slots from {start} leaves {has}")


def _expanded(groups: Int64Array, starts: Int64Array, counts: Int64Array) -> tuple[GroupSlots, ...]:
    if len(groups) == 1:  # by far the most frequent: a decode's next page
        slots = np.arange(max(int(starts[0]), 1), int(starts[0] + counts[0]), dtype=np.int64)
        return (GroupSlots(group=int(groups[0]), slots=slots, repeated=_NO_SLOTS),) if len(slots) else ()
    parts = []
    for group in np.unique(groups).tolist():
        mine = groups == group
        slots = runs_to_slots(starts[mine], counts[mine])
        slots = slots[slots > 0]
        if len(slots):
            parts.append(GroupSlots(group=group, slots=slots, repeated=_repeated(starts[mine], counts[mine], slots)))
    return tuple(parts)


def _repeated(starts: Int64Array, counts: Int64Array, slots: Int64Array) -> Int64Array:
    """Return the slots that runs name more than once; the runs themselves show that there are none."""
    order = np.argsort(starts, kind="stable")
    if not bool(((starts + counts)[order][:-1] > starts[order][1:]).any()):
        return _NO_SLOTS
    unique, times = np.unique(slots, return_counts=True)
    return unique[times > 1]
