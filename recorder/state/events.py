"""What the events between forwards say about slots, checked: nothing in a file is believed before it fits its pools.

Each reader returns a frozen value or raises `UnusableEventError`; nothing larger than the pools is ever allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.sparse import require_memory_for
from ..capture.host_arrays import runs_to_slots
from ..trace.header import PoolGroup
from ..trace.reader import EventView
from ..trace.schema import (
    ALLOC_FRESH,
    ALLOC_SHARED,
    ALLOC_STATUSES,
    REQUEST_STATUSES,
    SEND,
    TIER_HOST,
    TIER_POOL,
    TRANSFER_DIRECTIONS,
    TRANSFER_STATUSES,
)
from .forward import UnusableEventError

MAX_SLOT: Final = 1 << 62  # so that a run behind it does not wrap around

_NO_SLOTS: Final = np.empty(0, np.int64)
_RUN: Final = ("group", "start", "count")
_COPY: Final = ("group", "src_tier", "src", "dst_tier", "dst", "count")

# What adapters wrote in `note` before `status` could say that slots are somebody's already.
SHARED_NOTES: Final = frozenset({"prefix hit", "shared by fork"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlots:
    """Slots of one pool group, `slots` `[n] int64` in the event's order; slot 0 is left out.

    `repeated` holds, ascending, the slots that the event names more than once; `beyond` those that it names and the
    pool does not have, which are not among `slots`.
    """

    group: int
    slots: Int64Array
    repeated: Int64Array
    beyond: Int64Array = field(default_factory=lambda: _NO_SLOTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEvent:
    """Slots that changed hands; `status` of an "alloc" is "", "shared" or "cached", of the others ""."""

    event: int
    time_ns: int
    kind: str
    status: str
    note: str
    request_id: int
    row: int
    parts: tuple[GroupSlots, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCopy:
    """Slots of a group that were copied between two tiers: `src[i]` to `dst[i]`, `[n] int64` each.

    All of them are read before one is written: a run may begin where another one ends.
    """

    group: int
    src_tier: int
    src: Int64Array
    dst_tier: int
    dst: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEvent:
    """Slots that were overwritten with copies; `parts` are those of the pool among them."""

    event: int
    copies: tuple[SlotCopy, ...]
    parts: tuple[GroupSlots, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent:
    """A transfer's start or end; `direction` is "send" or "receive".

    `slots` `[n] int64` of pool group `group` in order of position, from `start_position` on; `group` is -1 where the
    event names no slot. `landed` holds what a receiver saw arrive, `[n, capture_bytes] uint8` a stream.
    """

    event: int
    forward: int
    time_ns: int
    status: str
    direction: str
    room: int
    peer: str
    request_id: int
    row: int
    start_position: int
    group: int
    slots: Int64Array
    landed: tuple[ByteArray, ...]
    parts: tuple[GroupSlots, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusEvent:
    """What became of a request; `row` is -1 where the event names none."""

    event: int
    time_ns: int
    status: str
    request_id: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEvent:
    """Tokens that an earlier forward sampled: `lens` `[bs of that forward]`, `tokens` `[sum(lens)] int64`."""

    event: int
    forward: int
    lens: Int64Array
    tokens: Int64Array


KnownEvent = SlotEvent | CopyEvent | TransferEvent | StatusEvent | SampleEvent


def read_known_event(view: EventView, groups: Sequence[PoolGroup]) -> KnownEvent | None:
    """Return what an event says about slots, rows or samples, None for an event of another kind.

    Raises `UnusableEventError` if its columns contradict one another or the pools.
    """
    match view.kind:
        case "alloc" | "free" | "evict":
            return _slot_event(view, groups)
        case "kv_copy":
            return _copy_event(view, groups)
        case "transfer":
            return _transfer_event(view, groups)
        case "status":
            return _status_event(view)
        case "sample":
            return _sample_event(view)
    return None


def _slot_event(view: EventView, groups: Sequence[PoolGroup]) -> SlotEvent:
    status, note = str(view.scalar("status")), str(view.scalar("note"))
    if view.kind == "alloc":
        if status not in ALLOC_STATUSES:
            raise UnusableEventError(f"status {status!r}, expected one of {', '.join(map(repr, ALLOC_STATUSES))}")
        if status == ALLOC_FRESH and note in SHARED_NOTES:
            status = ALLOC_SHARED
    return SlotEvent(
        event=view.number,
        time_ns=view.time_ns,
        kind=view.kind,
        status=status,
        note=note,
        request_id=int(view.scalar("request_id")),
        row=_event_row(view),
        parts=_slots_and_beyond(view, groups),
    )


def _transfer_event(view: EventView, groups: Sequence[PoolGroup]) -> TransferEvent:
    status, direction = str(view.scalar("status")), str(view.scalar("mode"))
    if status not in TRANSFER_STATUSES or direction not in TRANSFER_DIRECTIONS:
        raise UnusableEventError(f"a transfer of status {status!r} and direction {direction!r}")
    numbers, starts, counts = _slot_runs(view, groups)
    if len(numbers) and bool((numbers != numbers[0]).any()):
        raise UnusableEventError("a transfer of several groups, expected an event for each")
    group = int(numbers[0]) if len(numbers) else -1
    slots = runs_to_slots(starts, counts)
    lands = status == "end" and direction != SEND and group >= 0
    first = view.ints("prefix_lens")
    return TransferEvent(
        event=view.number,
        forward=int(view.scalar("forward")),
        time_ns=view.time_ns,
        status=status,
        direction=direction,
        room=int(view.scalar("room")),
        peer=str(view.scalar("peer")),
        request_id=int(view.scalar("request_id")),
        row=_event_row(view),
        start_position=int(first[0]) if len(first) else 0,
        group=group,
        slots=slots,
        landed=_landed(view, groups[group], len(slots)) if lands else (),
        parts=_expanded(numbers, starts, counts),
    )


def _landed(view: EventView, group: PoolGroup, count: int) -> tuple[ByteArray, ...]:
    data = view.bytes("kv_bytes")
    widths = [stream.capture_bytes for stream in group.streams]
    if len(data) != count * sum(widths):
        raise UnusableEventError(f"kv_bytes has {len(data)} bytes, expected {count * sum(widths)}")
    parts = np.split(data, np.cumsum([count * width for width in widths[:-1]], dtype=np.int64)) if widths else []
    return tuple(part.reshape(count, width) for part, width in zip(parts, widths, strict=True))


def _status_event(view: EventView) -> StatusEvent:
    status = str(view.scalar("status"))
    if status not in REQUEST_STATUSES:
        raise UnusableEventError(f"a request of status {status!r}, expected one of {', '.join(REQUEST_STATUSES)}")
    return StatusEvent(
        event=view.number,
        time_ns=view.time_ns,
        status=status,
        request_id=int(view.scalar("request_id")),
        row=_event_row(view),
    )


def _sample_event(view: EventView) -> SampleEvent:
    lens, tokens = view.ints("sampled_lens"), view.ints("sampled_tokens")
    # Each length on its own first: sums of hostile lengths wrap around.
    if bool(((lens < 0) | (lens > len(tokens))).any()) or int(lens.sum()) != len(tokens):
        raise UnusableEventError(f"sampled_lens do not add up to the {len(tokens)} sampled tokens")
    return SampleEvent(event=view.number, forward=int(view.scalar("forward")), lens=lens, tokens=tokens)


def _event_row(view: EventView) -> int:
    """Return the one row that an event names, -1 for none; raise `UnusableEventError` where it names more."""
    rows = view.ints("req_pool_indices")
    if len(rows) > 1:
        raise UnusableEventError(f"{len(rows)} rows, expected one or none")
    return int(rows[0]) if len(rows) else -1


def _columns(view: EventView, prefix: str, names: Sequence[str]) -> list[Int64Array]:
    columns = [view.ints(f"{prefix}_{name}") for name in names]
    if len({len(column) for column in columns}) > 1:
        raise UnusableEventError(f"the {prefix} columns differ in length")
    return columns


def _slot_runs(view: EventView, groups: Sequence[PoolGroup]) -> list[Int64Array]:
    """Return group, start and count of an event's runs of slots, which lie in their pools."""
    columns = _columns(view, "slot", _RUN)
    require_inside(columns, [group.num_slots for group in groups])
    return columns


