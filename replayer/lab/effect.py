"""Ground truth: what each forward reads and is fed, held against what it must be, without asking the replay.

In the simulated engine the content of a slot is the sum, up to its position, of one word for each token and position,
and its KV bytes follow from the content but for two noise bits in each 8 bytes. So what a request must find at each
position follows from its own tokens alone. The probe looks at the engine's pools just before each forward: at every
slot of the prefix that the forward reads, through block table and full-to-SWA table, and at the tokens and positions
that it is fed; and before each sweep at every slot that is swept. The first one that differs is the fault's effect.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.engines.simulated.batch import Batch
from ...recorder.engines.simulated.config import EngineConfig
from ...recorder.engines.simulated.engine import SimulatedEngine
from ...recorder.engines.simulated.pools import TARGET, KvPool, WordArray
from ...recorder.engines.simulated.radix import NO_PAGE, Node, RadixTree
from ...recorder.engines.simulated.requests import NO_ROW, Request
from ...recorder.engines.simulated.runner import Sampler, token_words

# Numeric noise may flip the bits below this one in each 8 bytes.
_NOISE_BITS: Final = np.uint64(2)
_Wrong = tuple[str, int, int, int]  # kind, position, slot, group


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The first thing that a forward, or a sweep, had wrong; -1 if a field does not apply.

    `forward` is the forward that reads it, in the trace of `side` ("prefill", "decode", or "" if there is one trace
    only); for a sweep, or something that happens between forwards, the one that comes next. `tick` counts the forwards
    of both sides before it. `kind` is "prefix" (a prefix longer or shorter than what is cached), "position" or "input"
    (fed wrongly), "content" (a slot that holds another token's KV), "bytes" (KV bytes that are not those of the
    content), "sweep" (either of them, seen by a sweep only), or a name that the fault gives.
    """

    forward: int
    side: str
    tick: int
    kind: str
    request: str
    position: int
    slot: int
    group: int


