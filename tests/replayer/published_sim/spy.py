"""Watches a simulated engine from inside, and lets the published canary see what it would have seen there."""

from dataclasses import dataclass, field

import numpy as np
from kvcanary.recorder.engines.simulated.batch import Batch
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine

from .canary import PublishedCanary
from .step import Step
from .sweep import WalkedCache, divergence_figures

Rows = list[tuple[int, ...]]


@dataclass
class Seen:
    """What the published canary said of a run.

    `forwards[n]` are the sorted violation rows of forward n, `sweeps` those of each walk and runner in order; `figures`
    the sliding-window figures by forward number; `modes` the (mode, runner) that ran.
    """

    forwards: list[Rows] = field(default_factory=list)
    sweeps: list[Rows] = field(default_factory=list)
    figures: dict[int, tuple[int, int]] = field(default_factory=dict)
    modes: set[tuple[str, int]] = field(default_factory=set)
    padded: int = 0
    host_copies: int = 0
    pool_copies: int = 0
    landed: int = 0

    @property
    def rows(self) -> Rows:
        """All violation rows."""
        return [row for rows in (*self.forwards, *self.sweeps) for row in rows]


class Spy:
    """Hooks itself into an engine's model, pools and sweeps; it reads the engine's own state, never the recorder."""

    def __init__(self, engine: SimulatedEngine, *, kv_hash: str) -> None:
        memory = engine.memory
        sources = {(pool.index, n): source for pool in memory.pools for n, source in enumerate(pool.sources())}
        self.seen = Seen()
        self.canary = PublishedCanary(
            memory.layout.header,
            req_to_token=memory.req_to_token,
            lut=memory.lut,
            sources=sources,
            kv_hash=kv_hash,
        )
        self._memory = memory
        self._hook_forwards(engine)
        self._hook_sweeps(engine)
        for pool in memory.pools:
            self._hook_copies(pool)

    def _hook_forwards(self, engine: SimulatedEngine) -> None:
        runner, model, seen = engine.runner, engine.runner.model, self.seen
        begin, run = runner.begin, model.run

        def spied_begin(batch: Batch) -> None:
            seen.forwards.append([])
            seen.modes.add((batch.mode, batch.runner))
            seen.padded += batch.rows.size > len(batch.requests)
            begin(batch)

        def spied_run(batch: Batch, *rest: object):
            step = as_step(batch)
            self.canary.before(step)
            content = run(batch, *rest)
            seen.forwards[-1] = self.canary.after(step)
            # Where only sliding groups read the table, a trace does not know what lies before the window.
            sliding = self._memory.swa is not None and batch.runner == self._memory.pools[0].group.runner
            if sliding and self._memory.layout.full_groups:
                seen.figures[len(seen.forwards) - 1] = divergence_figures(self._memory, step)
            return content

        runner.begin, model.run = spied_begin, spied_run

    def _hook_sweeps(self, engine: SimulatedEngine) -> None:
        sweep, cache = engine.sweeper.sweep, WalkedCache(self._memory)

        def spied_sweep() -> None:
            # The published sweep walks for the target only; a draft's pool is walked alike.
            for runner in range(len(self._memory.layout.header.runners)):
                if self.canary.groups_of(runner):
                    self.seen.sweeps.append(self.canary.sweep(runner, cache))
            sweep()

        engine.sweeper.sweep = spied_sweep

    def _hook_copies(self, pool) -> None:
        copy, to_host, from_host = pool.copy, pool.to_host, pool.from_host

        def spied_copy(src, dst) -> None:
            copy(src, dst)
            self.canary.copy(pool.index, src, dst)
            self.seen.pool_copies += 1

        def spied_to_host(slots, host_slots) -> None:
            to_host(slots, host_slots)
            self.canary.copy(pool.index, slots, host_slots, dst_host=True)
            self.seen.host_copies += 1

        def spied_from_host(host_slots, slots) -> None:
            from_host(host_slots, slots)
            self.canary.copy(pool.index, host_slots, slots, src_host=True)
            self.seen.host_copies += 1

        pool.copy, pool.to_host, pool.from_host = spied_copy, spied_to_host, spied_from_host


def as_step(batch: Batch) -> Step:
    """Return a batch as it is now; the engine goes on with its own arrays."""
    padding = np.full(batch.rows.size - len(batch.requests), -1, np.int64)
    rooms = [request.room for request in batch.requests]
    prompt_lens = [request.prompt_len for request in batch.requests]
    return Step(
        mode=batch.mode,
        runner=batch.runner,
        rows=batch.rows.copy(),
        request_ids=batch.request_ids.copy(),
        prefix_lens=batch.prefix_lens.copy(),
        extend_lens=batch.extend_lens.copy(),
        input_ids=batch.input_ids.copy(),
        positions=batch.positions.copy(),
        slots=batch.slots.copy(),
        truth=batch.truth.astype(np.int64),
        truth_lens=batch.truth_lens.copy(),
        rooms=np.append(np.array(rooms, np.int64), padding),
        prompt_lens=np.append(np.array(prompt_lens, np.int64), padding),
        num_requests=len(batch.requests),
    )
