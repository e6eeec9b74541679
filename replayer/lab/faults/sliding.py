"""The full-to-SWA table: entries that outlive their slot, halves that go too early; a window that is read otherwise."""

from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.pools import SlidingWindowPool
from ..fault import Bench, around, fault, unchecked_pools

_SLIDING: Final = ("swa", "swa_page1", "dsv4", "eagle_swa")


@fault(reference="S#27586 S#25805", configs=_SLIDING)
def stale_swa_mapping(bench: Bench) -> None:
    """A recycled slot keeps its old full-to-SWA entry; freeing it frees a live slot."""
    swa = _swa(bench)
    unchecked_pools(bench.engine)
    stale: set[int] = set()

    def fresh(full_pages: Any) -> Any:
        return np.array([page not in stale for page in full_pages.tolist()], np.bool_)

    @around(swa)
    def unpair(original: Any, full_pages: Any) -> None:
        if bench.due and full_pages.size:
            page = int(full_pages[-1])
            stale.add(page)
            bench.inject(slot=page * bench.engine.config.page_size)
        original(full_pages[fresh(full_pages)])

    @around(swa)
    def pair(original: Any, full_pages: Any, swa_pages: Any) -> None:
        original(full_pages[fresh(full_pages)], swa_pages[fresh(full_pages)])


@fault(reference="lab", configs=_SLIDING)
def swa_window_off_by_one(bench: Bench) -> None:
    """A sliding-window slot is given back one token before it leaves the window."""
    swa = _swa(bench)

    @around(swa)
    def first_needed_page(original: Any, prefix: int) -> int:
        right, early = int(original(prefix)), int(original(prefix + 1))
        if bench.started and early != right:
            bench.inject(position=prefix - swa.window)
            return early
        return right


@fault(reference="lab", configs=("told_reads",))
def window_read_wrong(bench: Bench) -> None:
    """A decode reads two positions too few of its sliding window, or one too many."""
    engine = bench.engine
    shift = (2, -1)[int(bench.random.integers(2))]  # one less looks like a window recorded without its predecessor
    window = max(pool.group.window for pool in engine.memory.pools)
    victims = bench.attention_victim(
        ("decode",), behind=window + 2, labels=lambda prefix: {"position": prefix - window, "shift": shift}
    )

    @around(engine.runner.attention)
    def first_read(original: Any, prefix_lens: Any, of_window: int) -> Any:
        starts = original(prefix_lens, of_window)
        return starts + np.where(np.isin(np.arange(starts.size), victims), shift, 0)


def _swa(bench: Bench) -> SlidingWindowPool:
    if bench.engine.memory.swa is None:
        raise ValueError(f"{bench.fault} needs an engine with sliding-window layers")
    return bench.engine.memory.swa
