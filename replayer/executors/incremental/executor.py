"""The incremental executor: the stepwise one, on plans without the entries that nothing has happened to.

Most of what a forward reads was read by the forward before it, and gave nothing. An entry (row, position) that was
verified without a finding is verified again only after something that it depends on has changed: its cell of the block
table or the one before it, where they lead to, a truth token, the record, bytes, owner or allocation of either slot, or
the request that reads the row. What did give something is due in every forward, since it gives a row in each. So the same
kernels yield the same rows in the same order, and cost grows with tokens and changes, not with forwards times context.
`kernels/replay_pass/entries.py` keeps what is due; `Watch` notes every change.
"""

from typing import Final

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.constants import KvHashMode
from ....kernels.dispatch import select
from ....kernels.replay_pass.due import ForwardReads, Readers
from ....kernels.replay_pass.entries import SlotTable
from ....kernels.replay_pass.swa import watched_divergence_loops
from ....recorder.state.forward import Forward
from ....recorder.state.tables import StateTables
from ....recorder.state.writes import KvChanges
from ....recorder.trace.header import TraceHeader
from ...report.report import Results
from ...run.divergence import SwaDivergence
from ...run.planning import GroupStep, Planner
from ...run.settings import ReplaySettings
from ..stepwise import StepwiseExecutor
from .watch import Watch

NO_LUT: Final = np.zeros(0, np.int64)


class IncrementalPlanner(Planner):
    """Plans forwards so that their verify plans hold, in the order of the full ones, what is due."""

    def __init__(self, header: TraceHeader, tables: StateTables, watch: Watch, *, backend: str) -> None:
        super().__init__(header, tables, backend=backend)
        self._watch = watch
        self._serial = 0
        self._any_unknown = [False] * len(header.groups)

    def _plan_reads(
        self, step: GroupStep, forward: Forward, changes: KvChanges | None, prefix_lens: Int64Array, entries: int
    ) -> None:
        """Fill a step's verify plan with what is due."""
        del entries
        pool, tables = step.pool, self._tables
        group, index = pool.group, pool.index
        if pool.any_unknown != self._any_unknown[index]:  # what was passed over may count now, or the other way round
            self._any_unknown[index] = pool.any_unknown
            self._watch.group_changed(index)
        step.changed_slots = np.append(step.slots, changes.slots_of(index)) if changes else step.slots
        self._watch.slots_changed(index, step.changed_slots)
        self._serial += 1
        truth_lens = NO_LUT if forward.truth_lens is None else forward.truth_lens
        step.due = due = ForwardReads(
            self._watch.states[index],
            Readers(forward.req_pool_indices, forward.request_ids, prefix_lens, truth_lens),
            SlotTable(tables.req_to_token[group.table], tables.luts[group.lut] if group.lut >= 0 else NO_LUT),
            event=forward.event,
            serial=self._serial,
            window=group.window,
            token_offset=self._header.runners[forward.runner].token_offset,
            backend=self._backend,
        )
        step.reads = due.reads
        self._make_room(step, due.entries)
        truth = tables.truth if forward.truth_lens is not None else None
        due.plan(step.verify_plan, truth, pool.num_slots, self._out_of_range)


class IncrementalExecutor(StepwiseExecutor):
    """Takes what `StepwiseExecutor` takes, and finds the same.

    `watch` knows which entries are verified: it is called before every change of pools, tables or the ledger.
    """

    name = "interval"

    def __init__(self, results: Results, settings: ReplaySettings, kv_hash_mode: KvHashMode) -> None:
        header, backend = results.summary.header, settings.backend
        self.watch = Watch(header, backend=backend)
        divergence = WatchedDivergence(header, self.watch, backend=backend)
        super().__init__(results, settings, kv_hash_mode, listener=self.watch, divergence=divergence)
        self._planner = IncrementalPlanner(header, self.tables, self.watch, backend=backend)

    def _finish(self, step: GroupStep, forward: Forward) -> None:
        super()._finish(step, forward)
        ledger = None if self.history is None else self.history.ledger.rows[step.pool.index]
        if step.due is not None:
            step.due.mark_verified(step.verify_plan, ledger)
            self.watch.slots_changed(step.pool.index, step.changed_slots)


class WatchedDivergence(SwaDivergence):
    """Divergence figures that count only cells which are new, or whose full slot's entry has changed."""

    def __init__(self, header: TraceHeader, watch: Watch, *, backend: str) -> None:
        super().__init__(header, backend=backend)
        self._watch = watch

    def _count(self, step: GroupStep, forward: Forward, tables: StateTables) -> tuple[int, int]:
        group, states = step.pool.group, self._watch.full_states[step.pool.index]
        if not states.rows.shape[0]:
            return super()._count(step, forward, tables)
        table, kinds = SlotTable(tables.req_to_token[group.table], tables.luts[group.lut]), self._watch.kinds
        figures = np.zeros(2, np.int64)
        count = select(watched_divergence_loops, self._backend)
        count(*self._cached(step, forward), table, states, kinds[step.pool.index], figures)
        return int(figures[0]), int(figures[1])
