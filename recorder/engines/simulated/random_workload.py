"""A random workload: lengths, shared prefixes, arrivals, priorities, aborts and forks by seed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from .requests import NEVER, RequestSpec

MAX_PRIORITIES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorkload:
    """A stream of requests; iterating it twice gives the same ones.

    Attributes:
        requests: how many.
        seed: of all that is random here.
        prompt_tokens: mean length of a prompt; lengths are geometric.
        output_tokens: mean length of an answer.
        max_tokens: no request is longer than this, prompt and answer.
        sharing: chance that a prompt begins with one that came before, cut at random.
        num_prefixes: how many earlier prompts are remembered for that.
        arrival_rate: requests a second of simulated time.
        priorities: number of priorities, drawn evenly.
        abort_rate: chance that a request is aborted on its way.
        fork_rate: chance that a request asks for two to four answers.
        vocab_size: tokens are drawn below it.
    """

    requests: int
    seed: int = 0
    prompt_tokens: int = 120
    output_tokens: int = 40
    max_tokens: int = 900
    sharing: float = 0.5
    num_prefixes: int = 16
    arrival_rate: float = 40.0
    priorities: int = 1
    abort_rate: float = 0.0
    fork_rate: float = 0.0
    vocab_size: int = 32_000

    def __post_init__(self) -> None:
        """Raise `ValueError` on numbers without a meaning."""
        for name in ("requests", "prompt_tokens", "output_tokens", "num_prefixes", "priorities"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("sharing", "abort_rate", "fork_rate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 to 1")
        if not self.arrival_rate > 0:  # nor is NaN, under which nobody would ever arrive
            raise ValueError(f"arrival_rate is {self.arrival_rate}, expected more than 0")
        if self.priorities > MAX_PRIORITIES:
            raise ValueError(f"priorities is {self.priorities}, expected at most {MAX_PRIORITIES:,}")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}, expected at least 2: a prompt and an answer")

    def __iter__(self) -> Iterator[RequestSpec]:
        """Yield the requests, in the order of their arrival."""
        random = np.random.default_rng([self.seed, 0x3047])
        remembered: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]] = []
        arrival_s = 0.0
        for _ in range(self.requests):
            arrival_s += float(random.exponential(1 / self.arrival_rate))
            length = min(int(random.geometric(1 / self.prompt_tokens)), self.max_tokens - 1)
            prompt = random.integers(0, self.vocab_size, length).astype(np.int32)
            if remembered and random.random() < self.sharing:
                earlier = remembered[int(random.integers(len(remembered)))]
                cut = len(earlier) if random.random() < 0.3 else int(random.integers(len(earlier) + 1))
                # Sometimes nothing of its own: the very same prompt again.
                own = prompt[:0] if cut and random.random() < 0.2 else prompt
                prompt = np.concatenate([earlier[:cut], own])[: self.max_tokens - 1]
            if len(remembered) < self.num_prefixes:
                remembered.append(prompt)
            else:
                remembered[int(random.integers(self.num_prefixes))] = prompt
            answer = min(int(random.geometric(1 / self.output_tokens)), self.max_tokens - len(prompt))
            aborted = random.random() < self.abort_rate
            yield RequestSpec(
                arrival_s=arrival_s,
                prompt=prompt,
                max_new_tokens=answer,
                priority=int(random.integers(self.priorities)),
                copies=int(random.integers(2, 5)) if random.random() < self.fork_rate else 1,
                abort_at=int(random.integers(0, len(prompt) + answer)) if aborted else NEVER,
            )
