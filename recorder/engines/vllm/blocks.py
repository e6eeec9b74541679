"""Which slots vLLM's scheduler gives out and takes back, if it runs in the process that runs the model.

Each KV-cache group has a manager, which knows the blocks of each request; the pool behind them knows which blocks the
prefix cache holds. A block joins that cache when it is scheduled to be filled; that is recorded when it has been, since
it is its request's until then. What the cache holds can be walked, so that damage is found before a request reads it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.host_arrays import runs_to_slots
from ...capture.recorder import Recorder
from ...capture.slot_numbers import SlotsChanged
from ...trace.schema import (
    ALLOC_CACHED,
    ALLOC_FRESH,
    ALLOC_SHARED,
    LET_GO,
    NOBODYS,
    STILL_USED,
    AllocStatus,
    SlotChange,
)
from ..common.hooking import Around, Hook, OnFault, around, beside, wrap_method, wrap_often
from ..common.requests import request_id_of
from .layout import VllmGroup, VllmLayout
from .step import VllmRequests

# Methods of a group's manager, and of the pool, without which the history has holes.
MANAGER: Final = ("allocate_new_blocks", "add_local_computed_blocks", "free", "remove_skipped_blocks")
POOL: Final = ("_maybe_evict_cached_block", "reset_prefix_cache", "free_blocks", "cache_full_blocks")
KNOWN_MANAGERS: Final = ("FullAttentionManager", "SlidingWindowManager")
# All of whose blocks are some request's: what else is in use, if no request is left, is nobody's.
OF_REQUESTS: Final = (*KNOWN_MANAGERS, "MambaManager")


def why_no_history(scheduler: Any, groups: Sequence[VllmGroup]) -> str:
    """Return why a scheduler's slot history cannot be recorded whole, nothing if it can."""
    coordinator = getattr(getattr(scheduler, "kv_cache_manager", None), "coordinator", None)
    managers = getattr(coordinator, "single_type_managers", None)
    pool = getattr(coordinator, "block_pool", None)
    if managers is None or pool is None:
        return "this vLLM keeps its blocks elsewhere"
    missing = [name for name in POOL if not callable(getattr(pool, name, None))]
    for group in groups:
        manager = managers[group.gid]
        missing += [name for name in MANAGER if not callable(getattr(manager, name, None))]
        if type(manager).__name__ not in KNOWN_MANAGERS:
            return f"group {group.gid} is managed by a {type(manager).__name__}"
        if int(manager.block_size) != group.block_size:
            return f"group {group.gid} is managed in blocks of another size"
    if missing:
        return f"this vLLM has no {', '.join(sorted(set(missing)))}"
    if getattr(scheduler, "connector", None) is not None:
        return "a KV connector moves blocks too"
    if getattr(scheduler, "defer_block_free", False):
        return "frees are put off until steps have ended"
    if getattr(coordinator, "enable_partial_hash_hits", False):
        return "prefix hits may end inside a block"
    return ""


class CachedBlock(NamedTuple):
    """A block of the prefix cache: its group's index, its first position, and the cached block before it, if any.

    `serial` tells it from what the cache holds in the same block at another time.
    """

    serial: int
    group: int
    first: int
    before: int
    before_serial: int


