"""The protocol of a token oracle, and where one is found by its name: `hash`, or `module:name` for one's own."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, Protocol

import numpy as np

from ...arrays import Int64Array
from ...constants import ORACLE_NAME
from .reference import MAX_VOCAB, oracle_tokens

HASH: Final = "hash"

Tokens = Callable[[Int64Array, Int64Array], Int64Array]


class TokenOracle(Protocol):
    """Says which token a request has at a position, whatever the model's weights are: always the same one.

    `seed` is the request's 64-bit id, the same in the engine and in a replay; `position` counts from 0, the prompt's tokens
    included, so that it is how many tokens the request has so far. The token is one of the vocabulary.
    """

    def next_token(self, seed: int, position: int) -> int:
        """Return the token at `position` of the request with this seed."""


class HashOracle:
    """The hash oracle, s(seed XOR position) mod vocab_size; raises `ValueError` for a vocabulary outside 1 .. 2^31 - 1."""

    def __init__(self, vocab_size: int) -> None:
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size is {vocab_size}, expected 1 to {MAX_VOCAB}")
        self.vocab_size = vocab_size

    def next_token(self, seed: int, position: int) -> int:
        """Return the token at `position` of the request with this seed, signed or not."""
        signed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        return int(self.next_tokens(np.array([signed], np.int64), np.array([position], np.int64))[0])

    def next_tokens(self, seeds: Int64Array, positions: Int64Array) -> Int64Array:
        """Return the token of each seed and position, `[n] int64` all."""
        out = np.empty(len(seeds), np.int64)
        oracle_tokens(request_ids=seeds, positions=positions, vocab_size=self.vocab_size, out=out)
        return out


def load_oracle(name: str, vocab_size: int) -> Tokens:
    """Return what gives the tokens of seeds and positions, `[n] int64` all, by the oracle of a name.

    `module:name` is imported: a class or function that takes the vocabulary's size and gives a `TokenOracle`. Raises
    `ValueError` if there is none; what it returns raises one for a token outside the vocabulary.
    """
    if name == HASH:
        return HashOracle(vocab_size).next_tokens
    if not ORACLE_NAME.fullmatch(name):
        raise ValueError(f"the oracle is {name!r}, expected hash, or module:name")
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        oracle = found(vocab_size)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the oracle {name} cannot be used: {error}; expected a callable that takes vocab_size"
        ) from None
    if not callable(getattr(oracle, "next_token", None)):
        raise ValueError(  # noqa: TRY004  # what is wrong is the name
            f"the oracle {name} gives a {type(oracle).__name__}, expected a method next_token(seed, position)"
        )

    def next_tokens(seeds: Int64Array, positions: Int64Array) -> Int64Array:
        pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
        tokens = [int(oracle.next_token(seed, position)) for seed, position in pairs]
        wrong = [token for token in tokens if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"the oracle {name} says token {wrong[0]}, expected 0 to {vocab_size - 1}")
        return np.array(tokens, np.int64)

    return next_tokens
