"""One forward: recorded, computed, sampled. What an integrator writes, and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ....kernels.arrays import BoolArray, Int32Array, Int64Array
from ....kernels.ops.hash.reference import splitmix64_words
from ....kernels.ops.oracle.reference import oracle_tokens
from ...capture.forward_input import AttentionInput, ForwardInput, TruthTokens
from ...capture.recorder import Recorder
from .batch import AttentionBackend, Batch, slot_before
from .config import Counters, EngineConfig
from .memory import KvMemory
from .pools import TARGET, KvPool, WordArray

_LOW_BITS = np.uint64(4)
NOTHING: Final = np.empty(0, np.int64)


def token_words(tokens: Int64Array, positions: Int64Array) -> WordArray:
    """Return the word that each token adds to the content of the slot before it, `[n] uint64`."""
    return splitmix64_words((tokens.view(np.uint64) << np.uint64(32)) ^ positions.view(np.uint64))


class Model:
    """A slot's content is the content of the slot before it, which is read from the pool, plus a word of the token and
    the position fed. So what the engine mixes up, the model computes on, and equal prefixes have equal content.
    """

    def __init__(self, config: EngineConfig, memory: KvMemory) -> None:
        self._memory = memory
        self._noise = np.random.default_rng([config.seed, 0x4E01]) if config.noise else None

    def run(self, batch: Batch, attention: AttentionInput) -> WordArray:
        """Write the KV of each token in every pool of the batch's runner; what came before is read from the slots that
        attention is given. Return the content word of each token in the runner's first pool, `[T] uint64`.
        """
        words = token_words(batch.input_ids, batch.positions)
        if self._memory.states is not None:
            self._memory.states.run(batch.rows, batch.prefix_lens, batch.extend_lens, words)
        computed: WordArray | None = None
        for pool in self._memory.pools:
            if pool.group.runner == batch.runner:
                content = self._content(pool, batch, attention, words)
                noise = self._noise.integers(0, _LOW_BITS, content.size, np.uint64) if self._noise is not None else None
                pool.write(self._memory.pool_slots(pool, batch.slots), content, noise)
                computed = content if computed is None else computed
        return words if computed is None else computed

    def _content(self, pool: KvPool, batch: Batch, attention: AttentionInput, words: WordArray) -> WordArray:
        extend = batch.extend_lens
        sums = np.cumsum(words, dtype=np.uint64)
        first = np.cumsum(extend) - extend
        reads = np.asarray(attention.seq_lens) > attention.query_lens
        base = np.where(reads, pool.content[slot_before(attention, pool.index)], np.uint64(0))
        return sums + np.repeat(base - sums[first] + words[first], extend)


class Sampler:
    """Draws tokens by the config's rule; a resumed request gets the same ones again."""

    def __init__(self, config: EngineConfig) -> None:
        self._kind = config.sampler
        self._vocab_size = config.vocab_size
        self._salt = splitmix64_words(np.array([config.seed & 0xFFFFFFFF], np.uint64) + np.uint64(0x5EED))

    def tokens(self, request_ids: Int64Array, positions: Int64Array, content: WordArray | None) -> Int64Array:
        """Return the token of each `(request id, position)`, all `[n]`; `content` is what the model made of the
        context, which only the sampler "content" looks at.
        """
        if self._kind == "oracle":
            out = np.empty(positions.size, np.int64)
            oracle_tokens(request_ids=request_ids, positions=positions, vocab_size=self._vocab_size, out=out)
            return out
        if self._kind == "content" and content is not None:
            words = splitmix64_words(content ^ self._salt)
        else:
            words = splitmix64_words(
                splitmix64_words(request_ids.view(np.uint64) ^ self._salt) ^ positions.view(np.uint64)
            )
        return (words % np.uint64(self._vocab_size)).astype(np.int64)


# From the content of each token to (sampled tokens, how many each row of the batch got); nothing of either if the host
# hears of them later.
Pick = Callable[[WordArray], tuple[Int64Array, Int64Array]]


class ForwardRunner:
    """Runs batches of the target or the draft model under the recorder; `attention` says what its kernels get."""

    def __init__(self, recorder: Recorder, memory: KvMemory, model: Model, counters: Counters) -> None:
        self._recorder = recorder
        self._memory = memory
        self.model = model
        self.attention = AttentionBackend(memory)
        self._counters = counters

    def run(self, batch: Batch, pick: Pick | None = None) -> None:
        """Run one forward; `pick` samples from it."""
        self.begin(batch)
        content: WordArray = np.empty(0, np.uint64)
        submitted: dict[tuple[int, int], WordArray] = {}
        if batch.input_ids.size:
            attention = self.attention.plan(batch)
            self._recorder.attention(attention)
            content = self.model.run(batch, attention)
            if self._memory.config.submitted:
                submitted = self.submitted(batch)
        tokens, lens = (NOTHING, NOTHING) if pick is None else pick(content)
        self._recorder.after_forward(sampled_tokens=tokens, sampled_lens=lens, submitted=submitted)
        self._counters.forwards += 1
        self._counters.padded_forwards += batch.rows.size > len(batch.requests)
        if batch.runner == TARGET:
            self._counters.target_forwards += 1
            self._counters.tokens += batch.num_tokens

    def submitted(self, batch: Batch) -> dict[tuple[int, int], WordArray]:
        """Return what the model handed to each pool and stream in the forward that just ran."""
        pools = [pool for pool in self._memory.pools if pool.group.runner == batch.runner]
        return {(pool.index, stream): rows for pool in pools for stream, rows in pool.submitted.items()}

    def begin(self, batch: Batch) -> None:
        """Record what is about to run."""
        reads_given = self._memory.config.reads_given
        states = self._memory.states
        self._recorder.before_forward(
            ForwardInput(
                mode=batch.mode,
                runner=batch.runner,
                req_pool_indices=batch.rows,
                request_ids=batch.request_ids,
                prefix_lens=batch.prefix_lens,
                extend_lens=batch.extend_lens,
                input_ids=batch.input_ids,
                positions=batch.positions,
                out_cache_loc=(batch.slots,),
                reads=(self.attention.prefix_read(batch) if reads_given else self._memory.req_to_token,),
                luts=(self._memory.lut,) if self._memory.swa is not None else (),
                table_filled=not reads_given,
                truth=TruthTokens(flat=batch.truth, lens=batch.truth_lens),
                states=() if states is None else (states.access(batch.rows, batch.prefix_lens),),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A forward on its way."""

    forward: int  # its number in the trace
    batch: Batch
    samples: BoolArray  # [len(batch.requests)], whether a request gets a token
    tokens: Int64Array  # [samples.sum()]; the host looks at them when it hears back


class FutureMap:
    """A ring on the device that holds sampled tokens until the forwards after them have read them. `size` must be as
    many as the forwards in flight can sample together; a smaller ring is overrun in silence, and a request is fed
    another one's token.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._tokens = np.zeros(size, np.int32)
        self._next = 0

    def store(self, tokens: Int64Array) -> list[int]:
        """Keep tokens, and return where each of them lies."""
        places = (self._next + np.arange(tokens.size)) % self.size
        self._tokens[places] = tokens
        self._next = (self._next + tokens.size) % self.size
        return [int(place) for place in places]

    def read(self, place: int) -> Int32Array:
        """Return the token at a place, `[1] int32`."""
        return self._tokens[place : place + 1].copy()
