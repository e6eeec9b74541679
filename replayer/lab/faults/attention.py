"""What attention gets is not what the block table and the batch say; both stay whole."""

from dataclasses import replace
from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.batch import Batch
from ..fault import Bench, around, fault

_ALL: Final = ("mha", "mha_page1", "mha_page16", "mla", "mixed", "no_cache", "tight", "swa", "eagle", "overlap")
_DECODING: Final = tuple(name for name in _ALL if name != "eagle")


@fault(reference="TensorRT-LLM#15546", configs=_DECODING)
def attention_table_overwritten(bench: Bench) -> None:
    """Attention's own copy of the block table is overwritten in flight."""
    pools = bench.engine.memory.pools
    victims = bench.attention_victim(("decode",), behind=1, labels=lambda prefix: {"position": prefix - 1})

    @around(bench.engine.runner.attention)
    def reads(original: Any, batch: Batch, seq_lens: Any) -> Any:
        found = list(original(batch, seq_lens))
        for victim in victims:
            for number, read in enumerate(found):
                if read is not None:
                    at = int(read.counts[:victim].sum() + batch.prefix_lens[victim] - 1 - read.starts[victim])
                    slots = read.slots.copy()
                    # The next one; slot 0 is nobody's.
                    slots[at] = slots[at] % (pools[number].group.num_slots - 1) + 1
                    found[number] = replace(read, slots=slots)
        return tuple(found)


@fault(reference="V#46460", configs=_ALL)
def attention_prefix_lost(bench: Bench) -> None:
    """Attention leaves out a request's cached prefix."""
    victims = bench.attention_victim(
        ("extend", "mixed"), behind=1, labels=lambda prefix: {"position": 0, "prefix": prefix}
    )

    @around(bench.engine.runner.attention)
    def seq_lens(original: Any, batch: Batch) -> Any:
        lens = original(batch).copy()
        lens[victims] = batch.extend_lens[victims]
        return lens


@fault(reference="lab", configs=_DECODING)
def attention_seq_len_off_by_one(bench: Bench) -> None:
    """A decode attends to one token too few or too many."""
    off = (-1, 1)[int(bench.random.integers(2))]
    victims = bench.attention_victim(
        ("decode",), behind=1, labels=lambda prefix: {"position": prefix + min(off, 0), "off": off}
    )

    @around(bench.engine.runner.attention)
    def seq_lens(original: Any, batch: Batch) -> Any:
        lens = original(batch)
        return lens + np.where(np.isin(np.arange(lens.size), victims), off, 0)
