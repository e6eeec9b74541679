"""What the offloading manager copies to the host's memory and back: block by block, with what lies at both ends.

A request that is offloaded keeps its blocks in the host's pool until it is scheduled again. If the cache lies in the host's
memory too, all layers' bytes are hashed at both ends: right behind a store, and of a load before it and when the forward
that reads it begins. What has not landed by then is looked at again behind that forward and the next ones.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.ops.end_hash.reference import end_hashes
from ...capture.host_arrays import CopyEnds
from ...capture.recorder import Recorder
from ...trace.schema import TIER_HOST, TIER_POOL
from ..common.copy_bounds import LATE_STEPS, MAX_HASHED_BYTES, MAX_LATE, MAX_SEARCHED_SLOTS, SEARCHES
from .layout import TransformersGroup


class Load(NamedTuple):
    """Blocks of a group that are loaded for a request, `[n]` each: where they go, where they lie, what lay there before."""

    name: str
    layout: TransformersGroup
    blocks: list[int]
    host_blocks: list[int]
    there: Int64Array
    before: Int64Array


class HostCopies:
    """Records what goes to the host and comes back; `request_id` says which request has a name, -1 for none."""

    def __init__(
        self, recorder: Recorder, layouts: Sequence[TransformersGroup], request_id: Callable[[str], int]
    ) -> None:
        self._recorder = recorder
        self._layouts = layouts
        self._request_id = request_id
        self._searches = SEARCHES
        self._landed: list[Load] = []  # loads that the engine takes for done, and that are not recorded yet
        self._late: list[tuple[int, Load]] = []  # steps left, and a load of one block that had not landed
        self._right: dict[tuple[int, int], int] = {}  # what a block of a group was to get by its last load

    def stored(self, manager: Any, tables: dict[str, dict[str, list[int]]]) -> None:
        """Record that requests' blocks, by request and group, were copied to the host in one go."""
        taken: set[tuple[TransformersGroup, int]] = set()
        found = []
        for name, own in reversed(tables.items()):
            for layout, blocks, host in self._pairs(own, manager._request_id_to_cpu_blocks[name]):
                given, held = hash_blocks(layout.allocator._copy_view, blocks), self._hash_host(manager, layout, host)
                # What a later store of the same go was written over says nothing of this one.
                held[[(layout, place) in taken for place in host]] = 0
                taken |= {(layout, place) for place in host}
                found.append((layout, (blocks, host), CopyEnds(given, held, *_no_more(blocks)), name))
        for layout, ends, hashes, name in reversed(found):
            self._record("offload", layout, ends, hashes, name, to_host=True)

    def loads(self, manager: Any, name: str) -> list[Load]:
        """Return what is about to be loaded for a request, with what lies at both ends."""
        tables = {key: list(own.block_table.get(name, ())) for key, own in manager.cache.cache_allocators.items()}
        return [
            Load(
                name,
                layout,
                blocks,
                host,
                self._hash_host(manager, layout, host),
                hash_blocks(layout.allocator._copy_view, blocks),
            )
            for layout, blocks, host in self._pairs(tables, manager._request_id_to_cpu_blocks.get(name, {}))
        ]

    def loaded(self, loads: Sequence[Load]) -> None:
        """Take note of loads that are done by the engine's word."""
        self._landed += loads

    def flush(self) -> None:
        """Record the loads that are done: before the forward that may read them, behind the allocation of their blocks."""
        landed, self._landed = self._landed, []
        for load in landed:
            there = zip(load.blocks, load.there.tolist(), strict=True)
            self._right |= {(load.layout.index, block): lay for block, lay in there}
        for load in landed:
            here = hash_blocks(load.layout.allocator._copy_view, load.blocks)
            missing = np.flatnonzero((here != load.there) & (here == load.before) & (here != 0))
            ends = CopyEnds(load.there, here, load.before, self._landed_at(load, missing))
            self._record("load-back", load.layout, (load.host_blocks, load.blocks), ends, load.name)
            wrong = np.flatnonzero((here != load.there) & (here != 0))  # or a part of it is missing
            for at in wrong[: MAX_LATE - len(self._late)].tolist():
                one = slice(at, at + 1)
                parts = load.blocks[one], load.host_blocks[one], load.there[one], load.before[one]
                self._late.append((LATE_STEPS, Load(load.name, load.layout, *parts)))

    def after_forward(self) -> None:
        """Record what has landed late."""
        late, self._late = self._late, []
        for left, load in late:
            if hash_blocks(load.layout.allocator._copy_view, load.blocks) == load.there:
                ends = CopyEnds(load.there, load.there, *_no_more(load.blocks))
                self._record("landed late", load.layout, ([0], load.blocks), ends, load.name, whole=False)
            elif left > 1:
                self._late.append((left - 1, load))

    def _landed_at(self, load: Load, missing: Int64Array) -> Int64Array:
        """Return the first slot of the block that has the bytes of each block of a load, `[n]`, -1 for none that is found."""
        found, view = np.full(len(load.blocks), -1, np.int64), load.layout.allocator._copy_view
        if missing.size and self._searches and load.layout.num_slots <= MAX_SEARCHED_SLOTS:
            self._searches -= 1
            size = load.layout.page_size
            others = np.setdiff1d(self._recorder.kv[load.layout.index].otherwise() // size, [0, *load.blocks])
            hashes = zip(hash_blocks(view, others.tolist()).tolist(), others.tolist(), strict=True)
            # What another load has brought is not this one's.
            at = {lay: block for lay, block in hashes if self._right.get((load.layout.index, block)) != lay}
            found[missing] = [at[lay] * size if lay in at else -1 for lay in load.there[missing].tolist()]
        return found

    def freed(self, name: str) -> None:
        """Wait no longer for what was to be loaded to a request's blocks, which it is about to give back."""
        self.flush()
        self._late = [(left, load) for left, load in self._late if load.name != name]

    def _pairs(
        self, tables: dict[str, list[int]], host_tables: dict[str, list[int]]
    ) -> list[tuple[TransformersGroup, list[int], list[int]]]:
        """Return of each group the blocks of the cache and of the host that belong together."""
        found = []
        for layout, (group, blocks) in zip(self._layouts, tables.items(), strict=True):
            pairs = list(zip(blocks, host_tables.get(group, ()), strict=False))
            if pairs:
                found.append((layout, [block for block, _ in pairs], [host for _, host in pairs]))
        return found

    def _hash_host(self, manager: Any, layout: TransformersGroup, blocks: list[int]) -> Int64Array:
        names = list(manager.cache.cache_allocators)
        if layout.allocator._copy_view.device.type != "cpu":  # the copy may be under way
            return np.zeros(len(blocks), np.int64)
        return hash_blocks(manager._cpu_views[names[layout.index]], blocks)

    def _record(
        self,
        note: str,
        layout: TransformersGroup,
        ends: tuple[list[int], list[int]],
        hashes: CopyEnds,
        name: str,
        *,
        to_host: bool = False,
        whole: bool = True,
    ) -> None:
        """Record a copy from blocks to blocks; if not `whole`, only what lies there."""
        (src, count), (dst, _) = map(layout.block_slots, ends)
        src_tier, dst_tier = (TIER_POOL, TIER_HOST) if to_host else (TIER_HOST, TIER_POOL)
        self._recorder.kv_copy(
            group=layout.index,
            src=src,
            dst=dst,
            count=count if whole else np.zeros_like(count),
            src_tier=src_tier,
            dst_tier=dst_tier,
            request_id=self._request_id(name),
            note=note,
            ends=hashes if hashes.src.any() else None,
        )


def hash_blocks(view: Any, blocks: list[int]) -> Int64Array:
    """Return the hash of each block's bytes, `[n] int64`; zeros if they are on a device, or too many."""
    if view.device.type != "cpu" or len(blocks) * int(view.shape[1]) > MAX_HASHED_BYTES:
        return np.zeros(len(blocks), np.int64)
    return end_hashes([view.numpy()[blocks]])


def _no_more(blocks: list[int]) -> tuple[Int64Array, Int64Array]:
    """Return what says that nothing is known of what lay in blocks before, and that nothing landed elsewhere."""
    return np.zeros(len(blocks), np.int64), np.full(len(blocks), -1, np.int64)
