"""Forwards that are built wrongly: a wrong position or prefix, padding written over somebody's KV, an overrun ring of tokens."""

from typing import Any

import numpy as np

from ....recorder.engines.simulated.batch import Batch
from ..fault import Bench, around, fault


@fault(reference="S#25015", configs=("eagle", "eagle_swa"))
def draft_position_plus_one(bench: Bench) -> None:
    """The draft's positions are one too high."""
    builder = bench.engine.builder
    off = [0]

    @around(builder)
    def build(original: Any, mode: str, requests: Any, **kwargs: Any) -> Any:
        off[0] = int(bench.started and mode == "decode" and kwargs.get("runner", 0) == 1)
        if off[0]:
            bench.inject(request=requests[0], position=kwargs["prefix_lens"][0])
        return original(mode, requests, **kwargs)

    around(builder, "positions")(lambda original, *args: original(*args) + off[0])


@fault(reference="lab", configs=("mha", "mha_page1", "mha_page16", "mla", "no_cache", "tight", "swa", "dsv4"))
def seq_len_backwards(bench: Bench) -> None:
    """A decode is built with the prefix length of the step before."""

    @around(bench.engine.builder)
    def build(original: Any, mode: str, requests: Any, *, prefix_lens: Any, **kwargs: Any) -> Any:
        found = [i for i, prefix in enumerate(prefix_lens) if prefix > 1]
        if bench.due and mode == "decode" and kwargs.get("runner", 0) == 0 and found:
            index = bench.pick(found)
            prefix_lens = [prefix - (i == index) for i, prefix in enumerate(prefix_lens)]
            bench.inject(request=requests[index], position=prefix_lens[index])
        return original(mode, requests, prefix_lens=prefix_lens, **kwargs)


@fault(reference="V#43810", configs=("tight", "mha", "mla"))
def pad_slot_wraps(bench: Bench) -> None:
    """The padding slot -1 wraps to the pool's last slot.

    A forward that writes the last slot itself is spared: its bytes are recorded when both have been written, and which
    of them was right nobody knows.
    """
    memory = bench.engine.memory
    last = memory.pools[0].group.num_slots - 1

    @around(bench.engine.builder)
    def build(original: Any, *args: Any, **kwargs: Any) -> Batch:
        batch: Batch = original(*args, **kwargs)
        real, held = batch.num_tokens, memory.allocator.held_pages()
        # Before anybody holds the last page nothing comes of it.
        in_use = bool(held.size) and int(held[-1]) == last // memory.page_size
        if bench.started and real < batch.slots.size and in_use and last not in batch.slots[:real]:
            bench.inject(slot=last)
            batch.slots[real:] = -1
        return batch


@fault(reference="lmdeploy#4569", configs=("mha", "mha_page1", "mla", "no_cache", "tight", "swa", "eagle"))
def pad_rows_keep_last_blocks(bench: Bench) -> None:
    """Padded rows keep the slots of the step before."""
    buffer = np.zeros(4096, np.int64)

    @around(bench.engine.builder)
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


@fault(reference="S#13713", configs=("overlap", "overlap_swa"))
def future_map_overrun(bench: Bench) -> None:
    """The ring of future tokens is overrun: a request is fed another one's token."""

    @bench.between_steps()
    def act() -> bool:
        size = len(bench.engine.scheduler.decoding) - 1
        if size >= 1:
            bench.inject(ring_size=size)
            bench.engine.futures.size = size
        return size >= 1
