"""The stepwise executor: what the canary does in one forward, kernel by kernel, on the rebuilt pools.

This is section 9 of the canary's semantics. Nothing is skipped for lack of room: plans and violation logs are sized
to fit before each launch.
"""

from contextlib import AbstractContextManager, nullcontext

from ...kernels.arrays import Int64Array
from ...kernels.constants import KvHashMode
from ...recorder.state.apply import EventApplier
from ...recorder.state.events import KnownEvent, TransferEvent
from ...recorder.state.forward import Forward
from ...recorder.state.history import ReplayState, RunnerActivity
from ...recorder.state.pools import ENDPOINTS, Endpoint, GroupPool, launch_tag
from ...recorder.state.tables import StateListener, StateTables
from ...recorder.state.writes import KvChanges, Launcher
from ...recorder.trace.reader import EventView
from ..checks import make_checks
from ..checks.history import ForwardView, GroupReads
from ..model.model_bytes import ModelBytes
from ..report.report import Results
from ..report.violations import launch_violations
from ..run.divergence import SwaDivergence
from ..run.out_of_range import beyond_table, explain_forward, explain_sweep
from ..run.planning import GroupStep, Planner, expected_tokens, leave_out_unknown, read_sweep
from ..run.settings import ReplaySettings
from ..run.transfers import Transfers