def read_lost_slots(view: EventView, groups: Sequence[PoolGroup]) -> list[tuple[int, int, int]]:
    """Return group, start and end of the runs of slots that a loss event lists; a run may end behind its pool.

    Raises `UnusableEventError` if there are no such groups or slots.
    """
    found = []
    for group, start, count in zip(*(column.tolist() for column in _columns(view, "slot", _RUN)), strict=True):
        if not 0 <= group < len(groups) or start < 0 or count < 0:
            raise UnusableEventError(f"a run of {count} slots from {start} in group {group}")
        found.append((group, min(start, groups[group].num_slots), min(start + count, groups[group].num_slots)))
    return found


def _slots_and_beyond(view: EventView, groups: Sequence[PoolGroup]) -> tuple[GroupSlots, ...]:
    """Return an event's slots, and of runs that end behind their pool the slots inside and those beyond."""
    try:
        return _expanded(*_slot_runs(view, groups))
    except UnusableEventError:
        return _parted(view, groups)


def _parted(view: EventView, groups: Sequence[PoolGroup]) -> tuple[GroupSlots, ...]:
    groups_, starts, counts = _columns(view, "slot", _RUN)
    sizes = np.array([*(group.num_slots for group in groups), 0], np.int64)
    known = (groups_ >= 0) & (groups_ < len(groups))
    limits = sizes[np.where(known, groups_, len(groups))]
    # Differences, not sums: hostile numbers wrap around. Runs of more slots than there are are no engine's.
    leaves = known & (starts >= 0) & (starts <= MAX_SLOT) & (counts > limits - starts) & (counts <= limits)
    for group in np.unique(groups_[leaves]).tolist():
        leaves &= (groups_ != group) | (counts[leaves & (groups_ == group)].sum() <= sizes[group])
    inside = np.where(leaves, np.maximum(limits - starts, 0), counts)
    kept = ~leaves | (inside > 0)
    columns = [groups_[kept], starts[kept], inside[kept]]
    require_inside(columns, sizes[:-1].tolist())
    parts = {part.group: part for part in _expanded(*columns)}
    for group in np.unique(groups_[leaves]).tolist():
        mine = leaves & (groups_ == group)
        beyond = runs_to_slots(np.maximum(starts, limits)[mine], (counts - inside)[mine])
        part = parts.get(group, GroupSlots(group=group, slots=_NO_SLOTS, repeated=_NO_SLOTS))
        parts[group] = replace(part, beyond=np.unique(beyond))
    return tuple(parts[group] for group in sorted(parts))


def _copy_event(view: EventView, groups: Sequence[PoolGroup]) -> CopyEvent:
    group, src_tier, src, dst_tier, dst, count = _columns(view, "copy", _COPY)
    for name, tiers in (("src_tier", src_tier), ("dst_tier", dst_tier)):
        if not bool(np.isin(tiers, (TIER_POOL, TIER_HOST)).all()):
            raise UnusableEventError(f"copy_{name} names a tier other than {TIER_POOL} and {TIER_HOST}")
    to_pool = dst_tier == TIER_POOL
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
    return CopyEvent(
        event=view.number,
        copies=tuple(
            SlotCopy(
                group=index,
                src_tier=source,
                src=runs_to_slots(src[mine], count[mine]),
                dst_tier=target,
                dst=runs_to_slots(dst[mine], count[mine]),
            )
            for (index, source, target), mine in copies.items()
        ),
        parts=_expanded(*runs),
    )


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
        raise UnusableEventError(
            f"a run of {count} slots from {start} leaves group {group}, which has {num_slots[group]}"
        )


def _expanded(groups: Int64Array, starts: Int64Array, counts: Int64Array) -> tuple[GroupSlots, ...]:
    """Return the slots of runs that lie inside their pools, group by group."""
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
