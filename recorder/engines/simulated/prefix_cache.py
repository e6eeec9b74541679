"""The prefix cache: hits, insertions with de-duplication, locks, evictions from both pools, host tier."""

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.ops.end_hash.reference import end_hashes
from ...capture.host_arrays import CopyEnds
from .pools import NO_PAGES, PageAllocator
from .radix import NO_PAGE, Inserted, Node, RadixTree, UseQueue, window_prefix
from .requests import Request

if TYPE_CHECKING:
    from .memory import KvMemory


class HostTier:
    """Takes in evicted pages, drops those used longest ago when it is full; page 0 stays empty as in the pool."""

    def __init__(self, memory: "KvMemory") -> None:
        self.pages = PageAllocator(memory.config.host_pages, name="host")
        self._memory = memory
        self._pools = [memory.pools[group] for group in memory.layout.full_groups]
        self._queue = UseQueue(lambda node: node.host_page != NO_PAGE and not node.children and node.parent is not None)

    def offload(self, node: Node) -> bool:
        """Copy a node's page to the host tier; the node stays in the tree. False if there is no room."""
        if not self.pages.free_pages and (oldest := self._queue.pop()) is not None:
            self._drop(oldest)
        taken = self.pages.alloc(1)
        if taken is None:
            return False
        node.host_page = int(taken[0])
        for pool in self._pools:
            pool.to_host(self._slots(node.page), self._slots(node.host_page))
        self._memory.history.moved(node.page, node.host_page, self._ends(node.page, node.host_page), to_host=True)
        self._memory.counters.offloaded_pages += 1
        self._queue.offer(node)
        return True

    def load(self, node: Node, page: int) -> None:
        """Copy a node's host page into a page of the pool, which becomes the node's."""
        before = [ends.src for ends in self._ends(page, node.host_page)]
        for pool in self._pools:
            pool.from_host(self._slots(node.host_page), self._slots(page))
        after = self._ends(page, node.host_page)
        ends = [CopyEnds(e.dst, e.src, was, e.landed) for e, was in zip(after, before, strict=True)]
        self._memory.history.moved(page, node.host_page, ends, to_host=False)
        self._memory.counters.loaded_pages += 1
        self.leave(node)
        node.page = page
        if node.parent is not None:
            node.parent.live_children += 1

    def leave(self, node: Node) -> None:
        """Give up a node's host page."""
        if node.host_page != NO_PAGE:
            self.pages.free(np.array([node.host_page], np.int64))
            node.host_page = NO_PAGE

    def drop_below(self, node: Node) -> None:
        """Drop everything below a node that leaves the tree; it is all in the host tier."""
        for child in list(node.children.values()):
            self.drop_below(child)
            self._drop(child)

    def _drop(self, node: Node) -> None:
        self.leave(node)
        parent = node.parent
        self._memory.cache.tree.drop(node)
        self._memory.counters.host_dropped_pages += 1
        if parent is not None:
            self._queue.offer(parent)

    def _ends(self, page: int, host_page: int) -> list[CopyEnds]:
        """Return what lies in a page and in one of the host tier, of each pool, as the ends of a copy to the host."""
        found = []
        for pool in self._pools:
            sides = (pool.arrays, self._slots(page)), (pool.host_arrays, self._slots(host_page))
            here, there = (
                end_hashes([words[slots].view(np.uint8).reshape(1, -1) for words in arrays]) for arrays, slots in sides
            )
            found.append(CopyEnds(here, there, np.zeros(1, np.int64), np.full(1, -1, np.int64)))
        return found

    def _slots(self, page: int) -> Int64Array:
        return self._memory.page_slots(np.array([page]))


