"""Who holds which slot: requests get pages, the prefix cache keeps them, and all give them back; what is recorded of it."""

from collections.abc import Sequence

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.host_arrays import CopyEnds, ordered_runs
from ...capture.recorder import Recorder
from ...trace.schema import TIER_HOST, TIER_POOL, AllocStatus, RequestStatus, SlotChange
from .config import Counters, EngineConfig
from .pools import DRAFT, NO_PAGES, TARGET, KvPool, PageAllocator, SimulatedLayout, SlidingWindowPool
from .prefix_cache import HostTier, PrefixCache
from .radix import NO_PAGE
from .recurrent import RecurrentStates
from .requests import Request

FIRST = -1  # the slot before position 0


class SlotEvents:
    """The engine's own account of its slots and requests, as events of the recorder: whole pages, as runs of slots."""

    def __init__(self, recorder: Recorder, layout: SimulatedLayout, *, page_size: int) -> None:
        self.recorder = recorder
        self._layout = layout
        self._page_size = page_size

    def record(
        self,
        kind: SlotChange,
        pages: Int64Array,
        *,
        halves: Int64Array = NO_PAGES,
        request: Request | None = None,
        status: AllocStatus = "",
        note: str = "",
    ) -> None:
        """Record that pages of the full pool (and of the draft's, which goes along) changed hands. `halves` are pages
        of the sliding-window pool. `status` is the alloc event's: "" for fresh pages, "shared" for a request that joins
        pages which somebody holds, "cached" for one that hands its own to the prefix cache.
        """
        parts = [(group, pages) for group in self._layout.full_groups if pages.size]
        if halves.size and self._layout.swa_group >= 0:
            parts.append((self._layout.swa_group, halves))
        if not parts:
            return
        runs = [ordered_runs(np.sort(part)) for _, part in parts]
        starts, counts = (np.concatenate(column) * self._page_size for column in zip(*runs, strict=True))
        self.recorder.slots(
            kind,
            group=np.repeat([group for group, _ in parts], [starts.size for starts, _ in runs]),
            runs=(starts, counts),
            request_id=request.request_id if request is not None else -1,
            row=request.row if request is not None else -1,
            status=status,
            note=note,
        )

    def request_status(self, request: Request, status: RequestStatus, *, note: str = "") -> None:
        """Record that a request got its row, or that it gave everything back."""
        self.recorder.request_status(request_id=request.request_id, status=status, row=request.row, note=note)

    def moved(self, page: int, host_page: int, ends: Sequence[CopyEnds], *, to_host: bool) -> None:
        """Record that a page went to the host tier, or came back; `ends` is what lies there in each of the full groups."""
        size = self._page_size
        pool, host = (TIER_POOL, [page * size]), (TIER_HOST, [host_page * size])
        (src_tier, src), (dst_tier, dst) = (pool, host) if to_host else (host, pool)
        note = "offload" if to_host else "load-back"
        for group, lies in zip(self._layout.full_groups, ends, strict=True):
            self.recorder.kv_copy(
                group=group, src=src, dst=dst, count=[size], src_tier=src_tier, dst_tier=dst_tier, note=note, ends=lies
            )


