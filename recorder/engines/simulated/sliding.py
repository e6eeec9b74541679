"""The sliding-window pool: pages of its own, reached from full slots through the full-to-SWA table."""

import numpy as np
import numpy.typing as npt

from .allocator import PageAllocator
from .config import EngineConfig

Int64Array = npt.NDArray[np.int64]


class SlidingWindowPool:
    """Keeps the pairing of full pages with sliding-window pages; `lut` `[full slots] int64`, 0 where there is none."""

    def __init__(self, config: EngineConfig, lut: Int64Array) -> None:
        self.window = config.window
        self.lut = lut
        self.pages = PageAllocator(
            config.swa_pages, free_order=config.free_order, name="sliding-window", seed=config.seed
        )
        self._page_size = config.page_size
        self._by_page = lut.reshape(-1, config.page_size)
        self._offsets = np.arange(config.page_size, dtype=np.int64)

    def pair(self, full_pages: Int64Array, swa_pages: Int64Array) -> None:
        """Let full pages lead to sliding-window pages, slot by slot."""
        self._by_page[full_pages] = swa_pages[:, None] * self._page_size + self._offsets

    def paired(self, full_pages: Int64Array) -> Int64Array:
        """Return the sliding-window page of each full page, 0 where there is none."""
        return self._by_page[full_pages, 0] // self._page_size

    def part(self, full_pages: Int64Array) -> Int64Array:
        """Give back the sliding-window halves of full pages, those that still have one, and return them."""
        swa_pages = self.paired(full_pages)
        held = swa_pages > 0
        self.unpair(full_pages[held])
        self.pages.free(swa_pages[held])
        return swa_pages[held]

    def unpair(self, full_pages: Int64Array) -> None:
        """Let full pages lead nowhere: a stale entry would point into another request's page."""
        self._by_page[full_pages] = 0

    def move(self, full_page: int, to: int) -> None:
        """Hand the sliding-window half of one full page to another."""
        self._by_page[to] = self._by_page[full_page]
        self._by_page[full_page] = 0

    def first_needed_page(self, prefix: int) -> int:
        """Return the first page that a forward with this prefix still reads."""
        return max(0, prefix - self.window) // self._page_size
