"""What a request's tokens are, and what the simulated model must make of them, from the request alone."""

import dataclasses
from collections.abc import Iterator
from typing import Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.ops.hash.reference import splitmix64_words
from ...recorder.engines.simulated.config import EngineConfig
from ...recorder.engines.simulated.pools import TARGET, KvPool, WordArray
from ...recorder.engines.simulated.radix import NO_PAGE, Node, RadixTree
from ...recorder.engines.simulated.requests import Request
from ...recorder.engines.simulated.runner import Sampler

# Numeric noise may flip the bits below this one in each 8 bytes.
_NOISE_BITS: Final = np.uint64(2)


class TokenTruth:
    """Tokens and content words of requests.

    Where the sampler is a function of request and position, the tokens come from a sampler of its own, so that a token
    that the engine mixed up is seen as wrong; otherwise they are what the scheduler holds.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._sampler = Sampler(config)
        self._predictable = config.sampler != "content"
        self._tokens: dict[int, Int64Array] = {}
        self._content: dict[tuple[int, int], WordArray] = {}

    def tokens(self, request: Request) -> Int64Array:
        """Return a request's tokens, `[n] int64`: all that it will ever have, or if they cannot be known, so far."""
        if not self._predictable:
            return request.tokens[: request.num_tokens].astype(np.int64)
        tokens = self._tokens.get(request.request_id)
        if tokens is None:
            tokens = request.tokens[: request.max_tokens].astype(np.int64)
            positions = np.arange(request.prompt_len, request.max_tokens, dtype=np.int64)
            ids = np.full(positions.size, request.sampling_id, np.int64)
            tokens[request.prompt_len :] = self._sampler.tokens(ids, positions, None)
            self._tokens[request.request_id] = tokens
        return tokens

    def content(self, request: Request, runner: int, length: int) -> WordArray:
        """Return the content of a request's first `length` positions in a runner's pools, `[length] uint64`, or less
        where its tokens are not known as far.
        """
        content = self._content.get((request.request_id, runner))
        if content is None:
            content = _content(self.tokens(request), runner)
            if self._predictable:
                self._content[request.request_id, runner] = content
        return content[:length]


class PoolTruth:
    """Holds slots of a pool against the content that they must have, and the bytes against the content."""

    def __init__(self, pool: KvPool, width: int) -> None:
        self.pool = pool
        self._sane = KvPool(dataclasses.replace(pool.group, num_slots=width, page_size=1), index=pool.index)

    def first_wrong(self, slots: Int64Array, expected: WordArray) -> tuple[str, int] | None:
        """Return what is wrong with the first slot that is, and its place; `slots`, `expected` `[n]`."""
        pool = self.pool
        inside = (slots >= 0) & (slots < pool.content.size)
        at = np.where(inside, slots, 0)
        wrong = ~inside | (pool.content[at] != expected)
        if wrong.any():
            return "content", int(np.argmax(wrong))
        if not slots.size or not pool.group.streams:
            return None
        self._sane.write(np.arange(slots.size, dtype=np.int64), expected, None)
        for stream in range(len(pool.group.streams)):
            mine = np.ascontiguousarray(pool.stream_bytes(stream)[at]).view(np.uint64)
            sane = np.ascontiguousarray(self._sane.stream_bytes(stream)[: slots.size]).view(np.uint64)
            wrong = ((mine ^ sane) >> _NOISE_BITS).any(axis=1)
            if wrong.any():
                return "bytes", int(np.argmax(wrong))
        return None


def true_nodes(tree: RadixTree, runner: int) -> Iterator[tuple[Node, WordArray]]:
    """Yield the nodes of a prefix cache that have a page in the pool, with the content that their keys ask for.

    A node whose key lacks tokens is left out, and so is what hangs below it.
    """
    base: dict[int, np.uint64] = {id(tree.root): np.uint64(0)}
    size = tree.page_size
    for node in tree.walk():
        if node.parent is None or id(node.parent) not in base or len(node.key) != 4 * (size + tree.lookahead):
            continue
        tokens = np.frombuffer(node.key, np.int32).astype(np.int64)
        content = base[id(node.parent)] + _content(tokens, runner, first=(node.depth - 1) * size)[:size]
        base[id(node)] = content[-1]
        if node.page != NO_PAGE:
            yield node, content


def _content(tokens: Int64Array, runner: int, *, first: int = 0) -> WordArray:
    """Return the running sum of the words of tokens from position `first` on, as a runner is fed them.

    The draft's input at a position is the token of the next one.
    """
    tokens = tokens[int(runner != TARGET) :]
    positions = np.arange(first, first + tokens.size, dtype=np.int64)
    words = splitmix64_words((tokens.view(np.uint64) << np.uint64(32)) ^ positions.view(np.uint64))
    return np.cumsum(words, dtype=np.uint64)
