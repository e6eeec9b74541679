"""An oracle in the place of an engine's sampler: what the header says of it, and the tokens that a step is to sample."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.ops.oracle.own import HASH, load_oracle
from ...trace.header import NotWatched, Oracle, Sampler, TraceHeader

if TYPE_CHECKING:
    from .injecting import Injector

logger = logging.getLogger("kvcanary")

NOT_SAMPLED: Final = "tokens against the oracle"


def with_oracle(header: TraceHeader, name: str, vocab_size: int, why_not: str = "") -> TraceHeader:
    """Return a header that declares the oracle of that name, none for ""; `why_not` says why it cannot sample here."""
    if not name:
        return header
    if why_not:
        logger.error("kvcanary: the oracle %s does not sample: %s", name, why_not)
        lacks = NotWatched(what="other", name=NOT_SAMPLED, reason=why_not)
        return dataclasses.replace(header, not_watched=(*header.not_watched, lacks))
    load_oracle(name, vocab_size)  # what is wrong with one's own shows now
    oracle = Oracle(vocab_size=vocab_size) if name == HASH else None
    return dataclasses.replace(header, oracle=oracle, sampler=Sampler(name=name, vocab_size=vocab_size))


class OracleSampler:
    """Gives the tokens that a step samples; `injector`, if there is one, may swap two of them."""

    def __init__(self, sampler: Sampler) -> None:
        self._tokens = load_oracle(sampler.name, sampler.vocab_size)
        self.injector: Injector | None = None

    def sample(
        self, names: Sequence[str], seeds: Sequence[int], positions: Sequence[int], prompt_lens: Sequence[int] = ()
    ) -> Int64Array:
        """Return the next token of each request, `[n] int64`: `positions` `[n]` are how many tokens each has so far.

        Of a request with fewer than `prompt_lens` `[n]` the token is thrown away: a part of its prompt ran.
        """
        tokens = self._tokens(np.array(seeds, np.int64), np.array(positions, np.int64))
        if self.injector is not None:
            lens = prompt_lens or (0,) * len(names)
            kept = [n for n, (at, least) in enumerate(zip(positions, lens, strict=True)) if at >= least]
            mine = tokens[kept]
            self.injector.swap([names[n] for n in kept], [seeds[n] for n in kept], mine)
            tokens[kept] = mine
        return tokens


def force(logits: Any, tokens: Int64Array) -> Any:
    """Leave the first rows of logits `[>= n, vocab]`, on any device, no other token than that of `tokens` `[n]`; return all."""
    import torch

    chosen = torch.from_numpy(tokens).to(logits.device, non_blocking=True)
    mine = logits[: len(tokens)]
    mine.fill_(float("-inf"))
    mine.scatter_(1, chosen[:, None], 0.0)
    return logits
