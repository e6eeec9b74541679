"""Speculative decoding as EAGLE does it, top-k 1: the draft guesses a chain, the target verifies it in one forward.

The draft has a pool of its own under the same slots. Its input at position p is the token of position p + 1.
"""

from typing import TYPE_CHECKING

import numpy as np

from ....kernels.arrays import Int32Array, Int64Array
from .pools import DRAFT, WordArray
from .requests import Request

if TYPE_CHECKING:
    from .engine import SimulatedEngine


class Eagle:
    """Drafts, verifies, accepts, rejects."""

    def __init__(self, engine: "SimulatedEngine") -> None:
        self._engine = engine
        self._config = engine.config
        self._coin = np.random.default_rng([engine.config.seed, 0xEA61])

    def draft_extend(self, requests: list[Request], prefix_lens: list[int], extend_lens: list[int]) -> None:
        """Bring the draft's pool to where the target's is, after a prefill or after a verify."""
        tokens = list(map(self.draft_inputs, requests, prefix_lens, extend_lens))
        engine = self._engine
        engine.runner.run(
            engine.builder.build("draft_extend", requests, prefix_lens=prefix_lens, tokens=tokens, runner=DRAFT)
        )

    def draft_inputs(self, request: Request, prefix: int, extend: int) -> Int32Array:
        """Return the draft's inputs for positions prefix .. prefix + extend - 1: each the token that comes next."""
        return request.tokens[prefix + 1 : prefix + extend + 1]

    def decode(self, requests: list[Request]) -> None:
        """Draft and verify one chain for each request; each gets at least one token."""
        engine, guesses = self._engine, self.guess(requests)
        starts = [request.cached_len for request in requests]
        for step in range(self._config.draft_tokens - 1):
            batch = engine.builder.build(
                "decode",
                requests,
                prefix_lens=[start + step for start in starts],
                tokens=list(guesses[:, step : step + 1]),
                runner=DRAFT,
                padded=True,
            )
            engine.runner.run(batch)
        counts = self._verify(requests, guesses)
        for request, count in zip(requests, counts, strict=True):
            request.cached_len += count
            engine.memory.trim(request, request.cached_len, note="rejected")
        self.draft_extend(requests, starts, counts)

    def guess(self, requests: list[Request]) -> Int32Array:
        """Return the draft's guesses `[bs, draft_tokens]`: the target's token, or by a coin another one."""
        steps = np.arange(1, self._config.draft_tokens + 1, dtype=np.int64)
        positions = np.array([request.cached_len for request in requests], np.int64)[:, None] + steps
        ids = np.repeat([request.sampling_id for request in requests], steps.size)
        tokens = self._engine.sampler.tokens(ids, positions.reshape(-1), None)
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
        engine, starts, counts = self._engine, [request.cached_len for request in requests], list[int]()
        batch = engine.builder.build("target_verify", requests, prefix_lens=starts, tokens=tokens, padded=True)

        def pick(content: WordArray) -> tuple[Int64Array, Int64Array]:
            total = batch.num_tokens
            ids = np.repeat([request.sampling_id for request in requests], self._config.verify_tokens)
            sampled = engine.sampler.tokens(ids, batch.positions[:total] + 1, content[:total])
            sampled = sampled.reshape(len(requests), -1)  # the target's next token at each position of each chain
            for request, chain, mine in zip(requests, guesses, sampled, strict=True):
                counts.append(self.accepted(chain, mine, request.max_tokens - request.num_tokens))
                for token in mine[: counts[-1]].tolist():
                    request.append(token)
            taken = np.arange(sampled.shape[1]) < np.array(counts)[:, None]
            padding = [0] * (batch.rows.size - len(counts))
            return sampled[taken], np.array(counts + padding, np.int64)

        engine.runner.run(batch, pick)
        accepted = sum(counts) - len(counts)
        engine.counters.drafted += guesses.size
        engine.counters.accepted += accepted
        engine.counters.rejected += guesses.size - accepted
        engine.counters.output_tokens += sum(counts)
        return counts