class KvMemory:
    """The state that a canary watches. `req_to_token` `[rows, width] int32`; `lut` `[full slots] int64`, empty without
    sliding layers; one `KvPool` for each of the header's groups; the allocators; the prefix cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: SimulatedLayout,
        *,
        pools: list[KvPool],
        history: SlotEvents,
        counters: Counters,
    ) -> None:
        self.config = config
        self.layout = layout
        self.history = history
        self.counters = counters
        self.page_size = config.page_size
        self._offsets = np.arange(config.page_size, dtype=np.int64)
        self.req_to_token = np.zeros((config.rows, config.width), np.int32)
        self.lut = np.zeros((config.num_pages + 1) * config.page_size if config.sliding else 0, np.int64)
        self.pools = pools
        self.allocator = PageAllocator(config.num_pages, free_order=config.free_order, seed=config.seed)
        self.swa = SlidingWindowPool(config, self.lut) if config.sliding else None
        self.cache = PrefixCache(self)
        self.host = HostTier(self)
        self.states: RecurrentStates | None = None  # of an engine with recurrent layers

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def row_pages(self, row: int, first: int, last: int) -> Int64Array:
        """Return pages `first .. last - 1` of a row, as req_to_token has them."""
        size = self.page_size
        return self.req_to_token[row, first * size : last * size : size].astype(np.int64) // size

    def row_slots(self, pool: KvPool, row: int, start: int, end: int) -> Int64Array:
        """Return the pool's slots of a row's positions `start .. end - 1`."""
        return self.pool_slots(pool, self.req_to_token[row, start:end].astype(np.int64))

    def page_slots(self, pages: Int64Array) -> Int64Array:
        """Return the slots of pages, in their order."""
        return (pages[:, None] * self.page_size + self._offsets).reshape(-1)

    def pool_slots(self, pool: KvPool, slots: Int64Array) -> Int64Array:
        """Return slots of the full pool as the pool's own."""
        return self.lut[slots] if pool.group.lut >= 0 else slots

    def alloc(self, count: int, request: Request | None, *, windowless: int = 0) -> Int64Array | None:
        """Return `count` pages, of both pools if there are two; evicts from the prefix cache to get them. The first
        `windowless` of them get no sliding-window half. None if there are not as many, and nothing was given.
        """
        if not self.cache.make_room(count, halves=count - windowless):
            return None
        pages = self.allocator.alloc(count)
        halves = self.swa.pages.alloc(count - windowless) if self.swa is not None else NO_PAGES
        if pages is None or halves is None:  # cannot be: room was made in both
            return None
        self.history.record("alloc", pages, halves=halves, request=request)
        if self.swa is not None:
            self.swa.pair(pages[windowless:], halves)
        return pages

    def give_back(self, pages: Int64Array, request: Request | None, *, note: str) -> None:
        """Return pages, with their sliding-window halves, to the allocators."""
        if pages.size:
            halves = self.part(pages)
            self.allocator.free(pages)
            self.history.record("free", pages, halves=halves, request=request, note=note)

    def part(self, pages: Int64Array) -> Int64Array:
        """Give back the sliding-window halves of full pages, and return them; none without sliding layers."""
        return self.swa.part(pages) if self.swa is not None and pages.size else NO_PAGES

    def halves(self, pages: Int64Array) -> Int64Array:
        """Return the sliding-window pages that full pages lead to, those that have one."""
        paired = self.swa.paired(pages) if self.swa is not None and pages.size else NO_PAGES
        return paired[paired > 0]

    def extend(self, request: Request, upto: int, *, windowless: int = 0) -> bool:
        """Give a request slots up to position `upto`, excluded; False if the pool has none left. Of the pages that this
        takes, the first `windowless` get no sliding-window half.
        """
        start, size = request.allocated_len, self.page_size
        have = self.pages_for(start)
        if upto <= start:
            return True
        missing = self.pages_for(upto) - have
        pages = self.alloc(missing, request, windowless=windowless) if missing else NO_PAGES
        if pages is None:
            return False
        row = self.req_to_token[request.row]
        if start % size:  # the last page has room left: its slots go on from the last one
            end = min(upto, have * size)
            row[start:end] = row[start - 1] + 1 + np.arange(end - start)
        if pages.size:
            row[have * size : upto] = self.page_slots(pages)[: upto - have * size]
        request.allocated_len = upto
        return True

    def has_room(self, request: Request, upto: int, *, windowless: int = 0) -> bool:
        """Whether a request could be given slots up to position `upto`; evicts from the prefix cache to make it so."""
        count = self.pages_for(upto) - self.pages_for(request.allocated_len)
        return self.cache.make_room(count, halves=count - windowless)

    def trim(self, request: Request, upto: int, *, note: str) -> None:
        """Take back the whole pages behind position `upto`: what a verify forward wrote and rejected."""
        first, last = self.pages_for(upto), self.pages_for(request.allocated_len)
        self.give_back(self.row_pages(request.row, first, last), request, note=note)
        request.allocated_len = upto

    def slide(self, request: Request) -> None:
        """Give back the sliding-window halves that no forward of this request reads any more."""
        if self.swa is None:
            return
        # A forward in flight, one token each, still reads what it was launched with.
        needed = self.swa.first_needed_page(request.cached_len - request.in_flight)
        if needed < request.window_start + self.config.slide_pages:
            return
        self.cache.unlock_window(request, upto=needed)
        first = max(request.window_start, request.shared_pages)
        if needed > first:
            gone = self.swa.part(self.row_pages(request.row, first, needed))
            self.history.record("free", NO_PAGES, halves=gone, request=request, note="window")
            self.counters.window_freed_pages += gone.size
        request.window_start = needed

    def release(self, request: Request, *, note: str) -> None:
        """Take everything from a request that the prefix cache does not hold: its own pages, its locks."""
        own = self.row_pages(request.row, request.shared_pages, self.pages_for(request.allocated_len))
        self.cache.unlock(request)
        self.give_back(own, request, note=note)

    def copy_tail(self, parent: Request, child: Request, *, note: str) -> None:
        """Copy what a fork cannot share, in every pool; whatever has left the window stays behind."""
        first, last = child.shared_pages * self.page_size, parent.cached_len
        for pool in self.pools:
            src, dst = (self.row_slots(pool, r.row, first, last) for r in (parent, child))
            if pool.group.lut >= 0:
                live = (src > 0) & (dst > 0)
                src, dst = src[live], dst[live]
            if src.size:
                pool.copy(src, dst)
                self.history.recorder.kv_copy(
                    group=pool.index, src=src, dst=dst, count=[1] * src.size, request_id=child.request_id, note=note
                )
        if self.states is not None:
            self.states.copy(parent.row, child.row)
        self.counters.fork_copied_slots += last - first


