"""The interval executor: the stepwise one, on plans without the entries that nothing has happened to.

Most of what a forward reads was read by the forward before it, and gave nothing. An entry (row, position) that was
looked at without a finding is looked at again only when something that it depends on has changed: its cell of the block
table or the one before it, where they lead to, a truth token, the record, bytes, owner or allocation of either slot, or
the request that reads the row. What did give something is looked at in every forward, since it gives a row in each.
So the same kernels yield the same rows in the same order, and cost grows with tokens and changes, not with forwards
times context. `kernels/replay_pass/cells.py` keeps what is looked at; `Watch` is told of every change.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ....kernels.constants import KvHashMode
from ....kernels.replay_pass.divergence import watched_divergence
from ....recorder.capture.host_arrays import runs_to_slots
from ....recorder.state.events import SlotEvent
from ....recorder.state.forward import Forward
from ....recorder.state.pools import GroupPool
from ....recorder.state.requests import RequestTable
from ....recorder.state.tables import StateTables
from ....recorder.state.writes import KvChanges
from ....recorder.trace.header import TraceHeader
from ....recorder.trace.reader import EventView
from ....recorder.trace.schema import ALLOC_FRESH, SLOTS_LISTED, TIER_POOL
from ...checks import HistoryCheck
from ...report.findings import Finding
from ...report.violations import LaunchViolations
from ...run.divergence import SwaDivergence
from ...run.planning import GroupStep
from ...run.sweep import Sweep
from ..stepwise import StepwiseExecutor
from .planning import IntervalPlanner
from .watch import Watch, WatchedTables

Int64Array = npt.NDArray[np.int64]


class IntervalExecutor(StepwiseExecutor):
    """Takes what `StepwiseExecutor` takes, and finds the same.

    `watch` knows which entries are clean; every way in which pools, tables or the ledger change goes through here.
    """

    name = "interval"

    def __init__(
        self,
        header: TraceHeader,
        *,
        kv_hash_mode: KvHashMode,
        backend: str,
        request_table: RequestTable,
        on_violations: Callable[[LaunchViolations], None],
        on_findings: Callable[[list[Finding]], None],
        checks: Sequence[HistoryCheck] = (),
    ) -> None:
        self.watch = Watch(header, backend=backend)
        tables = WatchedTables(header, self.watch, backend=backend)
        super().__init__(
            header,
            kv_hash_mode=kv_hash_mode,
            backend=backend,
            request_table=request_table,
            on_violations=on_violations,
            on_findings=on_findings,
            checks=checks,
            tables=tables,
            divergence=WatchedDivergence(header, self.watch, backend=backend),
        )
        self._looks = IntervalPlanner(header, tables, self.watch, backend=backend)

    def sweep(self, sweep: Sweep, view: EventView) -> None:
        """Verify what the prefix cache holds; raise `UnusableEventError` when its KV changes contradict themselves."""
        changes = KvChanges(view, self.header, sweep.runner)
        for pool in self.pools:
            if pool.group.runner == sweep.runner:
                self.watch.touch(pool.index, changes.slots_of(pool.index))
        super().sweep(sweep, view)

    def check_event(self, view: EventView) -> None:
        """Let the history checks judge an event that is no forward; slots that it gives out or frees have changed."""
        super().check_event(view)
        known = None if self.history is None else self.history.known
        if isinstance(known, SlotEvent) and (known.kind != "alloc" or known.status == ALLOC_FRESH):
            for part in known.parts:
                self.watch.touch(part.group, part.slots)

    def moves_slots(self, view: EventView) -> None:
        """Take for changed what a copy, a transfer or a loss, which was carried out, names."""
        if view.kind == "kv_copy":
            to_pool = view.ints("copy_dst_tier") == TIER_POOL
            self._touch_runs(*(view.ints(f"copy_{column}")[to_pool] for column in ("group", "dst", "count")))
        elif view.kind == "transfer" or view.scalar("status") == SLOTS_LISTED:
            self._touch_runs(*(view.ints(f"slot_{column}") for column in ("group", "start", "count")))
            changed = view.ints("kv_change_slot")
            for pool in self.pools if len(changed) else ():
                self.watch.touch(pool.index, changed)

    def takes_state(self) -> None:
        """Take everything for changed: a keyframe puts its own state in place."""
        self.watch.reset()

    def forget(self) -> None:
        """Take all state for unknown, after a gap whose events may have changed any of it."""
        super().forget()
        self.watch.reset()

    def _touch_runs(self, groups: Int64Array, starts: Int64Array, counts: Int64Array) -> None:
        for index in np.unique(groups).tolist():
            mine = groups == index
            limit = self.pools[index].num_slots  # a loss may list a run that ends behind the pool, or one slot often
            first = np.minimum(starts[mine], limit)
            counted = np.minimum(counts[mine], limit - first)
            if bool(((first == 0) & (counted > 0)).any()) or int(counted.sum()) > limit:
                self.watch.reset_group(index)  # slot 0, which nobody's write touches, may be unknown from now on
            else:
                self.watch.touch(index, runs_to_slots(first, counted))

    def _plan(self, pool: GroupPool, forward: Forward, changes: KvChanges) -> GroupStep:
        return self._looks.plan_pending(pool, forward, changes)

    def _settle(self, step: GroupStep, forward: Forward) -> None:
        ledger = None if self.history is None else self.history.ledger.rows[step.pool.index]
        self._looks.settle(step, forward, ledger=ledger)


class WatchedDivergence(SwaDivergence):
    """SwaDivergence figures that look only at cells which are new, or whose full slot's entry has changed."""

    def __init__(self, header: TraceHeader, watch: Watch, *, backend: str) -> None:
        super().__init__(header, backend=backend)
        self._watch = watch

    def _count(self, step: GroupStep, forward: Forward, tables: StateTables) -> tuple[int, int]:
        group, cells = step.pool.group, self._watch.full_cells[step.pool.index]
        if not cells.book.shape[0]:
            return super()._count(step, forward, tables)
        return watched_divergence(
            cells,
            rows=forward.req_pool_indices,
            starts=self._starts(step, forward),
            ends=forward.prefix_lens + np.maximum(forward.extend_lens, 0),
            req_to_token=tables.req_to_token[group.table],
            lut=tables.luts[group.lut],
            kinds=self._watch.kinds[step.pool.index],
            backend=self._backend,
        )
