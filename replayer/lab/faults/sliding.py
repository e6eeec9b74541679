"""The full-to-SWA table: entries that outlive their slot, halves that go too early; a window that is read otherwise."""

from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.batch import Batch
from ....recorder.engines.simulated.pools import TARGET
from ..fault import Bench, around, fault, unchecked_pools

_SLIDING: Final = ("swa", "swa_page1", "dsv4", "eagle_swa")


@fault(reference="S#27586 S#25805", configs=_SLIDING)
def stale_swa_mapping(bench: Bench) -> None:
    """A recycled slot keeps its old full-to-SWA entry; freeing it frees a live slot."""
    swa = bench.engine.memory.swa
    if swa is None:
        raise ValueError("stale_swa_mapping needs an engine with sliding-window layers")
    unchecked_pools(bench.engine)
    stale: set[int] = set()

    def unpair(original: Any, full_pages: Any) -> None:
        if bench.due and full_pages.size:
            page = int(full_pages[-1])
            stale.add(page)
            bench.inject(slot=page * bench.engine.config.page_size)
        original(full_pages[[int(page) not in stale for page in full_pages]])

    def pair(original: Any, full_pages: Any, swa_pages: Any) -> None:
        fresh = np.array([int(page) not in stale for page in full_pages], np.bool_)
        original(full_pages[fresh], swa_pages[fresh])

    around(swa, "unpair", unpair)
    around(swa, "pair", pair)


@fault(reference="lab", configs=_SLIDING)
def swa_window_off_by_one(bench: Bench) -> None:
    """A sliding-window slot is given back one token before it leaves the window."""
    swa = bench.engine.memory.swa
    if swa is None:
        raise ValueError("swa_window_off_by_one needs an engine with sliding-window layers")

    def first_needed_page(original: Any, prefix: int) -> int:
        right, early = int(original(prefix)), int(original(prefix + 1))
        if bench.started and early != right:
            bench.inject(position=prefix - swa.window)
            return early
        return right

    around(swa, "first_needed_page", first_needed_page)


@fault(reference="lab", configs=("told_reads",))
def window_read_wrong(bench: Bench) -> None:
    """A decode reads two positions too few of its sliding window, or one too many."""
    engine = bench.engine
    shift = (2, -1)[int(bench.random.integers(2))]  # one less looks like a window recorded without its predecessor
    window = max(pool.group.window for pool in engine.memory.pools)
    victims: list[int] = []

    def run(original: Any, batch: Batch, *args: Any, **kwargs: Any) -> None:
        if bench.due and batch.runner == TARGET and batch.mode == "decode":
            found = [i for i in range(len(batch.requests)) if batch.prefix_lens[i] > window + 2]
            if found:
                victims.append(bench.pick(found))
                request = batch.requests[victims[0]]
                bench.inject(request=request, position=int(batch.prefix_lens[victims[0]]) - window, shift=shift)
                bench.note_effect("attention", request=request)
        original(batch, *args, **kwargs)
        victims.clear()

    def first_read(original: Any, prefix_lens: Any, of_window: int) -> Any:
        starts = original(prefix_lens, of_window)
        return starts + np.where(np.isin(np.arange(starts.size), victims), shift, 0)

    around(engine.runner, "run", run)
    around(engine.runner.attention, "first_read", first_read)
