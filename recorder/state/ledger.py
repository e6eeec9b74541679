"""Who holds which slot of every pool group, kept up from the events in between forwards and from the forwards' writes.

History checks judge against it before it moves on. If the trace promises a complete slot history, the engine starts with
every slot free; everywhere else, and after a gap, a slot is unknown until an event says otherwise. Columns and states are
those of `kernels/replay_pass/ledger.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array, record_words
from ...kernels.constants import RECORD_POSITION
from ...kernels.replay_pass.ledger import (
    ALLOC,
    CACHED,
    CONTENT,
    FREE,
    HELD,
    JOINER,
    LEDGER_COLUMNS,
    LEFT,
    OWNER,
    SHARED,
    STATE,
    UNKNOWN,
)
from ..trace.header import PoolGroup
from ..trace.schema import ALLOC_CACHED, ALLOC_SHARED, MOVED, RECEIVE, TIER_POOL
from .events import CopyEvent, GroupSlots, SlotEvent, TransferEvent
from .forward import BatchTokens, Forward
from .pools import GroupPool
from .tables import StateTables, look_up

NOBODY: Final = -1
# Later than any event: content that came in a copy, in a trace that may report the copy before the allocation.
TIMELESS: Final = 1 << 62


class SlotLedger:
    """`rows[group]` `[num_slots, 8] int64` and `transfers[group]` `[num_slots] int64`, the event + 1 of the start of the
    transfer that a slot is under, are zero pages until touched; `held_by` counts the slots that each request holds.
    `from_start` says that slots which no event has named are free.
    """

    def __init__(self, groups: Sequence[PoolGroup], *, complete: bool) -> None:
        self.complete = complete
        self.from_start = complete
        self.rows: list[Int64Array] = [np.zeros((group.num_slots, LEDGER_COLUMNS), np.int64) for group in groups]
        self.transfers: list[Int64Array] = [np.zeros(group.num_slots, np.int64) for group in groups]
        self.held_by: dict[int, int] = {}

    def forget(self) -> None:
        """Take every slot for unknown."""
        self.from_start = False
        self.rows = [np.zeros(rows.shape, np.int64) for rows in self.rows]
        self.transfers = [np.zeros(len(started), np.int64) for started in self.transfers]
        self.held_by.clear()

    def free(self, rows: Int64Array, slots: Int64Array) -> BoolArray:
        """Say which of some slots, `[n] bool`, are known to be free; `rows` is their group's ledger."""
        free: BoolArray = rows[slots, STATE] == FREE
        return free if self.from_start else free & (rows[slots, LEFT] > 0)

    def apply_slots(self, event: SlotEvent) -> None:
        """Move on by an alloc, a free or an eviction."""
        number = event.event + 1
        for part in event.parts:
            rows, slots = self.rows[part.group], part.slots
            if len(part.repeated):
                slots = np.unique(slots)
            if event.kind != "alloc":
                self._leave(rows, slots)
                rows[slots, STATE] = FREE
                rows[slots, LEFT] = number
                self.transfers[part.group][slots] = 0
            elif event.status == ALLOC_SHARED:
                self._join(rows, slots, event.request_id)
            elif event.status == ALLOC_CACHED:
                self._hand_over(rows, slots, number)
            else:
                self._leave(rows, slots)
                rows[slots, STATE] = HELD if event.request_id >= 0 else CACHED
                rows[slots, OWNER] = event.request_id
                rows[slots, ALLOC] = number
                rows[slots, JOINER] = NOBODY
                self.transfers[part.group][slots] = 0
                if event.request_id >= 0:
                    self.held_by[event.request_id] = self.held_by.get(event.request_id, 0) + len(slots)

    def apply_content(self, event: CopyEvent | TransferEvent) -> None:
        """Move on by a copy, whose targets have content, or a transfer: what landed has some, what failed has not."""
        number = event.event + 1
        if isinstance(event, CopyEvent) and event.note == MOVED:
            for copy in event.copies:
                if copy.src_tier == copy.dst_tier == TIER_POOL:
                    self._move(copy.group, copy.src, copy.dst)
            return
        for part in event.parts:
            if isinstance(event, TransferEvent):
                self.transfers[part.group][part.slots] = number if event.status == "start" else 0
            if isinstance(event, CopyEvent) or (event.status == "end" and event.direction == RECEIVE):
                self.rows[part.group][part.slots, CONTENT] = number if self.complete else TIMELESS

    def _move(self, group: int, src: Int64Array, dst: Int64Array) -> None:
        """Let whoever has slots `src` `[n]` have `dst` in their place, and these the others' places that are left."""
        inside = (src > 0) & (src < len(self.rows[group])) & (dst > 0) & (dst < len(self.rows[group]))
        src, dst = src[inside], dst[inside]
        if len(np.unique(src)) < len(src) or len(np.unique(dst)) < len(dst):
            return  # it contradicts itself
        left, taken = np.setdiff1d(src, dst), np.setdiff1d(dst, src)
        for kept in (self.rows[group], self.transfers[group]):
            moved, others = kept[src].copy(), kept[taken].copy()
            kept[dst], kept[left] = moved, others

    def held_slots(self, request_id: int) -> list[GroupSlots]:
        """Return the slots that a request holds alone, group by group; a search of the pools if there are any."""
        if not self.held_by.get(request_id):
            return []
        found = []
        for group, rows in enumerate(self.rows):
            slots = np.flatnonzero((rows[:, STATE] == HELD) & (rows[:, OWNER] == request_id))
            if len(slots):
                found.append(GroupSlots(group=group, slots=slots, repeated=slots[:0]))
        return found

    def lose_track(self, group: int, slots: Int64Array) -> None:
        """Take slots for unknown: what is wrong with them has been said."""
        self._leave(self.rows[group], slots)
        self.rows[group][slots, STATE] = UNKNOWN

    def _join(self, rows: Int64Array, slots: Int64Array, request_id: int) -> None:
        """Let a request in on slots that are somebody's. What is free stays free: that is for a reader to suffer."""
        rows[slots, JOINER] = request_id
        states = rows[slots, STATE]
        if self.complete:
            joined = slots[(states == HELD) & (rows[slots, OWNER] != request_id)]
        else:
            joined = slots[states != CACHED]
        self._leave(rows, joined)
        rows[joined, STATE] = SHARED

    def _hand_over(self, rows: Int64Array, slots: Int64Array, number: int) -> None:
        handed = slots[~self.free(rows, slots)]
        self._leave(rows, handed)
        rows[handed, STATE] = CACHED
        rows[handed, OWNER] = NOBODY
        rows[handed, LEFT] = number

    def _leave(self, rows: Int64Array, slots: Int64Array) -> None:
        """Count slots, each named once, out of the hands of those who hold them alone."""
        held = slots[rows[slots, STATE] == HELD]
        if not len(held):
            return
        owners = rows[held, OWNER]
        alone = bool((owners == owners[0]).all())  # by far the most frequent
        counted = (owners[:1], np.array([len(held)])) if alone else np.unique(owners, return_counts=True)
        for owner, count in zip(*(column.tolist() for column in counted), strict=True):
            left = self.held_by.pop(owner, 0) - count
            if left > 0:
                self.held_by[owner] = left


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Slots of a group, their allocations (event + 1) `[n] int64` each, and the forward's event that dropped them."""

    group: int
    slots: Int64Array
    alloc: Int64Array
    event: int


