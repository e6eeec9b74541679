"""The paged allocator: a free list of pages, page 0 never among them."""

from collections import deque

import numpy as np
import numpy.typing as npt

from .errors import BrokenEngineError

Int64Array = npt.NDArray[np.int64]


class PageAllocator:
    """Hands out pages 1 .. num_pages.

    A clean engine never gives back what it does not hold; `check_free` says so, where a real allocator would append
    the page to its free list and hand it out twice.
    """

    def __init__(self, num_pages: int, *, free_order: str = "lifo", name: str = "full", seed: int = 0) -> None:
        self.num_pages = num_pages
        self.name = name
        self._fifo = free_order == "fifo"
        order = np.arange(1, num_pages + 1) if self._fifo else np.arange(num_pages, 0, -1)
        if free_order == "shuffled":
            np.random.default_rng([seed, 0xA110]).shuffle(order)
        self._free: deque[int] = deque(order.tolist())
        self._held = np.zeros(num_pages + 1, np.bool_)

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out."""
        return len(self._free)

    def alloc(self, count: int) -> Int64Array | None:
        """Return `count` pages, or None where there are not as many."""
        if count > len(self._free):
            return None
        take = self._free.popleft if self._fifo else self._free.pop
        if count == 1:  # by far the most frequent: a decode's next page
            page = take()
            self._held[page] = True
            return np.array([page], np.int64)
        pages = np.array([take() for _ in range(count)], np.int64)
        self._held[pages] = True
        return pages

    def free(self, pages: Int64Array) -> None:
        """Take pages back."""
        if not pages.size:
            return
        self.check_free(pages)
        self._held[pages] = False
        self._free.extend(pages.tolist())

    def check_free(self, pages: Int64Array) -> None:
        """Raise `BrokenEngineError` where a page is given back that is not held, or twice at once."""
        if not self._held[pages].all() or (pages.size > 1 and np.unique(pages).size != pages.size):
            raise BrokenEngineError(f"the {self.name} pool: pages {pages.tolist()} are freed, not all of them are held")

    def held_pages(self) -> Int64Array:
        """Return the pages that are handed out, ascending."""
        return np.flatnonzero(self._held).astype(np.int64)
