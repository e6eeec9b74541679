"""Who holds which slot: requests get pages, the prefix cache keeps them, and all give them back; and the sweep."""

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.recorder import Recorder
from .config import Counters, EngineConfig
from .history import SlotEvents
from .pools import DRAFT, TARGET, KvPool, PageAllocator, SimulatedLayout, SlidingWindowPool
from .prefix_cache import HostTier, PrefixCache
from .radix import NO_PAGE, Node
from .requests import Request

_NO_PAGES = np.empty(0, np.int64)


class KvMemory:
    """The state that a canary watches.

    `req_to_token` `[rows, width] int32`; `lut` `[full slots] int64`, empty without sliding layers; one `KvPool` for
    each of the header's groups; the allocators; the prefix cache.
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

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def row_pages(self, row: int, first: int, last: int) -> Int64Array:
        """Return pages `first .. last - 1` of a row, as req_to_token has them."""
        size = self.page_size
        return self.req_to_token[row, first * size : last * size : size].astype(np.int64) // size

    def page_slots(self, pages: Int64Array) -> Int64Array:
        """Return the slots of pages, in their order."""
        return (pages[:, None] * self.page_size + self._offsets).reshape(-1)

    def alloc(self, count: int, request: Request | None, *, windowless: int = 0) -> Int64Array | None:
        """Return `count` pages, of both pools where there are two; evicts from the prefix cache to get them.

        The first `windowless` of them get no sliding-window half. None if there are not as many, and nothing was given.
        """
        if not self.cache.make_room(count, halves=count - windowless):
            return None
        pages = self.allocator.alloc(count)
        if pages is None:
            return None
        request_id, row = (request.request_id, request.row) if request is not None else (-1, -1)
        halves = self.swa.pages.alloc(count - windowless) if self.swa is not None else _NO_PAGES
        self.history.record(
            "alloc", pages, halves=halves if halves is not None else _NO_PAGES, request_id=request_id, row=row
        )
        if halves is None:  # cannot be: room was made in both
            self.give_back(pages, request, note="no page in the sliding-window pool")
            return None
        if self.swa is not None:
            self.swa.pair(pages[windowless:], halves)
        return pages

    def give_back(self, pages: Int64Array, request: Request | None, *, note: str) -> None:
        """Return pages, with their sliding-window halves, to the allocators."""
        if not pages.size:
            return
        halves = self.swa.part(pages) if self.swa is not None else _NO_PAGES
        self.allocator.free(pages)
        self._record_free(pages, halves, request, note=note)

    def give_back_window(self, pages: Int64Array, request: Request | None, *, note: str) -> int:
        """Return the sliding-window halves of full pages; how many there were."""
        if self.swa is None:
            return 0
        parted = self.swa.part(pages)
        self._record_free(_NO_PAGES, parted, request, note=note)
        return int(parted.size)

    def halves(self, pages: Int64Array) -> Int64Array:
        """Return the sliding-window pages that full pages lead to, those that have one."""
        if self.swa is None or not pages.size:
            return _NO_PAGES
        paired = self.swa.paired(pages)
        return paired[paired > 0]

    def extend(self, request: Request, upto: int, *, windowless: int = 0) -> bool:
        """Give a request slots up to position `upto`, excluded; False if the pool has none left.

        Of the pages that this takes, the first `windowless` get no sliding-window half.
        """
        have = self.pages_for(request.allocated_len)
        start, size = request.allocated_len, self.page_size
        if upto <= start:
            return True
        missing = self.pages_for(upto) - have
        pages = self.alloc(missing, request, windowless=windowless) if missing else _NO_PAGES
        if pages is None:
            return False
        row = self.req_to_token[request.row]
        if start % size:  # the last page has room left: its slots go on from the last one
            end = min(upto, have * size)
            row[start:end] = row[start - 1] + 1 + np.arange(end - start)
        if pages.size == 1:
            row[have * size : upto] = pages[0] * size + self._offsets[: upto - have * size]
        elif pages.size:
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
            gone = self.give_back_window(self.row_pages(request.row, first, needed), request, note="window")
            self.counters.window_freed_pages += gone
        request.window_start = needed

    def release(self, request: Request, *, note: str) -> None:
        """Take everything from a request that the prefix cache does not hold: its own pages, its locks."""
        own = self.row_pages(request.row, request.shared_pages, self.pages_for(request.allocated_len))
        self.cache.unlock(request)
        self.give_back(own, request, note=note)

    def copy_tail(self, parent: Request, child: Request, *, note: str) -> None:
        """Copy what a fork cannot share, in every pool; whatever has left the window stays behind."""
        first, last = child.shared_pages * self.page_size, parent.cached_len
        src, dst = (self.req_to_token[r.row, first:last].astype(np.int64) for r in (parent, child))
        for pool in self.pools:
            from_slots, to_slots = src, dst
            if pool.index == self.layout.swa_group:
                live = (self.lut[src] > 0) & (self.lut[dst] > 0)
                from_slots, to_slots = self.lut[src[live]], self.lut[dst[live]]
            if from_slots.size:
                pool.copy(from_slots, to_slots)
                self.history.copied(pool.index, from_slots, to_slots, request_id=child.request_id, note=note)
        self.counters.fork_copied_slots += src.size

    def _record_free(self, pages: Int64Array, halves: Int64Array, request: Request | None, *, note: str) -> None:
        request_id, row = (request.request_id, request.row) if request is not None else (-1, -1)
        self.history.record("free", pages, halves=halves, request_id=request_id, row=row, note=note)


FIRST = -1  # the slot before position 0


class Sweeper:
    """Walks the prefix cache and records what it holds, group by group."""

    def __init__(self, recorder: Recorder, memory: KvMemory) -> None:
        self._recorder = recorder
        self._memory = memory

    def sweep(self) -> None:
        """Record every page that the cache holds in the pool; also if there is none, so that the walk shows."""
        memory, layout = self._memory, self._memory.layout
        nodes = [node for node in memory.cache.tree.walk() if node.page != NO_PAGE]
        slots, prev_slots, positions = self.entries(nodes)
        locked = self._each([node.lock > 0 for node in nodes])
        target: list[tuple[int, Int64Array, Int64Array, Int64Array]] = []
        if layout.full_group >= 0:
            target.append((layout.full_group, slots, prev_slots, locked))
        if layout.swa_group >= 0:
            before = np.where(prev_slots == FIRST, FIRST, memory.lut[np.maximum(prev_slots, 0)])
            in_window = self._each([node.window_lock > 0 for node in nodes])
            target.append((layout.swa_group, memory.lut[slots], before, in_window))
        self._record(target, positions, runner=TARGET)
        if layout.draft_group >= 0:
            self._record([(layout.draft_group, slots, prev_slots, locked)], positions, runner=DRAFT)
        memory.counters.sweeps += 1
        memory.counters.swept_slots += slots.size

    def entries(self, nodes: list[Node]) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return `(slots, previous slots, positions)` of nodes' pages, slots of the full pool."""
        size, offsets = self._memory.page_size, np.arange(self._memory.page_size, dtype=np.int64)
        pages = np.array([(node.page, node.parent.page, node.depth) for node in nodes if node.parent], np.int64)
        page, parent, depth = pages.reshape(-1, 3).T
        slots = (page[:, None] * size + offsets).reshape(-1)
        positions = ((depth - 1)[:, None] * size + offsets).reshape(-1)
        before = slots - 1
        before[::size] = np.where(depth == 1, FIRST, (parent + 1) * size - 1)
        return slots, before, positions

    def _each(self, of_pages: list[bool]) -> Int64Array:
        return np.repeat(np.array(of_pages, np.int64), self._memory.page_size)

    def _record(
        self, parts: list[tuple[int, Int64Array, Int64Array, Int64Array]], positions: Int64Array, *, runner: int
    ) -> None:
        groups = [np.full(slots.size, group, np.int64) for group, slots, _, _ in parts]
        self._recorder.sweep(
            groups=np.concatenate(groups),
            slots=np.concatenate([slots for _, slots, _, _ in parts]),
            positions=np.tile(positions, len(parts)),
            prev_slots=np.concatenate([before for _, _, before, _ in parts]),
            locked=np.concatenate([locked for _, _, _, locked in parts]),
            runner=runner,
        )