class DroppedSlots:
    """`by_request` holds what each request's last forward took out of its row."""

    def __init__(self) -> None:
        self.by_request: dict[int, list[Dropped]] = {}

    def still_held(self, forward: Forward, ledger: SlotLedger) -> Iterator[tuple[int, Dropped]]:
        """Yield what each request of a forward, by its index, still holds; the ledger loses track of it afterwards."""
        if not self.by_request:
            return
        for r, request_id in enumerate(forward.request_ids.tolist()):
            for one in self.by_request.pop(request_id, []):
                rows = ledger.rows[one.group][one.slots]
                held = (rows[:, STATE] == HELD) & (rows[:, OWNER] == request_id) & (rows[:, ALLOC] == one.alloc)
                if held.any():
                    slots = one.slots[held]
                    yield r, Dropped(group=one.group, slots=slots, alloc=one.alloc[held], event=one.event)
                    ledger.lose_track(one.group, slots)

    def note(
        self,
        forward: Forward,
        tokens: BatchTokens,
        pool: GroupPool,
        written: Int64Array,
        tables: StateTables,
        ledger: SlotLedger,
    ) -> None:
        """Remember the slots that stand in the table, held by the request, where this forward writes others."""
        table = tables.req_to_token[pool.group.table]
        if not table.size or pool.group.lut >= 0:
            return
        positions = tokens.position
        before, _ = look_up(table, forward.req_pool_indices[tokens.request], positions)
        owned = ledger.rows[pool.index]
        changed = np.flatnonzero((before > 0) & (before < len(owned)) & (before != written[: len(before)]))
        if not len(changed):
            return
        owner = forward.request_ids[tokens.request[changed]]
        slots = before[changed]
        kept = (owned[slots, OWNER] == owner) & (owned[slots, STATE] == HELD)
        if not kept.any():
            return
        kept &= ~np.isin(slots, written)
        # Given out anew to the same request, the slot may stand for another position now, or soon.
        records = record_words(pool.pool.tail[pool.group.halves[0]], written=False)
        kept &= (owned[slots, CONTENT] > owned[slots, ALLOC]) & (records[slots, RECORD_POSITION] == positions[changed])
        for request_id in np.unique(owner[kept]).tolist():
            mine = slots[kept & (owner == request_id)]
            one = Dropped(group=pool.index, slots=mine, alloc=owned[mine, ALLOC], event=forward.event)
            self.by_request.setdefault(request_id, []).append(one)

    def rows(self) -> Int64Array:
        """Return all of it as `[n, 5] int64`: request, group, slot, allocation, event."""
        found = [
            (request, one.group, slot, alloc, one.event)
            for request, given in self.by_request.items()
            for one in given
            for slot, alloc in zip(one.slots.tolist(), one.alloc.tolist(), strict=True)
        ]
        return np.array(found, np.int64).reshape(-1, 5)

    def put_back(self, rows: Int64Array) -> None:
        """Take over what `rows` gave; neighbours of one request, group and event belong together."""
        whose = rows[:, [0, 1, 4]]
        edges = np.flatnonzero((whose[1:] != whose[:-1]).any(axis=1)) + 1
        for part in np.split(rows, edges) if len(rows) else []:
            request, group, _, _, event = part[0].tolist()
            given = self.by_request.setdefault(request, [])
            slots, allocs = part[:, 2].copy(), part[:, 3].copy()
            if given and (given[-1].group, given[-1].event) == (group, event):  # went on from the part before
                last = given.pop()
                slots, allocs = np.append(last.slots, slots), np.append(last.alloc, allocs)
            given.append(Dropped(group=group, slots=slots, alloc=allocs, event=event))