def around(owner: object, name: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put `call(original, *args, **kwargs)` in the place of a method of one object; it has `call`'s name if none is given."""

    def put(call: Callable[..., Any]) -> Callable[..., Any]:
        method = name or call.__name__
        original = getattr(owner, method)
        setattr(owner, method, lambda *args, **kwargs: call(original, *args, **kwargs))
        return call

    return put


@dataclass(slots=True)
class Clock:
    """Counts the forwards of all engines of a trial: `now` is how many have begun."""

    now: int = 0


class Probe:
    """Watches one engine; `first` is its first effect, `ticks` the clock's reading at each of its forwards."""

    def __init__(self, engine: SimulatedEngine, clock: Clock) -> None:
        self.first: Effect | None = None
        self.ticks: list[int] = []
        self._engine, self._clock = engine, clock
        self._tokens = TokenTruth(engine.config)
        self._pools = [PoolTruth(pool, engine.config.width) for pool in engine.memory.pools]

        @around(engine.runner)
        def run(original: Any, batch: Batch, *args: Any, **kwargs: Any) -> Any:
            if self.first is None:
                self._look(batch)
            self.ticks.append(clock.now)
            clock.now += 1
            return original(batch, *args, **kwargs)

        @around(engine.sweeper)
        def sweep(original: Any) -> None:
            if self.first is None:
                self._look_at_cache()
            original()

    def note(
        self, kind: str, position: int = -1, slot: int = -1, group: int = -1, *, request: Request | None = None
    ) -> None:
        """Take an effect; the first one stays."""
        if self.first is None:
            self.first = Effect(
                forward=self._engine.recorder.next_forward,
                side=self._engine.config.role,
                tick=self._clock.now,
                kind=kind,
                request=request.name if request is not None else "",
                position=position,
                slot=slot,
                group=group,
            )

    def _look(self, batch: Batch) -> None:
        for index, request in enumerate(batch.requests):
            wrong = self._fed(batch, index) or self._read(batch, index)
            if wrong is not None:
                self.note(*wrong, request=request)
                return

    def _fed(self, batch: Batch, index: int) -> _Wrong | None:
        request, first = batch.requests[index], int(batch.extend_lens[:index].sum())
        prefix, extend = int(batch.prefix_lens[index]), int(batch.extend_lens[index])
        # The draft decodes its own guesses behind what is cached; a request without a row is on its way out.
        if batch.runner == TARGET and request.row != NO_ROW and prefix != request.cached_len:
            return "prefix", prefix, -1, -1
        places = np.arange(prefix, prefix + extend)
        tokens = self._tokens.tokens(request)
        if batch.mode == "target_verify" or (batch.runner != TARGET and batch.mode == "decode"):
            tokens = tokens[: request.num_tokens]  # the rest is guessed
        at = places + (batch.runner != TARGET)
        inside = at < tokens.size
        other_token = inside & (tokens[np.where(inside, at, 0)] != batch.input_ids[first : first + extend])
        other_position = batch.positions[first : first + extend] != places
        for kind, wrong in (("position", other_position), ("input", other_token)):
            if wrong.any():
                return kind, int(places[np.argmax(wrong)]), -1, -1
        return None

    def _read(self, batch: Batch, index: int) -> _Wrong | None:
        request, memory = batch.requests[index], self._engine.memory
        prefix = int(batch.prefix_lens[index])
        if batch.runner != TARGET and batch.mode == "decode":
            prefix = min(prefix, request.cached_len)  # what the draft wrote of its own guesses is nobody's truth
        for truth in self._pools:
            group = truth.pool.group
            if group.runner != batch.runner:
                continue
            start = max(0, prefix - group.window) if group.window else 0
            expected = self._tokens.content(request, batch.runner, prefix)[start:]
            slots = memory.row_slots(truth.pool, int(batch.rows[index]), start, start + expected.size)
            wrong = truth.first_wrong(slots, expected)
            if wrong is not None:
                kind, at = wrong
                return kind, start + at, int(slots[at]), truth.pool.index
        return None

    def _look_at_cache(self) -> None:
        memory = self._engine.memory
        for truth in self._pools:
            for node, expected in true_nodes(memory.cache.tree, truth.pool.group.runner):
                slots = memory.pool_slots(truth.pool, memory.page_slots(np.array([node.page])))
                if truth.pool.group.lut >= 0 and not slots.any():
                    continue
                wrong = truth.first_wrong(slots, expected)
                if wrong is not None:
                    position = (node.depth - 1) * memory.page_size + wrong[1]
                    self.note("sweep", position, int(slots[wrong[1]]), truth.pool.index)
                    return


class TokenTruth:
    """Tokens and content words of requests.

    If the sampler is a function of request and position, the tokens come from a sampler of its own, so that a token
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
            return request.known_tokens.astype(np.int64)
        tokens = self._tokens.get(request.request_id)
        if tokens is None:
            tokens = request.tokens[: request.max_tokens].astype(np.int64)
            positions = np.arange(request.prompt_len, request.max_tokens, dtype=np.int64)
            ids = np.full(positions.size, request.sampling_id, np.int64)
            tokens[request.prompt_len :] = self._sampler.tokens(ids, positions, None)
            self._tokens[request.request_id] = tokens
        return tokens

    def content(self, request: Request, runner: int, length: int) -> WordArray:
        """Return the content of a request's first `length` positions, as far as known, in a runner's pools, `[n] uint64`."""
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
        self._sane = KvPool(replace(pool.group, num_slots=width, page_size=1), index=pool.index)

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
    """Yield a prefix cache's nodes that have a page, and the content of their keys; none with, or below, a torn key."""
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
    """Return the running sum of the words of tokens from position `first` on; a draft is fed those of the next position."""
    tokens = tokens[int(runner != TARGET) :]
    return np.cumsum(token_words(tokens, np.arange(first, first + tokens.size, dtype=np.int64)), dtype=np.uint64)
