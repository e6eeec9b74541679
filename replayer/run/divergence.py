"""How a sliding-window pool has diverged from the full one: the published canary's figures, forward by forward.

`verify_full` and `verify_swa` add up the entries that verify plans held, `out_of_window_tokens` are positions of the
batch's requests without a sliding-window slot, `full_idx_divergence` those whose sliding-window slot has another
index. For a table that only sliding groups use, positions before the window are not recorded and not counted.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from ...kernels.arrays import Int64Array
from ...kernels.dispatch import select
from ...kernels.replay_pass.swa import swa_divergence_loops
from ...recorder.state.forward import Forward
from ...recorder.state.tables import StateTables
from ...recorder.trace.header import TraceHeader
from .planning import GroupStep

_FIGURES = ("out_of_window_tokens", "full_idx_divergence")
DIVERGENCE_SCHEMA = pa.schema(
    [
        *(("event", pa.int64()), ("forward", pa.int64()), ("runner", pa.int16()), ("group", pa.int16())),
        *((name, pa.int64()) for name in ("verify_full", "verify_swa", *_FIGURES)),
    ]
)
ROWS_AT_ONCE = 4096  # a table for each forward would cost more than the forward


class SwaDivergence:
    """Keeps the figures of every sliding-window group; nothing at all where the trace has none."""

    def __init__(self, header: TraceHeader, *, backend: str) -> None:
        self._header = header
        self._backend = backend
        self._groups = [index for index, group in enumerate(header.groups) if group.lut >= 0]
        self._verify = {"full": 0, "swa": 0}
        self._figures = {
            index: {name: {"last": 0, "largest": 0, "total": 0} for name in _FIGURES} for index in self._groups
        }
        self._rows: list[tuple[int, ...]] = []
        self.forwards = 0

    def forward(self, forward: Forward, steps: list[GroupStep], tables: StateTables) -> None:
        """Add a forward, its own slots in the tables already."""
        if not self._groups or not len(forward.req_pool_indices):
            return
        counts = {step.pool.index: self._count(step, forward, tables) for step in steps if step.pool.group.lut >= 0}
        reads = {step.pool.index: step.reads for step in steps}
        self.add(forward.event, forward.forward, forward.runner, reads, counts)

    def add(
        self, event: int, forward: int, runner: int, reads: dict[int, int], counts: dict[int, tuple[int, int]]
    ) -> None:
        """Add a forward's figures: entries read in each group of its runner, and both counts of each sliding one."""
        for index, count in reads.items():
            self._verify[self._header.groups[index].kind] += count
        self.forwards += 1
        for index, found in counts.items():
            for figure, count in zip(self._figures[index].values(), found, strict=True):
                figure.update(last=count, largest=max(figure["largest"], count), total=figure["total"] + count)
            self._rows.append((event, forward, runner, index, self._verify["full"], self._verify["swa"], *found))

    def take_table(self, *, at_least: int) -> pa.Table | None:
        """Return the rows since the last call, None if there are fewer than `at_least`."""
        if len(self._rows) < at_least:
            return None
        columns = zip(zip(*self._rows, strict=True), DIVERGENCE_SCHEMA, strict=True)
        self._rows = []
        return pa.table([pa.array(values, type=f.type) for values, f in columns], schema=DIVERGENCE_SCHEMA)

    def to_json(self) -> dict[str, Any] | None:
        """Return the totals for the summary, None if the trace has no such group."""
        if not self._groups:
            return None
        return {
            "forwards": self.forwards,
            "verify_full": self._verify["full"],
            "verify_swa": self._verify["swa"],
            "groups": {self._header.groups[index].name: figures for index, figures in self._figures.items()},
        }

    def _count(self, step: GroupStep, forward: Forward, tables: StateTables) -> tuple[int, int]:
        table, lut = tables.req_to_token[step.pool.group.table], tables.luts[step.pool.group.lut]
        counts = np.zeros(2, np.int64)
        select(swa_divergence_loops, self._backend)(*self._cached(step, forward), table, lut, counts)
        return int(counts[0]), int(counts[1])

    def _cached(self, step: GroupStep, forward: Forward) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return rows, starts and ends, `[bs] int64` each, of the positions that are counted."""
        group, starts = step.pool.group, np.zeros_like(forward.prefix_lens)
        if not any(other.table == group.table and not other.window for other in self._header.groups):
            starts = np.maximum(forward.prefix_lens - group.window - 1, 0)
        return forward.req_pool_indices, starts, forward.prefix_lens + np.maximum(forward.extend_lens, 0)
