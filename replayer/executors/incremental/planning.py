"""The plans of one forward under the incremental executor: what it writes, and those entries that are due."""

from typing import Final

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.ops.plan.reference import plan_writes
from ....kernels.replay_pass.due import Readers, mark_forward_verified, plan_due, watch_forward
from ....kernels.replay_pass.entries import SlotTable
from ....recorder.state.forward import Forward
from ....recorder.state.pools import GroupPool
from ....recorder.state.tables import StateTables
from ....recorder.state.writes import KvChanges, own_slots, part_from_unknown, part_from_unstored, readable_prefixes
from ....recorder.trace.header import TraceHeader
from ...run.planning import GroupStep, Planner, expect_stored_tokens, leave_out_unknown
from .watch import Watch

NO_LUT: Final = np.zeros(0, np.int64)


class IncrementalPlanner(Planner):
    """Plans forwards so that their verify plans hold, in the order of the full ones, what is due."""

    def __init__(self, header: TraceHeader, tables: StateTables, watch: Watch, *, backend: str) -> None:
        super().__init__(header, tables, backend=backend)
        self._watch = watch
        self._serial = 0
        self._any_unknown = [False] * len(header.groups)

    def plan_pending(self, pool: GroupPool, forward: Forward, changes: KvChanges) -> GroupStep:
        """Return a group's plans; raise `UnusableEventError` where the forward asks for an absurd number of entries."""
        group, index, tables = pool.group, pool.index, self._tables
        slots = own_slots(pool, forward, tables, backend=self._backend)
        table = SlotTable(tables.req_to_token[group.table], tables.luts[group.lut] if group.lut >= 0 else NO_LUT)
        offset = self._header.runners[forward.runner].token_offset
        prefix_lens, _ = readable_prefixes(pool, forward, tables)
        if pool.any_unknown != self._any_unknown[index]:  # what was passed over may count now, or the other way round
            self._any_unknown[index] = pool.any_unknown
            self._watch.group_changed(index)
        touched = np.append(slots, changes.slots_of(index)) if changes else slots
        self._watch.slots_changed(index, touched)
        states, readers = self._watch.states[index], _readers(forward, prefix_lens)
        self._serial += 1
        due = watch_forward(
            states,
            readers,
            event=forward.event,
            serial=self._serial,
            table=table,
            window=group.window,
            token_offset=offset,
            backend=self._backend,
        )
        bs = len(forward.req_pool_indices)
        step = self._step(pool, slots, due.entries, bs)
        step.due, step.reads, step.touched = due, due.reads, touched
        plan_due(
            states,
            due,
            readers,
            table=table,
            window=group.window,
            truth_tokens=tables.truth if forward.truth_lens is not None else None,
            token_offset=offset,
            num_slots=pool.num_slots,
            verify_plan=step.verify_plan,
            out_of_range=self._out_of_range,
            backend=self._backend,
        )
        plan_writes(
            req_pool_indices=forward.req_pool_indices,
            prefix_lens=prefix_lens,
            extend_lens=forward.extend_lens,
            req_to_token=table.req_to_token,
            full_to_swa=table.lut if group.lut >= 0 else None,
            write_plan=step.write_plan,
            out_of_range=self._out_of_range,
            backend=self._backend,
        )
        step.looked_beyond = bool(self._out_of_range[0])
        expect_stored_tokens(pool, step.verify_plan)
        part_from_unstored(pool, step.write_plan, slots, bs)
        if pool.any_unknown:
            unknown = leave_out_unknown(pool, step.verify_plan)
            step.unknown_entries = int(unknown.sum())
            due.marks[unknown] = 1
            part_from_unknown(pool, step.write_plan, bs)
        return step

    def mark_verified(self, step: GroupStep, forward: Forward, *, ledger: Int64Array | None) -> None:
        """Take for clean what was due and nothing was found about, but for what the forward changed itself."""
        if step.due is None:
            return
        group, index, tables = step.pool.group, step.pool.index, self._tables
        prefix_lens, _ = readable_prefixes(step.pool, forward, tables)
        mark_forward_verified(
            self._watch.states[index],
            step.due,
            _readers(forward, prefix_lens),
            event=forward.event,
            table=SlotTable(tables.req_to_token[group.table], tables.luts[group.lut] if group.lut >= 0 else NO_LUT),
            token_offset=self._header.runners[forward.runner].token_offset,
            verify_plan=step.verify_plan,
            ledger=ledger,
            backend=self._backend,
        )
        self._watch.slots_changed(index, step.touched)


def _readers(forward: Forward, prefix_lens: Int64Array) -> Readers:
    truth_lens = NO_LUT if forward.truth_lens is None else forward.truth_lens
    return Readers(forward.req_pool_indices, forward.request_ids, prefix_lens, truth_lens)