class PrefixCache:
    """Moves pages between requests and the tree; the tree itself touches no pool."""

    def __init__(self, memory: "KvMemory") -> None:
        self._memory = memory
        self._config = memory.config
        # A draft's input at position p is the token of p + 1, so a page's content depends on the token behind it.
        self.tree = RadixTree(page_size=memory.page_size, lookahead=int(memory.config.eagle))

    def attach(self, request: Request) -> None:
        """Let a request that just got its row start from the longest cached prefix; one token is left to compute.
        `record_attached` records it, once it is sure that the request stays.
        """
        if not self._config.prefix_cache:
            return
        memory = self._memory
        most = (request.num_tokens - 1) // memory.page_size
        path = self.tree.match(request.known_tokens, most, self.space(request))
        if memory.swa is not None:
            path = path[: window_prefix(path, page_size=memory.page_size, window=memory.swa.window)]
        path = self._load_back(path)
        if memory.states is not None:
            path = memory.states.cut(path)
        if not path:
            return
        self.tree.lock(path[-1])
        request.node, request.shared_pages = path[-1], path[-1].depth
        pages = _pages(path)
        memory.req_to_token[request.row, : pages.size * memory.page_size] = memory.page_slots(pages)
        request.cached_len = request.allocated_len = pages.size * memory.page_size
        if memory.swa is not None:
            request.window_start = memory.swa.first_needed_page(request.cached_len)
        self._lock_window(request, path)
        if memory.states is not None:
            memory.states.restore(request.row, path[-1])

    def space(self, request: Request) -> str:
        """Return what a request's KV depends on beside its tokens; none of another space is its own."""
        return request.spec.adapter

    def record_attached(self, request: Request) -> None:
        """Record which pages of the tree a request begins with, and which of their sliding-window halves it reads."""
        if request.shared_pages:
            memory = self._memory
            pages = memory.row_pages(request.row, 0, request.shared_pages)
            halves = memory.halves(_pages(request.window_nodes))
            memory.history.record("alloc", pages, halves=halves, request=request, status="shared")
            memory.counters.cache_hits += 1
            memory.counters.cache_hit_tokens += request.cached_len

    def insert(self, request: Request, *, stays: bool = True) -> None:
        """Hand the whole pages that a request has computed to the tree, and let the request stand on them. Where the
        tree has a prefix already, in other pages, the request's row is moved to those and its own are freed. `stays`
        says that the request goes on from them.
        """
        if not self._config.prefix_cache:
            return
        memory = self._memory
        count = min(self.tree.whole_pages(request.num_tokens), request.cached_len // memory.page_size)
        if count <= request.shared_pages:
            return
        fresh = request.shared_pages
        pages = memory.row_pages(request.row, fresh, count)
        space = self.space(request)
        done = self.tree.insert(request.known_tokens, pages.tolist(), below=request.node, space=space)
        handed = done.new + done.taken
        for node in done.taken:
            memory.host.leave(node)
        handed_pages = _pages(handed)
        if memory.swa is not None:
            for node, half in zip(handed, memory.swa.paired(handed_pages).tolist(), strict=True):
                node.windowed = half > 0
        halves = memory.halves(handed_pages)
        memory.history.record("alloc", handed_pages, halves=halves, request=request, status="cached")
        memory.counters.inserted_pages += len(done.new)
        self.tree.lock(done.nodes[-1], below=request.node)
        duplicates = self._deduplicate(request, done)
        request.node, request.shared_pages = done.nodes[-1], done.nodes[-1].depth
        self._lock_window(request, done.nodes)
        if memory.states is not None and request.cached_len == count * memory.page_size:
            memory.states.save(request.row, done.nodes[-1])
        if stays:
            read = [node for node in request.window_nodes if node.depth > fresh]
            halves = memory.halves(_pages(read))
            memory.history.record("alloc", _pages(done.nodes), halves=halves, request=request, status="shared")
        memory.give_back(duplicates, request, note="duplicate")
        for node in done.nodes:  # those that came with a sliding-window half, or were moved one
            self.tree.windows.offer(node)

    def unlock(self, request: Request) -> None:
        """Let go of what a request stands on."""
        self.unlock_window(request, upto=1 << 62)
        self.tree.unlock(request.node)
        request.node = None

    def unlock_window(self, request: Request, *, upto: int) -> None:
        """Let go of the sliding-window halves of the request's shared pages before page `upto`."""
        done = 0
        for node in request.window_nodes:
            if node.depth - 1 >= upto:
                break
            node.window_lock -= 1
            self.tree.windows.offer(node)
            done += 1
        del request.window_nodes[:done]

    def make_room(self, count: int, *, halves: int | None = None) -> bool:
        """Evict until the full pool has `count` free pages, the sliding-window pool `halves` (None: as many); whether so."""
        memory = self._memory
        halves = count if halves is None else halves
        while (missing := count - memory.allocator.free_pages) > 0:
            if not self.evict(islice(iter(self.tree.leaves.pop, None), missing)):
                return False
        while memory.swa is not None and (missing := halves - memory.swa.pages.free_pages) > 0:
            if not self.evict_window(islice(iter(self.tree.windows.pop, None), missing)):
                return False
        return True

    def evict(self, leaves: Iterable[Node]) -> int:
        """Drop leaves' pages from the pool, and return how many; the host tier may keep their content. `leaves` is gone
        through once: where one has been dropped, its parent may be the next.
        """
        memory, has_host = self._memory, self._config.host_pages > 0
        dropped, halved = [], []
        for node in leaves:
            dropped.append(node.page)
            if node.windowed:
                halved.append(node.page)
                node.windowed = False
            if has_host and memory.host.offload(node):
                self.tree.leave_pool(node)
            else:
                if node.children:
                    memory.host.drop_below(node)
                self.tree.drop(node)
        halves, pages = self._part(halved), np.array(dropped, np.int64)
        memory.allocator.free(pages)
        memory.history.record("evict", pages, halves=halves)
        memory.counters.evicted_pages += pages.size
        return pages.size

    def evict_window(self, nodes: Iterable[Node]) -> int:
        """Drop the sliding-window halves of nodes' pages, and return how many; the full halves stay."""
        pages = []
        for node in nodes:
            node.windowed = False
            pages.append(node.page)
        self._memory.history.record("evict", NO_PAGES, halves=self._part(pages), note="window")
        return len(pages)

    def _part(self, pages: list[int]) -> Int64Array:
        parted = self._memory.part(np.array(pages, np.int64))
        self._memory.counters.window_evicted_pages += parted.size
        return parted

    def _deduplicate(self, request: Request, done: Inserted) -> Int64Array:
        """Move the request's row to the tree's pages where the tree had them, and return the request's own."""
        memory, size = self._memory, self._memory.page_size
        pages = np.array([page for _, page in done.duplicates], np.int64)
        halves = memory.swa.paired(pages).tolist() if memory.swa is not None else [0] * pages.size
        moved = []
        for (index, page), half in zip(done.duplicates, halves, strict=True):
            node = done.nodes[index - request.shared_pages]
            if memory.swa is not None and half and not node.windowed:
                # The tree's page has lost its sliding-window half, the request's has one: it moves over.
                memory.swa.move(page, node.page)
                node.windowed = True
                moved.append(half)
            begin = node.page * size
            memory.req_to_token[request.row, index * size : (index + 1) * size] = range(begin, begin + size)
        memory.history.record("alloc", NO_PAGES, halves=np.array(moved, np.int64), request=request, status="cached")
        memory.counters.window_remapped_pages += len(moved)
        memory.counters.deduplicated_pages += pages.size
        return pages

    def _lock_window(self, request: Request, path: list[Node]) -> None:
        """Hold the sliding-window halves on a path that the request's next forward reads, and let go of those before."""
        memory = self._memory
        if memory.swa is None:
            return
        needed = memory.swa.first_needed_page(request.cached_len)
        nodes = path[max(0, needed - path[0].depth + 1) :]
        for node in nodes:
            node.window_lock += 1
        self.unlock_window(request, upto=needed)
        request.window_nodes += nodes

    def _load_back(self, path: list[Node]) -> list[Node]:
        """Bring the host pages of a path into the pool, as many as there is room for, and return what is in the pool."""
        memory = self._memory
        here = [node for node in path if node.page != NO_PAGE]
        away = path[len(here) :]
        if not away:
            return here
        stand = here[-1] if here else None
        self.tree.lock(stand)
        pages = memory.alloc(len(away), None)
        if pages is not None:
            # Making room may have pushed some of them out of the host tier.
            still = [node for node in away if node.parent is not None and node.host_page != NO_PAGE]
            for node, page in zip(still, pages.tolist(), strict=False):
                memory.host.load(node, page)
            memory.give_back(pages[len(still) :], None, note="load-back")
            here += still
        self.tree.unlock(stand)
        return here


def _pages(nodes: list[Node]) -> Int64Array:
    return np.array([node.page for node in nodes], np.int64)
