"""The plans of one forward under the incremental executor: what it writes, and those entries that are due."""

from typing import Final

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.replay_pass.due import ForwardReads, Readers
from ....kernels.replay_pass.entries import SlotTable
from ....recorder.state.forward import Forward
from ....recorder.state.tables import StateTables
from ....recorder.state.writes import KvChanges
from ....recorder.trace.header import TraceHeader
from ...run.planning import GroupStep, Planner
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
