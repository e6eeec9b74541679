"""The plans of one forward under the interval executor: what it writes, and those entries that must be looked at."""

import numpy as np
import numpy.typing as npt

from ....kernels.ops.plan.reference import plan_writes
from ....kernels.replay_pass.looks import plan_looks, watch_forward
from ....kernels.replay_pass.settling import settle_forward
from ....recorder.state.forward import Forward
from ....recorder.state.pools import GroupPool
from ....recorder.state.tables import StateTables
from ....recorder.state.writes import KvChanges, own_slots, part_from_unknown, part_from_unstored, readable_prefixes
from ....recorder.trace.header import TraceHeader
from ...run.planning import GroupStep, Planner, expect_stored_tokens, leave_out_unknown
from .watch import Watch

Int64Array = npt.NDArray[np.int64]


class IntervalPlanner(Planner):
    """Plans forwards so that their verify plans hold, in the order of the full ones, what is pending or not clean."""

    def __init__(self, header: TraceHeader, tables: StateTables, watch: Watch, *, backend: str) -> None:
        super().__init__(header, tables, backend=backend)
        self._watch = watch
        self._serial = 0
        self._any_unknown = [False] * len(header.groups)

    def plan_pending(self, pool: GroupPool, forward: Forward, changes: KvChanges) -> GroupStep:
        """Return a group's plans; raise `UnusableEventError` where the forward asks for an absurd number of entries."""
        group, index, tables = pool.group, pool.index, self._tables
        slots = own_slots(pool, forward, tables, backend=self._backend)
        table = tables.req_to_token[group.table]
        lut = tables.luts[group.lut] if group.lut >= 0 else None
        offset = self._header.runners[forward.runner].token_offset
        prefix_lens, _ = readable_prefixes(pool, forward, tables)
        if pool.any_unknown != self._any_unknown[index]:  # what was passed over may count now, or the other way round
            self._any_unknown[index] = pool.any_unknown
            self._watch.group_changed(index)
        touched = np.append(slots, changes.slots_of(index)) if changes else slots
        self._watch.slots_changed(index, touched)
        cells = self._watch.cells[index]
        self._serial += 1
        look = watch_forward(
            cells,
            req_pool_indices=forward.req_pool_indices,
            request_ids=forward.request_ids,
            prefix_lens=prefix_lens,
            event=forward.event,
            serial=self._serial,
            req_to_token=table,
            window=group.window,
            full_to_swa=lut,
            truth_lens=forward.truth_lens,
            token_offset=offset,
            backend=self._backend,
        )
        bs = len(forward.req_pool_indices)
        step = self._step(pool, slots, look.entries, bs)
        step.look, step.reads, step.touched = look, look.reads, touched
        plan_looks(
            cells,
            look,
            req_pool_indices=forward.req_pool_indices,
            prefix_lens=prefix_lens,
            req_to_token=table,
            window=group.window,
            full_to_swa=lut,
            truth_tokens=tables.truth if forward.truth_lens is not None else None,
            truth_lens=forward.truth_lens,
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
            req_to_token=table,
            full_to_swa=lut,
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
            look.marks[unknown] = 1
            part_from_unknown(pool, step.write_plan, bs)
        return step

    def settle(self, step: GroupStep, forward: Forward, *, ledger: Int64Array | None) -> None:
        """Take for clean what a forward looked at and found nothing about, but for what it changed itself."""
        if step.look is None:
            return
        group, index, tables = step.pool.group, step.pool.index, self._tables
        settle_forward(
            self._watch.cells[index],
            step.look,
            req_pool_indices=forward.req_pool_indices,
            event=forward.event,
            req_to_token=tables.req_to_token[group.table],
            full_to_swa=tables.luts[group.lut] if group.lut >= 0 else None,
            truth_lens=forward.truth_lens,
            token_offset=self._header.runners[forward.runner].token_offset,
            verify_plan=step.verify_plan,
            ledger=ledger,
            backend=self._backend,
        )
        self._watch.slots_changed(index, step.touched)
