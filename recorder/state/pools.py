"""The rebuilt pools of one pool group: canary buffers, captured KV bytes, and who wrote each slot last."""

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.constants import KvHashMode, LaunchTag
from ...kernels.ops.hash.kv_source import KvSource
from ...kernels.ops.plan.reference import WritePlan
from ..trace.header import PoolGroup, TraceHeader
from ..trace.schema import TIER_HOST
from .events import SlotCopy

Endpoint = Literal["HEAD", "TAIL", "SWEEP"]
ENDPOINTS: Final[tuple[Endpoint, ...]] = ("HEAD", "TAIL")  # of a forward

RECORD_BYTES = 32
LEDGER_BYTES = 72  # a slot's row in the history checks' ledger, and what they have reported of it


def launch_tag(endpoint: Endpoint, half: str, kind: str) -> LaunchTag:
    """Return the launch tag of an endpoint ("HEAD"), half ("K") and group kind ("full")."""
    return LaunchTag[f"{endpoint}_{half}_{kind.upper()}"]


@dataclass(slots=True)
class Tier:
    """Slots of one memory tier: the pool itself, or the host tier that requests are offloaded to.

    `head` and `tail` map a half to `[num_slots, 32] uint8`, `kv` holds `[num_slots, capture_bytes] uint8` per stream, `writers` is
    `[num_slots, 3] int64` (event + 1, forward, request id; event 0 if nobody wrote), `unknown` `[num_slots] bool` what lost events
    may have changed, `whole_hashes` by half `[num_slots] int64` the KV hash over all captured bytes, if that is another one.
    `chain_starts` is `[num_slots] int64`: the position from which on a record's chain is hashed, since the one before was unknown.
    """

    head: dict[str, ByteArray]
    tail: dict[str, ByteArray]
    kv: list[ByteArray]
    writers: Int64Array
    unknown: npt.NDArray[np.bool_]
    chain_starts: Int64Array
    whole_hashes: dict[str, Int64Array] = field(default_factory=dict)

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        """Return every per-slot array, in a fixed order."""
        records = [*self.head.values(), *self.tail.values()]
        return [*records, *self.kv, *self.whole_hashes.values(), self.writers, self.unknown, self.chain_starts]


class GroupPool:
    """One pool group's tiers, with the KV sources that the TAIL buffers hash."""

    def __init__(self, group: PoolGroup, *, index: int, kv_hash_mode: KvHashMode) -> None:
        self.group = group
        self.index = index
        self.kv_hash_mode = kv_hash_mode if group.streams else KvHashMode.NONE
        self.pool = _allocate(group, group.num_slots)
        self.host = _allocate(group, group.host_num_slots)
        self.any_unknown = False
        widths = [
            (data, stream.half, stream.capture_bytes)
            for data, stream in zip(self.pool.kv, group.streams, strict=True)
            if not stream.samples  # the canary does not look there
        ]
        self.sources = {
            half: tuple(
                KvSource(tensor=data, page_size=1, bytes_per_token=width, read_bytes=width)
                for data, of_half, width in widths
                if of_half == half
            )
            for half in group.halves
        }

    @property
    def num_slots(self) -> int:
        """Slots of the pool, slot 0 (padding) included."""
        return self.group.num_slots

    def tier(self, number: int) -> Tier:
        """Return the pool (0) or the host tier (1)."""
        return self.host if number == TIER_HOST else self.pool

    def last_writers(self, slots: Int64Array) -> Int64Array:
        """Return event, forward and request id of each slot's last writer, `[n, 3] int64`; -1 where nobody wrote."""
        found = self.pool.writers[slots]
        written = found[:, 0] > 0
        found[:, 0] -= 1
        found[~written] = -1
        return found

    def copy_slots(self, copy: SlotCopy) -> None:
        """Copy whole slots, records and bytes and writers, as the engine copied them."""
        source, target = self.tier(copy.src_tier), self.tier(copy.dst_tier)
        for have, take in zip(source.arrays(), target.arrays(), strict=True):
            take[copy.dst] = have[copy.src]

    def forget(self, slots: slice | Int64Array | None = None) -> None:
        """Mark slots as unknown, after events that may have written them were lost; None: all, of both tiers."""
        if slots is None:
            self.host.unknown[:] = True
        self.pool.unknown[slice(None) if slots is None else slots] = True
        self.any_unknown = True

    def learn(self, slots: Int64Array) -> None:
        """Mark slots as known again, since this forward wrote them."""
        if self.any_unknown:
            self.pool.unknown[slots[(slots > 0) & (slots < self.num_slots)]] = False

    def chain(self, slots: Int64Array, plan: WritePlan, prefix_lens: Int64Array) -> None:
        """Note where the chains begin that a forward has written: with their seeds', or behind a prefix without one."""
        if not self.any_unknown:
            return
        starts, bs = self.pool.chain_starts, len(prefix_lens)
        ends, seeds = plan.offsets[: bs + 1].tolist(), plan.seed_slots[:bs].tolist()
        for request, (seed, prefix) in enumerate(zip(seeds, prefix_lens.tolist(), strict=True)):
            written = slots[ends[request] : ends[request + 1]]
            start = int(starts[seed]) if 0 <= seed < self.num_slots else max(0, prefix)
            starts[written[(written > 0) & (written < self.num_slots)]] = start


def _allocate(group: PoolGroup, num_slots: int) -> Tier:
    return Tier(
        head={half: np.zeros((num_slots, RECORD_BYTES), dtype=np.uint8) for half in group.halves},
        tail={half: np.zeros((num_slots, RECORD_BYTES), dtype=np.uint8) for half in group.halves},
        kv=[np.zeros((num_slots, stream.capture_bytes), dtype=np.uint8) for stream in group.streams],
        writers=np.zeros((num_slots, 3), dtype=np.int64),
        unknown=np.zeros(num_slots, dtype=np.bool_),
        chain_starts=np.zeros(num_slots, dtype=np.int64),
    )


def pool_bytes(header: TraceHeader) -> int:
    """Return the bytes that a replay's pools, tables and slot history take when every page of them is touched."""
    total = sum(4 * table.rows * table.width for table in header.tables) + 8 * sum(header.lut_lens)
    if header.truth_table is not None:
        total += 4 * header.truth_table.rows * header.truth_table.width
    for group in header.groups:
        per_slot = 2 * RECORD_BYTES * len(group.halves) + sum(s.capture_bytes for s in group.streams) + 24 + 1 + 8
        total += per_slot * (group.num_slots + group.host_num_slots)
        total += (LEDGER_BYTES + (16 if group.lut >= 0 else 0)) * group.num_slots
    return total