class StepwiseExecutor(EventApplier[GroupStep]):
    """Steps forwards and sweeps through plan, verify and write on rebuilt pools, in the order of `EventApplier`.

    `launcher` holds the canary's own health counters. The summary of `results` counts as `verified` and `written` the entries of
    those launches, as `unknown_entries` those left out because lost events may have rewritten their slot, as `entries_read` all
    entries of prefixes and sweeps, once for a pool group. `checks` are the history checks and `history` what they share, None
    without any; `num_on_host` counts the forwards that a replay on a GPU left to the CPU, None if there is no GPU; `name` is what
    a summary calls the executor. `transfers` judges transfers between engines; whoever replays sets it.
    """

    name = "stepwise"

    def __init__(
        self,
        results: Results,
        settings: ReplaySettings,
        kv_hash_mode: KvHashMode,
        *,
        listener: StateListener | None = None,
        divergence: SwaDivergence | None = None,
    ) -> None:
        header, backend, names = results.summary.header, settings.backend, results.request_table
        self.results = results
        self.checks = make_checks(
            settings.checks,
            header=header,
            request_table=names,
            backend=backend,
            oracle=settings.oracle,
            model=settings.model,
            beside=[ModelBytes] if settings.model else [],
        )
        self.history = None if self.checks is None else self.checks.history
        state = ReplayState(
            header=header,
            tables=StateTables(header, backend=backend, listener=listener),
            pools=[GroupPool(g, index=i, kv_hash_mode=kv_hash_mode) for i, g in enumerate(header.groups)],
            request_table=names,
            activity=RunnerActivity(len(header.runners)),
            history=self.history,
        )
        super().__init__(state, backend=backend, listener=listener)
        if self.history is not None:
            self.history.tables = self.tables
        self.launcher = Launcher(backend=backend)
        self.divergence = SwaDivergence(header, backend=backend) if divergence is None else divergence
        self.transfers: Transfers | None = None
        self.num_on_host: int | None = None
        self._request_table = names
        self._planner: Planner = Planner(header, self.tables, backend=backend)
        self._expected: Int64Array | None = None

    # --- forwards

    def _plan(self, pool: GroupPool, forward: Forward, changes: KvChanges) -> GroupStep:
        return self._planner.plan(pool, forward, changes)

    def _judge(self, forward: Forward, view: EventView, steps: list[GroupStep]) -> None:
        self.results.summary.unknown_entries += sum(step.unknown_entries for step in steps)
        self.results.summary.entries_read += sum(step.reads for step in steps)
        if self.checks is not None:
            self.results.findings(self.checks.forward(self._view(forward, view, steps)))
        self._expected = expected_tokens(forward, self.header, self._request_table, backend=self._backend)

    def _view(self, forward: Forward, event: EventView, steps: list[GroupStep]) -> ForwardView:
        bs = len(forward.req_pool_indices)
        groups = [
            GroupReads(
                pool=step.pool,
                plan=step.verify_plan,
                written=step.slots,
                write_offsets=step.write_plan.offsets[: bs + 1],
                marks=None if step.due is None else step.due.marks,
            )
            for step in steps
        ]
        return ForwardView(event=event, forward=forward, tables=self.tables, groups=groups)

    def _verify(self, endpoint: Endpoint, half: str, step: GroupStep, forward: Forward) -> None:
        pool, plan = step.pool, step.verify_plan
        log = self.launcher.verify(endpoint, half, pool, plan, check_tokens=forward.truth_lens is not None)
        # What need not be verified again counts all the same.
        self.launcher.slot_counters[launch_tag(endpoint, half, pool.group.kind)] += step.reads - int(plan.num_valid[0])
        self.results.summary.verified += step.reads - step.unknown_entries
        if log.write_index[0]:
            if step.due is not None:
                step.due.marks[log.entries[: log.num_rows]] = 1
            self.results.violations(launch_violations(log, plan, forward, pool, endpoint, half))
        step.out_of_range |= bool(log.out_of_range[0])

    def _write(self, endpoint: Endpoint, half: str, step: GroupStep, forward: Forward) -> None:
        pool, plan = step.pool, step.write_plan
        counter = self.launcher.slot_counters[launch_tag(endpoint, half, pool.group.kind) :]
        before = int(counter[0])
        log = self.launcher.write(
            endpoint, half, pool, plan, forward, slots=step.slots, expected_tokens=self._expected, asserts_steps=True
        )
        self.results.summary.written += int(counter[0]) - before
        if log.write_index[0]:
            self.results.violations(launch_violations(log, plan, forward, pool, endpoint, half))
        step.out_of_range |= bool(log.out_of_range[0])

    def _finish(self, step: GroupStep, forward: Forward) -> None:
        """Explain look-ups that no pool or table can answer."""
        shape = self.tables.req_to_token[step.pool.group.table].shape
        if step.out_of_range or bool(beyond_table(forward, shape).any()):
            self.results.findings(explain_forward(step, forward, shape, self._request_table))

    def _finish_forward(self, forward: Forward, steps: list[GroupStep]) -> None:
        self.divergence.forward(forward, steps, self.tables)

    # --- what happens between forwards

    def _judge_event(self, view: EventView) -> KnownEvent | None:
        if self.checks is None:
            return super()._judge_event(view)
        self.results.findings(self.checks.event(view))
        return self.checks.history.known

    def sweep(self, view: EventView) -> None:
        """Verify what the prefix cache holds."""
        sweep, summary = read_sweep(view, self.header), self.results.summary
        super().sweep(view)
        for index, plan in sweep.plans.items():
            pool = self.pools[index]
            unknown = int(leave_out_unknown(pool, plan).sum()) if pool.any_unknown else 0
            summary.unknown_entries += unknown
            summary.entries_read += int(plan.num_valid[0])
            for half in pool.group.halves:
                log = self.launcher.verify("SWEEP", half, pool, plan, check_tokens=False)
                summary.verified += int(plan.num_valid[0]) - unknown
                if log.write_index[0]:
                    self.results.violations(launch_violations(log, plan, sweep, pool, "SWEEP", half))
            self.results.findings(explain_sweep(sweep, index, pool.num_slots))

    def _sent(self, event: TransferEvent, changes: KvChanges) -> None:
        if self.transfers is not None:
            self.results.findings(self.transfers.send(event, changes))

    def _received(self, event: TransferEvent) -> None:
        if self.transfers is None:
            super()._received(event)
        else:
            self.results.findings(self.transfers.receive(event))

    def forget(self) -> None:
        """Take all state for unknown, after a gap whose events may have changed any of it."""
        super().forget()
        if self.checks is not None:
            self.checks.forget()

    def finish(self) -> None:
        """Let the history checks judge the end of a complete trace."""
        if self.checks is not None:
            self.results.findings(self.checks.finish())

    def launched(self, pool: GroupPool, *, forwards: int, reads: int, written: int, unknown: int = 0) -> None:
        """Count launches on a group's buffers that were carried out elsewhere: entries read, `unknown` ones among them, and
        records written.
        """
        summary = self.results.summary
        for endpoint in ENDPOINTS:
            for half in pool.group.halves:
                tag = launch_tag(endpoint, half, pool.group.kind)
                self.launcher.slot_counters[tag] += reads + written
                self.launcher.kernel_counters[tag] += 2 * forwards
                summary.verified += reads - unknown
                summary.written += written

    # --- what an executor of another kind does besides

    def collect(self) -> None:
        """Report what launches found that nobody has waited for."""

    def begin(self, view: EventView) -> None:
        """Take note that an event comes next, before anything is done with it."""

    def on_host(self, view: EventView) -> AbstractContextManager[None]:
        """Return within what an event between forwards is applied to `tables` and `pools`."""
        return nullcontext()

    def loads_state(self) -> None:
        """Take note that a part of a keyframe has replaced what `tables` and `pools` held."""
