"""Slots that a forward took out of its request's row while the request still held them, until its next forward."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import record_words
from ...kernels.constants import RECORD_POSITION
from ...kernels.replay_pass.ledger import ALLOC, CONTENT, HELD, OWNER, STATE
from .batch_tokens import BatchTokens
from .forward import Forward
from .ledger import SlotLedger
from .pools import GroupPool
from .tables import StateTables

Int64Array = npt.NDArray[np.int64]


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
        rows, positions = forward.req_pool_indices[tokens.request], tokens.position
        inside = (rows > 0) & (rows < table.shape[0]) & (positions >= 0) & (positions < table.shape[1])
        before = table[np.where(inside, rows, 0), np.where(inside, positions, 0)].astype(np.int64)
        owned = ledger.rows[pool.index]
        changed = np.flatnonzero(inside & (before > 0) & (before < len(owned)) & (before != written[: len(before)]))
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
