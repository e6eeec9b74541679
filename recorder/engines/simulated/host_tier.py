"""The host tier of the prefix cache: pages that left the pool and can be loaded back."""

import heapq

import numpy as np
import numpy.typing as npt

from .allocator import PageAllocator
from .counters import Counters
from .history import History
from .pools import KvPool
from .radix import NO_PAGE, Node, RadixTree

Int64Array = npt.NDArray[np.int64]


class HostTier:
    """Takes in evicted pages, drops those used longest ago when it is full; page 0 stays empty as in the pool."""

    def __init__(
        self,
        num_pages: int,
        *,
        page_size: int,
        tree: RadixTree,
        pools: list[KvPool],
        history: History,
        counters: Counters,
    ) -> None:
        self.pages = PageAllocator(num_pages, name="host")
        self._page_size = page_size
        self._tree = tree
        self._pools = pools
        self._history = history
        self._counters = counters
        self._queue: list[tuple[int, int, Node]] = []
        self._entry = 0

    def offload(self, node: Node) -> bool:
        """Copy a node's page to the host tier; the node stays in the tree. False where there is no room."""
        if not self.pages.num_pages or (not self.pages.free_pages and not self._drop_one()):
            return False
        taken = self.pages.alloc(1)
        if taken is None:
            return False
        node.host_page = int(taken[0])
        for pool in self._pools:
            pool.to_host(self._slots(node.page), self._slots(node.host_page))
        self._history.moved(node.page, node.host_page, to_host=True)
        self._counters.offloaded_pages += 1
        self._offer(node)
        return True

    def load(self, node: Node, page: int) -> None:
        """Copy a node's host page into a page of the pool, which becomes the node's."""
        for pool in self._pools:
            pool.from_host(self._slots(node.host_page), self._slots(page))
        self._history.moved(page, node.host_page, to_host=False)
        self._counters.loaded_pages += 1
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

    def _drop_one(self) -> bool:
        while self._queue:
            used, _, node = heapq.heappop(self._queue)
            if node.host_page == NO_PAGE or node.children or node.parent is None:
                continue
            if used != node.last_used:
                self._offer(node)
                continue
            self._drop(node)
            return True
        return False

    def _drop(self, node: Node) -> None:
        self.leave(node)
        parent = node.parent
        self._tree.drop(node)
        self._counters.host_dropped_pages += 1
        if parent is not None and parent.host_page != NO_PAGE and not parent.children:
            self._offer(parent)

    def _offer(self, node: Node) -> None:
        if len(self._queue) > 4 * self.pages.num_pages + 64:  # mostly entries of nodes that have come back since
            self._queue = [entry for entry in self._queue if entry[2].host_page != NO_PAGE]
            heapq.heapify(self._queue)
        self._entry += 1
        heapq.heappush(self._queue, (node.last_used, self._entry, node))

    def _slots(self, page: int) -> Int64Array:
        return np.arange(page * self._page_size, (page + 1) * self._page_size, dtype=np.int64)