class Sweeper:
    """Walks the prefix cache and records what it holds, group by group."""

    def __init__(self, recorder: Recorder, memory: KvMemory) -> None:
        self._recorder = recorder
        self._memory = memory

    def sweep(self) -> None:
        """Record every page that the cache holds in the pool; also if there is none, so that the walk shows."""
        memory, size = self._memory, self._memory.page_size
        nodes = [node for node in memory.cache.tree.walk() if node.page != NO_PAGE]
        held = np.array([(node.page, node.parent.page, node.depth) for node in nodes if node.parent], np.int64)
        pages, parents, depths = held.reshape(-1, 3).T
        slots, positions = memory.page_slots(pages), memory.page_slots(depths - 1)
        before = slots - 1
        before[::size] = np.where(depths == 1, FIRST, (parents + 1) * size - 1)
        for runner in (TARGET, DRAFT):
            pools = [pool for pool in memory.pools if pool.group.runner == runner]
            if not pools:
                continue
            locks = [node.window_lock if pool.group.lut >= 0 else node.lock for pool in pools for node in nodes]
            prev_slots = [np.where(before < 0, FIRST, memory.pool_slots(pool, np.maximum(before, 0))) for pool in pools]
            self._recorder.sweep(
                groups=np.repeat([pool.index for pool in pools], slots.size),
                slots=np.concatenate([memory.pool_slots(pool, slots) for pool in pools]),
                positions=np.tile(positions, len(pools)),
                prev_slots=np.concatenate(prev_slots),
                locked=np.repeat(np.array(locks, np.int64) > 0, size).astype(np.int64),
                runner=runner,
            )
        memory.counters.sweeps += 1
        memory.counters.swept_slots += slots.size
