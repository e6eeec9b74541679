"""What attention gets is not what the block table and the batch say; both stay whole."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.batch import Batch
from ....recorder.engines.simulated.pools import TARGET
from ..fault import Bench, around, fault

_ALL: Final = ("mha", "mha_page1", "mha_page16", "mla", "mixed", "no_cache", "tight", "swa", "eagle", "overlap")

# Whether a forward's request can be the victim.
Fits = Callable[[Batch, int], bool]


def _in_a_forward(bench: Bench, fits: Fits, note: Callable[[Batch, int], dict[str, Any]]) -> list[int]:
    """Return a list that holds the victim's place in the batch while the one forward runs that is to be broken."""
    victims: list[int] = []

    def run(original: Any, batch: Batch, *args: Any, **kwargs: Any) -> None:
        if bench.due and batch.runner == TARGET:
            found = [index for index in range(len(batch.requests)) if fits(batch, index)]
            if found:
                victims.append(bench.pick(found))
                request = batch.requests[victims[0]]
                bench.inject(request=request, **note(batch, victims[0]))
                bench.note_effect("attention", request=request)
        original(batch, *args, **kwargs)
        victims.clear()

    around(bench.engine.runner, "run", run)
    return victims


@fault(reference="TensorRT-LLM#15546", configs=tuple(name for name in _ALL if name != "eagle"))
def attention_table_overwritten(bench: Bench) -> None:
    """Attention's own copy of the block table is overwritten in flight."""
    memory = bench.engine.memory
    victims = _in_a_forward(
        bench,
        lambda batch, index: bool(batch.mode == "decode" and batch.prefix_lens[index] > 1),
        lambda batch, index: {"position": int(batch.prefix_lens[index]) - 1},
    )

    def reads(original: Any, batch: Batch, seq_lens: Any) -> Any:
        found = original(batch, seq_lens)
        if not victims:
            return found
        broken = []
        for pool, read in zip(memory.pools, found, strict=True):
            if read is not None:
                at = int(read.counts[: victims[0]].sum() + batch.prefix_lens[victims[0]] - 1 - read.starts[victims[0]])
                slots = read.slots.copy()
                slots[at] = slots[at] % (pool.group.num_slots - 1) + 1  # the next one; slot 0 is nobody's
                read = replace(read, slots=slots)  # the broken one in its place
            broken.append(read)
        return tuple(broken)

    around(bench.engine.runner.attention, "reads", reads)


@fault(reference="V#46460", configs=_ALL)
def attention_prefix_lost(bench: Bench) -> None:
    """Attention leaves out a request's cached prefix."""
    victims = _in_a_forward(
        bench,
        lambda batch, index: bool(batch.mode in ("extend", "mixed") and batch.prefix_lens[index] > 1),
        lambda batch, index: {"position": 0, "prefix": int(batch.prefix_lens[index])},
    )

    def seq_lens(original: Any, batch: Batch) -> Any:
        lens = original(batch)
        if victims:
            lens = lens.copy()
            lens[victims[0]] = batch.extend_lens[victims[0]]
        return lens

    around(bench.engine.runner.attention, "seq_lens", seq_lens)


@fault(reference="lab", configs=tuple(name for name in _ALL if name != "eagle"))
def attention_seq_len_off_by_one(bench: Bench) -> None:
    """A decode attends to one token too few or too many."""
    off = (-1, 1)[int(bench.random.integers(2))]
    victims = _in_a_forward(
        bench,
        lambda batch, index: bool(batch.mode == "decode" and batch.prefix_lens[index] > 1),
        lambda batch, index: {"position": int(batch.prefix_lens[index]) + min(off, 0), "off": off},
    )

    def seq_lens(original: Any, batch: Batch) -> Any:
        lens = original(batch)
        if victims:
            lens = lens + np.where(np.arange(lens.size) == victims[0], off, 0)
        return lens

    around(bench.engine.runner.attention, "seq_lens", seq_lens)
