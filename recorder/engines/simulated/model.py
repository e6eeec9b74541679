"""The model: no weights, but it reads and writes the KV pools through the block table as a real one does."""

import numpy as np
import numpy.typing as npt

from .attention import AttentionMetadata
from .batch import Batch
from .config import EngineConfig
from .memory import KvMemory
from .pools import KvPool, WordArray, scramble

Int64Array = npt.NDArray[np.int64]

_LOW_BITS = np.uint64(4)


class Model:
    """A slot's content is the content of the slot before it, which is read from the pool, plus a word of the token and
    the position fed. So what the engine mixes up, the model computes on, and equal prefixes have equal content.
    """

    def __init__(self, config: EngineConfig, memory: KvMemory) -> None:
        self._memory = memory
        self._noise = np.random.default_rng([config.seed, 0x4E01]) if config.noise else None

    def run(self, batch: Batch, attention: AttentionMetadata) -> WordArray:
        """Write the KV of each token in every pool of the batch's runner, and return what was computed.

        What came before a token is read from where attention is told that it lies.

        Returns:
            `[T] uint64`, the content word of each token in the runner's first pool.
        """
        words = scramble((batch.input_ids.view(np.uint64) << np.uint64(32)) ^ batch.positions.view(np.uint64))
        computed: WordArray | None = None
        for pool in self._memory.pools:
            if pool.group.runner == batch.runner:
                content = self._content(pool, batch, attention, words)
                pool.write(self.pool_slots(pool, batch.slots), content, self._noise_bits(content.size))
                computed = content if computed is None else computed
        return words if computed is None else computed

    def pool_slots(self, pool: KvPool, slots: Int64Array) -> Int64Array:
        """Return slots of the full pool as the pool's own."""
        return self._memory.lut[slots] if pool.group.lut >= 0 else slots

    def _content(self, pool: KvPool, batch: Batch, attention: AttentionMetadata, words: WordArray) -> WordArray:
        extend = batch.extend_lens
        sums = np.cumsum(words, dtype=np.uint64)
        first = np.cumsum(extend) - extend
        seeds = attention.slot_before(pool.index)
        reads = attention.seq_lens > attention.query_lens
        base = np.where(reads, pool.content[seeds], np.uint64(0))
        return sums + np.repeat(base - sums[first] + words[first], extend)

    def _noise_bits(self, count: int) -> WordArray | None:
        if self._noise is None:
            return None
        return self._noise.integers(0, _LOW_BITS, count, np.uint64)
