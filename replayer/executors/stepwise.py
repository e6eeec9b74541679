"""The stepwise executor: what the canary does in one forward, kernel by kernel, on the rebuilt pools.

This is section 9 of the canary's semantics. Nothing is skipped for lack of room: plans and violation logs are sized
to fit before each launch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import numpy as np
import numpy.typing as npt

from ...kernels.constants import KvHashMode
from ...kernels.replay_pass.state import mark_writers, store_bytes
from ...recorder.state.forward import Forward
from ...recorder.state.pools import Endpoint, GroupPool, launch_tag
from ...recorder.state.requests import RequestTable
from ...recorder.state.tables import StateTables
from ...recorder.state.writes import KvChanges
from ...recorder.trace.header import PoolGroup, TraceHeader
from ...recorder.trace.reader import EventView, TraceBatch
from ...recorder.trace.schema import PHASE_AFTER, PHASE_BEFORE
from ..checks import HistoryCheck
from ..checks.panel import Panel
from ..checks.view import ForwardView, GroupReads
from ..report.findings import Finding
from ..report.violations import LaunchViolations
from ..run.divergence import SwaDivergence
from ..run.launch import Launcher, sweep_violations, verify_violations, write_violations
from ..run.out_of_range import beyond_table, explain_plan, explain_requests, explain_writes
from ..run.planning import GroupStep, Planner, expected_tokens, leave_out_unknown
from ..run.sweep import Sweep, explain_sweep

Int64Array = npt.NDArray[np.int64]
ENDPOINTS: Final[tuple[Endpoint, ...]] = ("HEAD", "TAIL")


class StepwiseExecutor:
    """Steps forwards and sweeps through plan, verify and write on rebuilt pools.

    `launcher` holds the canary's own health counters; `verified` and `written` count what those launches looked at;
    `unknown_entries` counts plan entries that were left out because lost events may have rewritten their slot,
    `entries_read` all entries of prefixes and sweeps, once for a pool group;
    `history` is what the history checks share, None without any; `num_on_host` counts the forwards that a replay on a GPU
    left to the CPU, None where there is no GPU; `name` is what a summary calls the executor that ran.
    """

    name = "stepwise"

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
        tables: StateTables | None = None,
        divergence: SwaDivergence | None = None,
    ) -> None:
        self.header = header
        self.tables = StateTables(header, backend=backend) if tables is None else tables
        self.pools = [
            GroupPool(group, index=index, kv_hash_mode=kv_hash_mode) for index, group in enumerate(header.groups)
        ]
        self.launcher = Launcher(backend=backend)
        self.divergence = SwaDivergence(header, backend=backend) if divergence is None else divergence
        self.verified = 0
        self.written = 0
        self.unknown_entries = 0
        self.entries_read = 0
        self.num_on_host: int | None = None
        self._backend = backend
        self._request_table = request_table
        self._on_violations = on_violations
        self._on_findings = on_findings
        self._checks = checks
        self.panel = next((check for check in checks if isinstance(check, Panel)), None)
        self.history = None if self.panel is None else self.panel.history
        self._planner = Planner(header, self.tables, backend=backend)

    def forward(self, forward: Forward, view: EventView) -> None:
        """Step one forward; raise `UnusableEventError` when its recorded changes contradict themselves."""
        changes = KvChanges(view, self.header, forward.runner)
        self.tables.apply_changes(view)
        steps = [self._plan(pool, forward, changes) for pool in self.pools if pool.group.runner == forward.runner]
        self.unknown_entries += sum(step.unknown_entries for step in steps)
        self.entries_read += sum(step.reads for step in steps)
        self._check(forward, view, steps)
        expected = expected_tokens(forward, self.header, self._request_table, backend=self._backend)
        if len(forward.req_pool_indices):
            for step in steps:
                for half in step.pool.group.halves:
                    self._verify("HEAD", half, step, forward)
                    self._write("HEAD", half, step, forward, expected)
        changes.apply(PHASE_BEFORE, self.pools, backend=self._backend)
        # A ring buffer's prefix is read before this forward's own writes land on it, so that is when it is judged.
        self._tails(steps, forward, verify=lambda group: group.reads_before_write)
        self._store_bytes(steps, forward)
        changes.apply(PHASE_AFTER, self.pools, backend=self._backend)
        self._tails(steps, forward, verify=lambda group: not group.reads_before_write, write=True, expected=expected)
        for step in steps:
            self._finish(step, forward)
            self._settle(step, forward)
        self.tables.apply_forward(forward)
        self.divergence.forward(forward, steps, self.tables)

    def sweep(self, sweep: Sweep, view: EventView) -> None:
        """Verify what the prefix cache holds; raise `UnusableEventError` when its KV changes contradict themselves."""
        changes = KvChanges(view, self.header, sweep.runner)
        for phase in (PHASE_BEFORE, PHASE_AFTER):
            changes.apply(phase, self.pools, backend=self._backend)
        for index, plan in sweep.plans.items():
            pool = self.pools[index]
            unknown = int(leave_out_unknown(pool, plan).sum()) if pool.any_unknown else 0
            self.unknown_entries += unknown
            self.entries_read += int(plan.num_valid[0])
            for half in pool.group.halves:
                log = self.launcher.verify("SWEEP", half, pool, plan, check_tokens=False)
                self.verified += int(plan.num_valid[0]) - unknown
                if log.write_index[0]:
                    self._on_violations(sweep_violations(log, plan=plan, sweep=sweep, pool=pool, half=half))
            self._take(explain_sweep(sweep, index, pool.num_slots))

    def check_event(self, view: EventView) -> None:
        """Let the history checks judge an event that is no forward, before it changes anything."""
        for check in self._checks:
            self._take(check.event(view))

    def finish(self) -> None:
        """Let the history checks judge the end of a complete trace."""
        for check in self._checks:
            self._take(check.finish())

    def launched(self, pool: GroupPool, *, forwards: int, reads: int, written: int) -> None:
        """Count launches on a group's buffers that were carried out elsewhere: its entries read, records written."""
        self.entries_read += reads
        for endpoint in ENDPOINTS:
            for half in pool.group.halves:
                tag = launch_tag(endpoint, half, pool.group.kind)
                self.launcher.slot_counters[tag] += reads + written
                self.launcher.kernel_counters[tag] += 2 * forwards
                self.verified += reads
                self.written += written

    def moves_slots(self, view: EventView) -> None:
        """Take note of a copy, a transfer or a loss that was carried out."""

    def foresee(self, batch: TraceBatch | None) -> None:
        """Tell of the batch of events behind the one that comes next, None where that is not known."""

    def begin(self, view: EventView) -> None:
        """Take note that an event comes next, before anything is done with it."""

    def on_host(self, view: EventView) -> AbstractContextManager[None]:
        """Return within what an event between forwards is carried out on `tables` and `pools`."""
        return nullcontext()

    def loads_state(self) -> None:
        """Take note that a part of a keyframe has replaced what `tables` and `pools` held."""

    def takes_state(self) -> None:
        """Take note that the state is another one now."""

    def forget(self) -> None:
        """Take all state for unknown, after a gap whose events may have changed any of it."""
        self.tables.forget()
        for check in self._checks:
            check.forget()
        for pool in self.pools:
            pool.forget()
            pool.forget_host()

    def _plan(self, pool: GroupPool, forward: Forward, changes: KvChanges) -> GroupStep:
        del changes
        return self._planner.plan(pool, forward)

    def _settle(self, step: GroupStep, forward: Forward) -> None:
        """Take note of what a forward found, tables and pools being as it leaves them."""

    def _check(self, forward: Forward, event: EventView, steps: list[GroupStep]) -> None:
        if not self._checks:
            return
        bs = len(forward.req_pool_indices)
        groups = [
            GroupReads(
                pool=step.pool,
                plan=step.verify_plan,
                written=step.slots,
                write_offsets=step.write_plan.offsets[: bs + 1],
                marks=None if step.look is None else step.look.marks,
            )
            for step in steps
        ]
        view = ForwardView(event=event, forward=forward, tables=self.tables, groups=groups)
        for check in self._checks:
            self._take(check.forward(view))

    def _take(self, findings: list[Finding]) -> None:
        if findings:
            self._on_findings(findings)

    def _tails(
        self,
        steps: list[GroupStep],
        forward: Forward,
        *,
        verify: Callable[[PoolGroup], bool],
        write: bool = False,
        expected: Int64Array | None = None,
    ) -> None:
        if not len(forward.req_pool_indices):
            return
        for step in steps:
            for half in step.pool.group.halves:
                if verify(step.pool.group):
                    self._verify("TAIL", half, step, forward)
                if write:
                    self._write("TAIL", half, step, forward, expected)

    def _verify(self, endpoint: Endpoint, half: str, step: GroupStep, forward: Forward) -> None:
        pool, plan = step.pool, step.verify_plan
        log = self.launcher.verify(endpoint, half, pool, plan, check_tokens=forward.truth_lens is not None)
        # What need not be looked at again is verified all the same.
        self.launcher.slot_counters[launch_tag(endpoint, half, pool.group.kind)] += step.reads - int(plan.num_valid[0])
        self.verified += step.reads - step.unknown_entries
        if log.write_index[0]:
            if step.look is not None:
                step.look.marks[log.entries[: log.num_rows]] = 1
            self._on_violations(
                verify_violations(log, plan=plan, forward=forward, pool=pool, endpoint=endpoint, half=half)
            )
        step.looked_beyond |= bool(log.out_of_range[0])

    def _write(
        self, endpoint: Endpoint, half: str, step: GroupStep, forward: Forward, expected: Int64Array | None
    ) -> None:
        pool, plan = step.pool, step.write_plan
        counter = self.launcher.slot_counters[launch_tag(endpoint, half, pool.group.kind) :]
        before = int(counter[0])
        log = self.launcher.write(endpoint, half, pool, plan, forward, slots=step.slots, expected_tokens=expected)
        self.written += int(counter[0]) - before
        if log.write_index[0]:
            self._on_violations(
                write_violations(log, plan=plan, forward=forward, pool=pool, endpoint=endpoint, half=half)
            )
        step.looked_beyond |= bool(log.out_of_range[0])

    def _store_bytes(self, steps: list[GroupStep], forward: Forward) -> None:
        slots = {step.pool.index: step.slots for step in steps}
        seen = dict.fromkeys(slots, 0)
        for (group, _), data in zip(self.header.streams(forward.runner), forward.kv_bytes, strict=True):
            pool = self.pools[group].pool
            store_bytes(slots=slots[group], data=data, pool=pool.kv[seen[group]], backend=self._backend)
            seen[group] += 1

    def _finish(self, step: GroupStep, forward: Forward) -> None:
        bs = len(forward.request_ids)
        mark_writers(
            slots=step.slots,
            offsets=step.write_plan.offsets[: bs + 1],
            request_ids=forward.request_ids,
            event=forward.event + 1,  # 0 stands for nobody, so that untouched slots stay zero pages
            forward=forward.forward,
            writers=step.pool.pool.writers,
            backend=self._backend,
        )
        step.pool.learn(step.slots)
        shape = self.tables.req_to_token[step.pool.group.table].shape
        if step.looked_beyond or bool(beyond_table(forward, shape).any()):
            findings = explain_plan(step.verify_plan, forward, step.pool, shape, self._request_table)
            findings += explain_writes(step.slots, step.write_plan, forward, step.pool, self._request_table)
            findings += explain_requests(forward, step.pool, shape, self._request_table)
            self._take(findings)
