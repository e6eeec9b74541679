"""Padding tokens that are written where somebody's KV is."""

from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.batch import Batch
from ..fault import Bench, Fault, around


def pad_slot_wraps(bench: Bench) -> None:
    """From the moment on, write padding to slot -1, which wraps to the pool's last slot.

    A forward that writes the last slot itself is spared: its bytes are recorded when both have been written, and which
    of them was right nobody can tell.
    """
    memory = bench.engine.memory
    last = memory.pools[0].group.num_slots - 1

    def build(original: Any, *args: Any, **kwargs: Any) -> Batch:
        batch: Batch = original(*args, **kwargs)
        real, held = batch.num_tokens, memory.allocator.held_pages()
        # Before anybody holds the last page nothing comes of it.
        in_use = bool(held.size) and int(held[-1]) == last // memory.page_size
        if bench.started and real < batch.slots.size and in_use and last not in batch.slots[:real]:
            bench.inject(slot=last)
            batch.slots[real:] = -1
        return batch

    around(bench.engine.builder, "build", build)


def pad_rows_keep_last_blocks(bench: Bench) -> None:
    """From the moment on, let padded rows keep the slots that these rows of the graph's buffer had a step before."""
    engine = bench.engine
    buffer = np.zeros(4096, np.int64)

    def build(original: Any, mode: str, requests: Any, **kwargs: Any) -> Batch:
        batch: Batch = original(mode, requests, **kwargs)
        if not kwargs.get("padded") or kwargs.get("runner", 0) != 0:
            return batch
        real, total = batch.num_tokens, batch.slots.size
        if bench.started and total > real and buffer[real:total].any():
            bench.inject(slot=int(buffer[real:total].max()))
            batch.slots[real:] = buffer[real:total]
        buffer[:total] = batch.slots
        return batch

    around(engine.builder, "build", build)


FAULTS: Final = (
    Fault(
        name="pad_slot_wraps",
        summary="the padding slot -1 wraps to the pool's last slot",
        reference="V#43810",
        configs=("tight", "mha", "mla"),
        arm=pad_slot_wraps,
    ),
    Fault(
        name="pad_rows_keep_last_blocks",
        summary="padded rows keep the slots of the step before",
        reference="lmdeploy#4569",
        configs=("mha", "mha_page1", "mla", "no_cache", "tight", "swa", "eagle"),
        arm=pad_rows_keep_last_blocks,
    ),
)
