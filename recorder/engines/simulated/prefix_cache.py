"""The prefix cache at work: hits, insertions with de-duplication, locks, evictions from both pools."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .radix import NO_PAGE, Inserted, Node, RadixTree, window_prefix
from .requests import Request

if TYPE_CHECKING:
    from .memory import KvMemory


class PrefixCache:
    """Moves pages between requests and the tree; the tree itself touches no pool."""

    def __init__(self, memory: "KvMemory") -> None:
        self._memory = memory
        self._config = memory.config
        self.tree = RadixTree(page_size=memory.page_size, lookahead=memory.config.key_lookahead)

    def attach(self, request: Request) -> None:
        """Let a request that just got its row start from the longest cached prefix; one token is left to compute."""
        if not self._config.prefix_cache:
            return
        memory = self._memory
        path = self.tree.match(request.known_tokens, (request.num_tokens - 1) // memory.page_size)
        if memory.swa is not None:
            path = path[: window_prefix(path, page_size=memory.page_size, window=memory.swa.window)]
        path = self._load_back(path)
        if not path:
            return
        self.tree.lock(path[-1])
        self._hold(request, path)
        pages = np.array([node.page for node in path], np.int64)
        memory.req_to_token[request.row, : pages.size * memory.page_size] = memory.page_slots(pages)
        request.cached_len = request.allocated_len = pages.size * memory.page_size
        request.window_start = request.shared_pages
        self._lock_window(request, path)
        memory.counters.cache_hits += 1
        memory.counters.cache_hit_tokens += request.cached_len

    def insert(self, request: Request) -> None:
        """Hand the whole pages that a request has computed to the tree, and let the request stand on them.

        Where the tree has a prefix already, in other pages, the request's row is moved to those and its own are freed.
        """
        if not self._config.prefix_cache:
            return
        memory = self._memory
        count = min(self.tree.whole_pages(request.num_tokens), request.cached_len // memory.page_size)
        if count <= request.shared_pages:
            return
        pages = memory.row_pages(request.row, 0, count)
        done = self.tree.insert(request.known_tokens, pages.tolist())
        for node in done.new + done.taken:
            memory.host.leave(node)
            node.windowed = memory.swa is not None and bool(memory.swa.paired(np.array([node.page]))[0])
        memory.counters.inserted_pages += len(done.new)
        old, fresh = request.node, request.shared_pages
        self.tree.lock(done.nodes[-1])
        self._deduplicate(request, done)
        self._hold(request, done.nodes)
        self.tree.unlock(old)
        self._lock_window(request, done.nodes)
        for node in done.nodes[fresh:]:  # those that came with a sliding-window half, or were moved one
            self.tree.offer_window(node)

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
            self.tree.offer_window(node)
            done += 1
        del request.window_nodes[:done]

    def make_room(self, count: int) -> bool:
        """Evict until both pools have `count` free pages; whether they have."""
        memory = self._memory
        while (missing := count - memory.allocator.free_pages) > 0:
            leaves = self._next(self.tree.next_leaf, missing)
            if not leaves:
                return False
            self.evict(leaves)
        while memory.swa is not None and (missing := count - memory.swa.pages.free_pages) > 0:
            nodes = self._next(self.tree.next_window, missing)
            if not nodes:
                return False
            self.evict_window(nodes)
        return True

    def evict(self, leaves: list[Node]) -> None:
        """Drop leaves' pages from the pool; the host tier may keep their content."""
        memory = self._memory
        pages = np.array([node.page for node in leaves], np.int64)
        self.evict_window([node for node in leaves if node.windowed])
        for node in leaves:
            if memory.host.offload(node):
                self.tree.leave_pool(node)
            else:
                memory.host.drop_below(node)
                self.tree.drop(node)
        memory.allocator.free(pages)
        memory.history.tell("evict", pages)
        memory.counters.evicted_pages += pages.size

    def evict_window(self, nodes: list[Node]) -> None:
        """Drop the sliding-window halves of nodes' pages; the full halves stay."""
        memory = self._memory
        if memory.swa is None or not nodes:
            return
        for node in nodes:
            node.windowed = False
        parted = memory.swa.part(np.array([node.page for node in nodes], np.int64))
        memory.history.tell("evict", parted, swa=True, note="window")
        memory.counters.window_evicted_pages += parted.size

    def _next(self, source: Callable[[], Node | None], count: int) -> list[Node]:
        """Return up to `count` nodes that may go; those of one call do not depend on one another."""
        return list(itertools.islice(iter(source, None), count))

    def _deduplicate(self, request: Request, done: Inserted) -> None:
        memory, size = self._memory, self._memory.page_size
        if not done.duplicates:
            return
        for index, page in done.duplicates:
            node = done.nodes[index]
            if memory.swa is not None and not node.windowed and memory.swa.paired(np.array([page]))[0]:
                # The tree's page has lost its sliding-window half, the request's has one: it moves over.
                memory.swa.move(page, node.page)
                node.windowed = True
                memory.counters.window_remapped_pages += 1
            slots = memory.page_slots(np.array([node.page], np.int64))
            memory.req_to_token[request.row, index * size : (index + 1) * size] = slots
        pages = np.array([page for _, page in done.duplicates], np.int64)
        memory.give_back(pages, request, note="duplicate")
        memory.counters.deduplicated_pages += pages.size

    def _hold(self, request: Request, path: list[Node]) -> None:
        request.node = path[-1]
        request.shared_pages = len(path)

    def _lock_window(self, request: Request, path: list[Node]) -> None:
        """Hold the sliding-window halves that the request's next forward reads, and let go of those held before."""
        memory = self._memory
        if memory.swa is None:
            return
        nodes = path[memory.swa.first_needed_page(request.cached_len) :]
        for node in nodes:
            node.window_lock += 1
        self.unlock_window(request, upto=1 << 62)
        request.window_nodes = nodes

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
