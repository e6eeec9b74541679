"""Ground truth: what each forward reads and is fed, held against what it must be, without asking the replay.

In the simulated engine the content of a slot is the sum, up to its position, of one word for each token and position,
and its KV bytes follow from the content but for two noise bits in each 8 bytes. So what a request must find at each
position follows from its own tokens alone. The probe looks at the engine's pools just before each forward: at every
slot of the prefix that the forward reads, through block table and full-to-SWA table, and at the tokens and positions
that it is fed; and before each sweep at every slot that is swept. The first one that differs is the fault's effect.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...recorder.engines.simulated.batch import Batch
from ...recorder.engines.simulated.engine import SimulatedEngine
from ...recorder.engines.simulated.pools import TARGET
from ...recorder.engines.simulated.requests import NO_ROW, Request
from .true_content import PoolTruth, TokenTruth, true_nodes

_Wrong = tuple[str, int, int, int]  # kind, position, slot, group


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The first thing that a forward, or a sweep, had wrong; -1 where a field does not apply.

    `forward` is the forward that reads it, in the trace of `side` ("prefill", "decode", or "" where there is one trace
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


class Clock:
    """Counts the forwards of all engines of a trial: `now` is how many have begun."""

    def __init__(self) -> None:
        self.now = 0


class Probe:
    """Watches one engine; `first` is its first effect, `ticks` the clock's reading at each of its forwards."""

    def __init__(self, engine: SimulatedEngine, clock: Clock) -> None:
        self.first: Effect | None = None
        self.ticks: list[int] = []
        self._engine = engine
        self._clock = clock
        self._tokens = TokenTruth(engine.config)
        self._pools = [PoolTruth(pool, engine.config.width) for pool in engine.memory.pools]
        run, sweep = engine.runner.run, engine.sweeper.sweep

        def run_watched(batch: Batch, *args: Any, **kwargs: Any) -> Any:
            if self.first is None:
                self._look(batch)
            self.ticks.append(clock.now)
            clock.now += 1
            return run(batch, *args, **kwargs)

        def sweep_watched() -> None:
            if self.first is None:
                self._look_at_cache()
            sweep()

        engine.runner.run = run_watched  # type: ignore[method-assign]  # of this one engine
        engine.sweeper.sweep = sweep_watched  # type: ignore[method-assign]  # of this one engine

    def note(self, kind: str, *, request: Request | None, position: int = -1, slot: int = -1, group: int = -1) -> None:
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
        first = 0
        for index, request in enumerate(batch.requests):
            wrong = self._fed(batch, index, first) or self._read(batch, index)
            if wrong is not None:
                kind, position, slot, group = wrong
                self.note(kind, request=request, position=position, slot=slot, group=group)
                return
            first += int(batch.extend_lens[index])

    def _fed(self, batch: Batch, index: int, first: int) -> _Wrong | None:
        """Hold what a request is fed, its tokens from `first` on in the batch, against its own tokens."""
        request = batch.requests[index]
        prefix, extend = int(batch.prefix_lens[index]), int(batch.extend_lens[index])
        # The draft decodes its own guesses behind what is cached; a request without a row is on its way out.
        if batch.runner == TARGET and request.row != NO_ROW and prefix != request.cached_len:
            return "prefix", prefix, -1, -1
        places = np.arange(prefix, prefix + extend)
        wrong = np.flatnonzero(batch.positions[first : first + extend] != places)
        if wrong.size:
            return "position", int(places[wrong[0]]), -1, -1
        tokens = self._tokens.tokens(request)
        if batch.mode == "target_verify" or (batch.runner != TARGET and batch.mode == "decode"):
            tokens = tokens[: request.num_tokens]  # the rest is guessed
        at = places + (batch.runner != TARGET)
        inside = at < tokens.size
        wrong = np.flatnonzero(inside & (tokens[np.where(inside, at, 0)] != batch.input_ids[first : first + extend]))
        if wrong.size:
            return "input", int(places[wrong[0]]), -1, -1
        return None

    def _read(self, batch: Batch, index: int) -> _Wrong | None:
        """Hold what a request reads against what its own tokens make of it."""
        request, memory = batch.requests[index], self._engine.memory
        prefix = int(batch.prefix_lens[index])
        if batch.runner != TARGET and batch.mode == "decode":
            prefix = min(prefix, request.cached_len)  # what the draft wrote of its own guesses is nobody's truth
        for pool in self._pools:
            group = pool.pool.group
            if group.runner != batch.runner:
                continue
            start = max(0, prefix - group.window) if group.window else 0
            slots = memory.req_to_token[batch.rows[index], start:prefix].astype(np.int64)
            expected = self._tokens.content(request, batch.runner, prefix)[start:]
            slots = slots[: expected.size]
            if group.lut >= 0:
                slots = memory.lut[slots]
            wrong = pool.first_wrong(slots, expected)
            if wrong is not None:
                kind, at = wrong
                return kind, start + at, int(slots[at]), pool.pool.index
        return None

    def _look_at_cache(self) -> None:
        memory = self._engine.memory
        for pool in self._pools:
            for node, expected in true_nodes(memory.cache.tree, pool.pool.group.runner):
                slots = node.page * memory.page_size + np.arange(memory.page_size, dtype=np.int64)
                if pool.pool.group.lut >= 0:
                    slots = memory.lut[slots]
                    if not slots.any():
                        continue
                wrong = pool.first_wrong(slots, expected)
                if wrong is not None:
                    position = (node.depth - 1) * memory.page_size + wrong[1]
                    self.note(
                        "sweep", request=None, position=position, slot=int(slots[wrong[1]]), group=pool.pool.index
                    )
                    return
