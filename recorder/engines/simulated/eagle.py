"""Speculative decoding as EAGLE does it, top-k 1: the draft guesses a chain, the target verifies it in one forward.

The draft has a pool of its own under the same slots. Its input at position p is the token of position p + 1.
"""

import numpy as np

from ....kernels.arrays import Int32Array, Int64Array
from .batch import Batch, BatchBuilder
from .config import Counters, EngineConfig
from .memory import KvMemory
from .pools import DRAFT, WordArray
from .requests import Request
from .runner import ForwardRunner, Sampler


class Eagle:
    """Drafts, verifies, accepts, rejects."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        memory: KvMemory,
        builder: BatchBuilder,
        runner: ForwardRunner,
        sampler: Sampler,
        counters: Counters,
    ) -> None:
        self._config = config
        self._memory = memory
        self._builder = builder
        self._runner = runner
        self._sampler = sampler
        self._counters = counters
        self._coin = np.random.default_rng([config.seed, 0xEA61])

    def draft_extend(self, requests: list[Request], prefix_lens: list[int], extend_lens: list[int]) -> None:
        """Bring the draft's pool to where the target's is, after a prefill or after a verify."""
        tokens = [
            self.draft_inputs(request, prefix, extend)
            for request, prefix, extend in zip(requests, prefix_lens, extend_lens, strict=True)
        ]
        batch = self._builder.build("draft_extend", requests, prefix_lens=prefix_lens, tokens=tokens, runner=DRAFT)
        self._runner.run(batch)

    def draft_inputs(self, request: Request, prefix: int, extend: int) -> Int32Array:
        """Return the draft's inputs for positions prefix .. prefix + extend - 1: each the token that comes next."""
        return request.tokens[prefix + 1 : prefix + extend + 1]

    def decode(self, requests: list[Request]) -> None:
        """Draft and verify one chain for each request; each gets at least one token."""
        guesses = self.guess(requests)
        starts = [request.cached_len for request in requests]
        for step in range(self._config.draft_tokens - 1):
            batch = self._builder.build(
                "decode",
                requests,
                prefix_lens=[start + step for start in starts],
                tokens=list(guesses[:, step : step + 1]),
                runner=DRAFT,
                padded=True,
            )
            self._runner.run(batch)
        counts = self._verify(requests, guesses)
        for request, count in zip(requests, counts, strict=True):
            request.cached_len += count
            self._memory.trim(request, request.cached_len, note="rejected")
        self.draft_extend(requests, starts, counts)

    def guess(self, requests: list[Request]) -> Int32Array:
        """Return the draft's guesses `[bs, draft_tokens]`: the target's token, or by a coin another one."""
        steps = np.arange(1, self._config.draft_tokens + 1, dtype=np.int64)
        positions = np.array([request.cached_len for request in requests], np.int64)[:, None] + steps
        ids = np.repeat([request.sampling_id for request in requests], steps.size)
        tokens = self._sampler.tokens(ids, positions.reshape(-1), None)
        wrong = self._coin.random(tokens.size) >= self._config.accept_rate
        tokens[wrong] = (tokens[wrong] + 1) % self._config.vocab_size
        return tokens.astype(np.int32).reshape(positions.shape)

    def accepted(self, guesses: Int32Array, sampled: Int64Array, room: int) -> int:
        """Return how many of the target's tokens a request takes: one more than guesses are right, `room` at most."""
        wrong = np.flatnonzero(guesses != sampled[: guesses.size])
        right = int(wrong[0]) if wrong.size else guesses.size
        return min(right + 1, room)

    def _verify(self, requests: list[Request], guesses: Int32Array) -> list[int]:
        tokens = [
            np.append(request.tokens[request.num_tokens - 1], chain)
            for request, chain in zip(requests, guesses, strict=True)
        ]
        starts = [request.cached_len for request in requests]
        batch = self._builder.build("target_verify", requests, prefix_lens=starts, tokens=tokens, padded=True)
        counts: list[int] = []

        def pick(content: WordArray) -> tuple[Int64Array, Int64Array]:
            sampled = self._sample_all(batch, content)
            for request, chain, mine in zip(requests, guesses, sampled, strict=True):
                counts.append(self.accepted(chain, mine, request.max_tokens - request.num_tokens))
                for token in mine[: counts[-1]].tolist():
                    request.append(token)
            taken = np.arange(sampled.shape[1]) < np.array(counts)[:, None]
            padding = [0] * (batch.rows.size - len(counts))
            return sampled[taken], np.array(counts + padding, np.int64)

        self._runner.run(batch, pick)
        self._counters.drafted += guesses.size
        self._counters.accepted += sum(counts) - len(counts)
        self._counters.rejected += guesses.size - sum(counts) + len(counts)
        self._counters.output_tokens += sum(counts)
        return counts

    def _sample_all(self, batch: Batch, content: WordArray) -> Int64Array:
        """Return the target's next token at each position of the chain, `[bs, draft_tokens + 1]`."""
        total = batch.num_tokens
        ids = np.repeat([request.sampling_id for request in batch.requests], self._config.verify_tokens)
        sampled = self._sampler.tokens(ids, batch.positions[:total] + 1, content[:total])
        return sampled.reshape(len(batch.requests), -1)