class BlockHistory:
    """The slot history of one scheduler; `attach` hooks it.

    The prefix cache is walked every `sweep_every` forwards, 0 never: of the target's groups, not of a draft's own.
    """

    def __init__(
        self, scheduler: Any, layout: VllmLayout, requests: VllmRequests, recorder: Recorder, sweep_every: int
    ) -> None:
        self._coordinator = scheduler.kv_cache_manager.coordinator
        draft, self._swept = layout.draft, len(layout.groups)
        # A draft's layers have blocks of their own, or those of a group of the target's: what happens to that is
        # recorded for both.
        self._twin = draft if draft is not None and any(group.gid == draft.gid for group in layout.groups) else None
        self._groups = layout.all_groups if self._twin is None else layout.groups
        self._requests = requests
        self._recorder = recorder
        self._sweep_every = self._left = sweep_every
        # Blocks that fill up in the coming forward and belong to the prefix cache then: (group, block) -> request.
        self._filling: dict[tuple[int, int], str] = {}
        self._cached: dict[int, CachedBlock] = {}
        self._serial = 0
        self._skipping: tuple[int, str] | None = None
        self._ending = False  # whether a manager gives a request's blocks back
        managers, pool = self._coordinator.single_type_managers, self._coordinator.block_pool
        self._all_known = hasattr(pool, "get_num_free_blocks") and all(
            type(one).__name__ in OF_REQUESTS and getattr(one, "block_pool", pool) is pool for one in managers
        )
        self._last = np.zeros(len(pool.blocks), np.int32)  # the place of the group that each block was given to last
        self._in_use = 0  # blocks that were when no request was left
        self._said: set[int] = set()  # blocks of which it has been said that a user of theirs is known to nobody

    def attach(self, while_on: Callable[[Hook], Hook], on_fault: OnFault) -> None:
        """Put the hooks around the managers and the pool; `while_on(hook)` is one that falls silent with the others."""

        def wrap(owner: Any, name: str, hook: Hook) -> None:
            wrap_method(owner, name, while_on(hook), on_fault)

        pool = self._coordinator.block_pool
        for group in self._groups:
            manager = self._coordinator.single_type_managers[group.gid]
            new = functools.partial(self._on_new, group)  # called for each request in each step
            wrap_often(manager, "allocate_new_blocks", while_on(new), on_fault)
            wrap(manager, "allocate_external_computed_blocks", functools.partial(self._on_external, group, manager))
            wrap(manager, "add_local_computed_blocks", functools.partial(self._on_hit, group, manager))
            wrap(manager, "free", functools.partial(self._on_free, group, manager))
            if group.window:
                wrap(manager, "remove_skipped_blocks", functools.partial(self._on_skip, group))
        wrap(pool, "cache_full_blocks", self._on_cache)
        wrap(pool, "free_blocks", self._on_free_blocks)
        wrap(pool, "_maybe_evict_cached_block", self._on_evict)
        wrap(pool, "reset_prefix_cache", self._on_reset)

    def _on_new(self, group: VllmGroup, blocks: Any, name: str, *_args: Any) -> None:
        self.record("alloc", group, _ids(blocks), name)

    @around
    def _on_external(self, group: VllmGroup, manager: Any, name: str, *_args: Any, **_kwargs: Any) -> Around:
        count = len(manager.req_to_blocks.get(name, ()))
        yield
        self.record("alloc", group, _ids(manager.req_to_blocks.get(name, ())[count:]), name)

    @around
    def _on_hit(self, group: VllmGroup, manager: Any, name: str, *_args: Any, **_kwargs: Any) -> Around:
        yield
        self.record("alloc", group, _ids(manager.req_to_blocks.get(name, ())), name, status=ALLOC_SHARED)

    @around
    def _on_cache(
        self, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *_args: Any, **more: Any
    ) -> Around:
        """Note which blocks of a request, all `blocks`, join the prefix cache once they are filled."""
        yield
        gid = more["kv_cache_group_id"]
        for group in self._groups:
            if group.gid == gid:
                self._joins_cache(
                    group, request.request_id, blocks, range(num_cached_blocks, min(num_full_blocks, len(blocks)))
                )

    def _joins_cache(self, group: VllmGroup, name: str, blocks: Sequence[Any], places: range) -> None:
        for place in places:
            block = blocks[place]
            if block.is_null or block.block_hash is None or block.block_id in self._cached:
                continue
            self._filling[group.index, block.block_id] = name
            self._serial += 1
            before = blocks[place - 1].block_id if place else 0
            known = self._cached.get(before) if place else None
            serial = known.serial if known is not None and known.group == group.index else 0
            entry = CachedBlock(self._serial, group.index, place * group.block_size, before, serial)
            self._cached[block.block_id] = entry

    @around
    def _on_free(self, group: VllmGroup, manager: Any, name: str, *_args: Any, **_kwargs: Any) -> Around:
        blocks = list(manager.req_to_blocks.get(name, ()))
        self._hand_over({(group.index, block.block_id) for block in blocks})
        users = [block.ref_cnt for block in blocks]
        self._ending = True
        try:
            yield
        finally:
            self._ending = False
        self.freed(group, blocks, name)
        # Whoever lets go is one user less, and where no request is left there are none. A block that is in no cache stays the request's.
        alone = not manager.req_to_blocks
        left = [b for b, n in zip(blocks, users, strict=True) if b.ref_cnt and (alone or b.ref_cnt >= n)]
        used = [b.block_id for b in left if not b.is_null and b.block_hash is not None]
        self._said.update(used)
        self.record("alloc", group, used, name, status=ALLOC_CACHED, note=STILL_USED)

    def still_held(self, name: str) -> None:
        """Record the blocks of the prefix cache that a request which is leaving has not given back: they go on having a user."""
        for group in self._groups:
            held = self._coordinator.single_type_managers[group.gid].req_to_blocks.get(name, ())
            used = [one.block_id for one in held if not one.is_null and one.ref_cnt and one.block_hash is not None]
            self._said.update(used)
            self.record("alloc", group, used, name, status=ALLOC_CACHED, note=STILL_USED)

    def request_left(self) -> None:
        """Record the blocks that are in use if no request is left that could use them."""
        managers, pool = self._coordinator.single_type_managers, self._coordinator.block_pool
        if not self._all_known or any(any(one.req_to_blocks.values()) for one in managers):
            return
        in_use = len(pool.blocks) - 1 - pool.get_num_free_blocks()  # the null block is never free
        if in_use == self._in_use:
            return
        self._in_use = in_use
        used = {block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null}
        new, self._said = used - self._said, used
        for place, group in enumerate(self._groups):
            mine = [block for block in sorted(new) if self._last[block] == place]
            self.record("alloc", group, mine, "", note=NOBODYS)

    @beside
    def _on_skip(self, group: VllmGroup, name: str, *_args: Any, **_kwargs: Any) -> Around:
        self._skipping = (group.index, name)
        try:
            yield
        finally:
            self._skipping = None

    @around
    def _on_free_blocks(self, blocks: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record the blocks that have left a sliding window, and those of which nobody says whose they were.

        A request's last blocks go through its manager.
        """
        if self._ending:
            return
        index, name = self._skipping or (-1, "")

        def handed(known: list[Any]) -> list[tuple[VllmGroup, list[Any]]]:
            mine = [(self._groups[index], known)]
            if index < 0:
                mine = [(group, self._of_group(group, known)) for group in self._groups]
            self._hand_over({(group.index, block.block_id) for group, found in mine for block in found})
            return mine

        if isinstance(blocks, list):
            mine = handed(blocks)
            yield
        else:  # an iterator is the engine's to go through: who had a user before, and has none behind it
            used = [block for block in self._coordinator.block_pool.blocks if block.ref_cnt]
            yield
            mine = handed([block for block in used if not block.ref_cnt])
        for group, known in mine:
            self.freed(group, known, name)

    def _of_group(self, group: VllmGroup, blocks: list[Any]) -> list[Any]:
        """Return those of some blocks that are known to be a group's; groups share a pool."""
        if len(self._coordinator.single_type_managers) == 1:
            return blocks
        found = ((block, self._cached.get(block.block_id)) for block in blocks)
        return [block for block, known in found if known is not None and known.group == group.index]

    @around
    def _on_evict(self, block: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record a block that the prefix cache gives up; one that requests still use is recorded when they free it."""
        evicted = yield
        known = self._cached.pop(block.block_id, None) if evicted else None
        if known is not None and not block.ref_cnt:
            self.record("evict", self._groups[known.group], [block.block_id], "", note="cache pressure")

    @around
    def _on_reset(self, *_args: Any, **_kwargs: Any) -> Around:
        """Record everything that the prefix cache held, if it was emptied."""
        emptied = yield
        if emptied:
            for group in self._groups:
                held = [block for block, known in self._cached.items() if known.group == group.index]
                self.record("evict", group, held, "", note="reset")
            self._cached.clear()

    def after_forward(self) -> None:
        """Hand the blocks that have been filled to the prefix cache."""
        if self._filling:
            self._hand_over(set(self._filling))

    def _hand_over(self, blocks: set[tuple[int, int]]) -> None:
        by_request: dict[tuple[int, str], list[int]] = {}
        for index, block in sorted(blocks & self._filling.keys()):
            by_request.setdefault((index, self._filling.pop((index, block))), []).append(block)
        for (index, name), handed in by_request.items():
            self.record("alloc", self._groups[index], handed, name, status=ALLOC_CACHED)

    def freed(self, group: VllmGroup, blocks: Sequence[Any], name: str) -> None:
        """Record as freed the blocks that nobody uses and the prefix cache does not hold; what it holds is its own then."""
        left = [b for b in blocks if not b.is_null and not b.ref_cnt]
        self.record("free", group, [b.block_id for b in left if b.block_hash is None], name)
        kept = [b.block_id for b in left if b.block_hash is not None]
        self.record("alloc", group, kept, name, status=ALLOC_CACHED, note=LET_GO)

    def record(
        self,
        kind: SlotChange,
        group: VllmGroup,
        blocks: Sequence[int],
        name: str,
        *,
        status: AllocStatus = ALLOC_FRESH,
        note: str = "",
    ) -> None:
        """Record what happened to blocks of a group; `name` is the request's, empty for nobody's."""
        if not len(blocks):
            return
        known = self._requests.get(name) if name else None
        if kind == "alloc":
            self._last[blocks] = self._groups.index(group)
        size, groups = group.block_size, [group.index]
        if self._twin is not None and self._twin.gid == group.gid:
            groups.append(self._twin.index)
        number = -1 if not name else request_id_of(name) if known is None else known.request_id
        row = known.row if known is not None and known.row else -1
        starts = [block * size for block in blocks]
        self._recorder.slot_changed(SlotsChanged(kind, groups, starts, size, number, row, status, note))

    def after_step(self, forwards: int) -> None:
        """Count the forwards of a step, and walk the prefix cache if it is time."""
        self._left -= forwards
        if not self._sweep_every or self._left > 0:
            return
        self._left = self._sweep_every
        blocks = [self._tokens(*one) for one in sorted(self._cached.items()) if one[1].group < self._swept]
        # If there are none, it is recorded all the same: that it was looked at is what a replay wants to know.
        columns: Any = map(np.concatenate, zip(*blocks, strict=True)) if blocks else ([],) * 5
        names = ("groups", "slots", "positions", "prev_slots", "locked")
        self._recorder.sweep(**dict(zip(names, columns, strict=True)))

    def _tokens(self, block: int, known: CachedBlock) -> tuple[Int64Array, ...]:
        """Return group, slot, position, slot of the position before, and lock of each token of a block."""
        size = self._groups[known.group].block_size
        offsets = np.arange(size, dtype=np.int64)
        slots, locked = block * size + offsets, bool(self._coordinator.block_pool.blocks[block].ref_cnt)
        previous = slots - 1
        before = self._cached.get(known.before)
        if not known.first:
            previous[0] = -1
        elif before is not None and before.serial == known.before_serial:
            previous[0] = known.before * size + size - 1
        else:  # the cache has given up the block before: nothing is known of it
            previous[0] = 0
        return np.full(size, known.group, np.int64), slots, known.first + offsets, previous, offsets * 0 + int(locked)


def _ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks or () if not block.is_null]


def record_copies(recorder: Any, layout: VllmLayout, copies: Sequence[Any]) -> None:
    """Record blocks that a step copies before its forward: a prefix hit that ends inside a block gets its own."""
    if not copies:
        return
    blocks = np.array([(copy.src_block_id, copy.dst_block_id) for copy in copies], np.int64)
    # Whose they are is not said; to those groups that do not hold them it is all the same.
    for group in layout.all_groups:
        src, dst = blocks[:, 0] * group.block_size, blocks[:, 1] * group.block_size
        count = np.full(src.size, group.block_size, np.int64)
        recorder.kv_copy(group=group.index, src=src, dst=dst, count=count, note="copy on write")
        layout.kv.copied(group, runs_to_slots(src, count), runs_to_slots(dst, count))
    for pool in range(len(layout.states.pools)):
        recorder.state_changed("copy", pool=pool, slots=blocks[:, 1], sources=blocks[:, 0])
