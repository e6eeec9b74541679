"""The stepwise executor on a device: pieces of the trace run ahead of the host, which takes what they found in order.

The host goes through the events one by one as it does on the CPU, and gets the same violations and figures at the same
places; only that they were found before. Whatever the kernels do not step (copies, transfers, keyframes, losses, sweeps,
events that contradict themselves, forwards that ask for what there is not) is done by the CPU's own code, on the slots and
rows concerned, which come to the host and go back.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from ....kernels.constants import KvHashMode
from ....kernels.gpu.step import STAT_OTHER_INDEX, STAT_OUT_OF_WINDOW, STAT_UNKNOWN
from ....kernels.ops.plan.reference import VerifyPlan, WritePlan
from ....kernels.ops.violation_log import ViolationLog
from ....kernels.ops.write.reference import write
from ....recorder.state.forward import Forward
from ....recorder.state.pools import Endpoint, launch_tag
from ....recorder.state.requests import RequestTable
from ....recorder.trace.batch import EventView, TraceBatch
from ....recorder.trace.header import TraceHeader
from ...checks import HistoryCheck
from ...report.findings import Finding
from ...report.violations import LaunchViolations
from ...run.planning import GroupStep
from ..stepwise import StepwiseExecutor
from .cuda import find_device, reported
from .figures import DeviceDivergence
from .found import Found, verify_rows, write_rows
from .pieces import Piece
from .run_ahead import RunAhead
from .state import DeviceState, UnlikeRecordsError, why_not
from .whose import rows_of, slots_of_event, slots_of_forward

Int64Array = npt.NDArray[np.int64]

_ENDPOINTS: Final[tuple[Endpoint, ...]] = ("HEAD", "TAIL")

# So many forwards may be the host's, and a tenth of all, before the device is no help any more.
_FEW: Final = 32


class DeviceExecutor(StepwiseExecutor):
    """Steps forwards on `device`; `num_on_host` counts those that the host had to step.

    Raises:
        TraceError: there is no such device, or it has too little memory.
    """

    name = "device"

    def __init__(
        self,
        header: TraceHeader,
        *,
        kv_hash_mode: KvHashMode,
        backend: str,
        request_table: RequestTable,
        on_violations: Callable[[LaunchViolations], None],
        on_findings: Callable[[list[Finding]], None],
        device: str,
        checks: Sequence[HistoryCheck] = (),
    ) -> None:
        divergence = DeviceDivergence(header, backend=backend)
        super().__init__(
            header,
            kv_hash_mode=kv_hash_mode,
            backend=backend,
            request_table=request_table,
            on_violations=on_violations,
            on_findings=on_findings,
            checks=checks,
            divergence=divergence,
        )
        self.num_on_host = 0
        self._on_device = 0
        self._figures = divergence
        self._found: Found | None = None
        self._replaced = False
        self._log = ViolationLog.allocate(0)
        self._unused = np.zeros(2, np.int64)
        self._plans = (VerifyPlan.allocate(capacity=0, request_capacity=0), WritePlan.allocate(request_capacity=0))
        self._ahead: RunAhead | None = None
        where = find_device(device)
        if why_not(header):
            return  # the host's own code does it all
        with reported(device, header):
            self._state = DeviceState(header, self.pools, where)
            self._ahead = RunAhead(
                header,
                self._state,
                request_table=request_table,
                backend=backend,
                checks=bool(checks),
                unknown=lambda: [pool.any_unknown for pool in self.pools],
            )
        self._device = device

    def foresee(self, batch: TraceBatch | None) -> None:
        """Tell of the batch behind the one that is given next, None where that is not known."""
        if self._ahead is not None:
            self._ahead.foresee(batch)

    def begin(self, view: EventView) -> None:
        """Take note that an event comes next; whatever may run on the device meanwhile is sent there."""
        if self._ahead is None:
            return
        with reported(self._device, self.header):
            if self._replaced and view.kind != "keyframe":
                self._replaced = False
                self._push_all()
            if self._ahead is not None:
                self._ahead.begin(view)

    @contextmanager
    def on_host(self, view: EventView) -> Iterator[None]:
        """Have the slots that an event names on the host while it is carried out there."""
        if self._ahead is None or self._replaced or not self._ahead.is_hosts(view):
            yield  # while a keyframe is loaded the host's state is the newer one
            return
        slots = slots_of_event(view, self.pools, self.header)
        with reported(self._device, self.header):
            self._ahead.settle()
            for pool, some in zip(self.pools, slots, strict=True):
                self._state.pull_slots(pool, some)
            rows = rows_of(view, self.tables)
            self._state.pull_rows(self.tables, rows)
        yield
        if self._is_ahead() and not self._replaced:
            self._push(slots, rows)

    def forward(self, forward: Forward, view: EventView) -> None:
        """Step one forward; raise `UnusableEventError` when its recorded changes contradict themselves."""
        if self._ahead is None:
            super().forward(forward, view)
            return
        with reported(self._device, self.header):
            found = self._ahead.found(view)
        if found is None:
            self._forward_on_host(forward, view)
            return
        self._on_device += 1
        self._found = found
        try:
            if self._checks:
                super().forward(forward, view)
            else:
                self._take_found(forward, found)
        finally:
            self._found = None

    def piece_at(self, batch: TraceBatch, at: int) -> Piece | None:
        """Return the piece, drained, that an event of a batch was stepped in, None where the event is for the host."""
        if self._ahead is None or self._replaced:
            return None
        with reported(self._device, self.header):
            view = batch.event(at)
            self._ahead.begin(view)
            return self._ahead.drained(view)

    def passed(self, batch: TraceBatch, at: int) -> None:
        """Take note that the host has gone through a batch up to an event, that one included."""
        if self._ahead is not None:
            self._ahead.begin(batch.event(at))

    def take_quiet(self, piece: Piece, runner: int, steps: Int64Array) -> None:
        """Count what the launches of a runner's steps looked at, in which nothing was found."""
        self._on_device += len(steps)
        for number, index in enumerate(self._state.groups_of(runner)):
            group = self.header.groups[index]
            reads, written = int(piece.reads[steps, number].sum()), int(piece.written[steps].sum())
            unknown = int(piece.stats[steps, number, STAT_UNKNOWN].sum())
            self.unknown_entries += unknown
            self.entries_read += reads
            for half in group.halves:
                for endpoint in _ENDPOINTS:
                    tag = launch_tag(endpoint, half, group.kind)
                    self.launcher.slot_counters[tag] += reads + written
                    self.launcher.kernel_counters[tag] += 2 * len(steps)
                    self.verified += reads - unknown
                    self.written += written

    def take_divergence(self, piece: Piece, events: Int64Array) -> None:
        """Add the figures of forwards with requests, by their places in the batch, in which nothing was found."""
        columns = [piece.batch.scalar_ints(name)[events].tolist() for name in ("event", "forward", "runner")]
        for step, event, forward, runner in zip(piece.steps[events - piece.first].tolist(), *columns, strict=True):
            groups = self._state.groups_of(runner)
            reads = dict(zip(groups, piece.reads[step].tolist(), strict=False))
            counts = {
                index: (int(stats[STAT_OUT_OF_WINDOW]), int(stats[STAT_OTHER_INDEX]))
                for index, stats in zip(groups, piece.stats[step], strict=False)
                if self.header.groups[index].lut >= 0
            }
            self.divergence.add(event, forward, runner, reads, counts)

    def loads_state(self) -> None:
        """Take note that the state on the host is another one now."""
        self._replaced = self._ahead is not None

    def forget(self) -> None:
        """Take all state for unknown, after a gap whose events may have changed any of it."""
        super().forget()
        if self._ahead is not None:
            with reported(self._device, self.header):
                self._ahead.settle()
                self._state.forget()
                self._ahead.settle()

    def _forward_on_host(self, forward: Forward, view: EventView) -> None:
        self.num_on_host = (self.num_on_host or 0) + 1
        with reported(self._device, self.header):
            self._ahead_or_fail().settle()
            rows = rows_of(view, self.tables)
            self._state.pull_rows(self.tables, rows)
            slots = slots_of_forward(forward, view, self.pools, self.tables, self.header)
            for pool, some in zip(self.pools, slots, strict=True):
                # This forward's bytes may have landed on the device; history checks look at those before, and have them.
                self._state.pull_slots(pool, some, with_bytes=not self._checks)
        super().forward(forward, view)
        self._push(slots, rows)
        if self.num_on_host > _FEW + self._on_device // 10:
            self._give_up()

    def _push(self, slots: list[Int64Array], rows: Int64Array) -> None:
        try:
            with reported(self._device, self.header):
                self._state.push_rows(self.tables, rows)
                for pool, some in zip(self.pools, slots, strict=True):
                    self._state.push_slots(pool, some)
                self._ahead_or_fail().settle()
        except UnlikeRecordsError:
            self._give_up(but=slots)

    def _push_all(self) -> None:
        self._ahead_or_fail().settle()
        self._push([np.arange(pool.num_slots) for pool in self.pools], self._state.every_row())

    def _give_up(self, but: list[Int64Array] | None = None) -> None:
        """Bring everything to the host, all but slots that it has already, and leave the rest of the trace to it."""
        with reported(self._device, self.header):
            self._ahead_or_fail().settle()
            self._state.pull_rows(self.tables, self._state.every_row())
            for index, pool in enumerate(self.pools):
                wanted = np.ones(pool.num_slots, np.bool_)
                if but is not None:
                    wanted[but[index]] = False
                self._state.pull_slots(pool, np.flatnonzero(wanted))
        self._ahead = None
        del self._state
        self._figures.counted = None

    def _is_ahead(self) -> bool:
        return self._ahead is not None

    def _ahead_or_fail(self) -> RunAhead:
        if self._ahead is None:
            raise RuntimeError("nothing is on the device any more")
        return self._ahead

    # With the history checks the host plans each forward for them and keeps what they look at: tokens, positions, bytes
    # and writers. The launches are the device's.

    def _verify(self, endpoint: Endpoint, half: str, step: GroupStep, forward: Forward) -> None:
        if self._found is None:
            super()._verify(endpoint, half, step, forward)
            return
        self._take_verify(self._found, endpoint, half, step, forward)

    def _write(self, endpoint: Endpoint, half: str, step: GroupStep, forward: Forward) -> None:
        if self._found is None:
            super()._write(endpoint, half, step, forward)
            return
        if self._checks and endpoint == "TAIL" and half == step.pool.group.halves[0]:
            self._keep_records(half, step, forward)
        self._take_write(self._found, endpoint, half, step, forward)

    def _keep_records(self, half: str, step: GroupStep, forward: Forward) -> None:
        """Write the records that history checks read; they look at tokens and positions."""
        self._log.clear()
        write(
            canary=step.pool.pool.tail[half],
            tag=launch_tag("TAIL", half, step.pool.group.kind),
            plan=step.write_plan,
            input_ids=forward.input_ids,
            positions=forward.positions,
            out_cache_loc=step.slots,
            expected_tokens=None,
            expected_positions=None,
            chain_step_assert=False,
            sources=(),
            kv_hash_mode=KvHashMode.NONE,
            violations=self._log,
            slot_counter=self._unused[:1],
            kernel_counter=self._unused[1:],
            backend=self._backend,
        )

    # Without them the host only hands on what was found.

    def _take_found(self, forward: Forward, found: Found) -> None:
        steps = []
        for number, index in enumerate(self._state.groups_of(forward.runner)):
            step = GroupStep(self.pools[index], forward.input_ids, self._plans[1], self._plans[0])
            step.reads = int(found.reads[number])
            step.unknown_entries = int(found.stats[number, STAT_UNKNOWN])
            steps.append(step)
        self.unknown_entries += sum(step.unknown_entries for step in steps)
        self.entries_read += sum(step.reads for step in steps)
        if len(forward.req_pool_indices):
            self._launch_heads(steps, forward)
            self._verify_rings(steps, forward)
            self._launch_tails(steps, forward)
        self._figures.counted = found.stats[:, [STAT_OUT_OF_WINDOW, STAT_OTHER_INDEX]]
        self.divergence.forward(forward, steps, self.tables)
        self._figures.counted = None

    def _take_verify(self, found: Found, endpoint: Endpoint, half: str, step: GroupStep, forward: Forward) -> None:
        pool = step.pool
        tag = launch_tag(endpoint, half, pool.group.kind)
        self.launcher.slot_counters[tag] += step.reads
        self.launcher.kernel_counters[tag] += 1
        self.verified += step.reads - step.unknown_entries
        if len(found.verify):
            number = self._state.groups_of(forward.runner).index(pool.index)
            rows = verify_rows(found, number, forward=forward, pool=pool, endpoint=endpoint, half=half)
            if rows is not None:
                self._on_violations(rows)

    def _take_write(self, found: Found, endpoint: Endpoint, half: str, step: GroupStep, forward: Forward) -> None:
        pool = step.pool
        tag = launch_tag(endpoint, half, pool.group.kind)
        self.launcher.slot_counters[tag] += found.written
        self.launcher.kernel_counters[tag] += 1
        self.written += found.written
        if len(found.write):
            number = self._state.groups_of(forward.runner).index(pool.index)
            rows = write_rows(found, number, forward=forward, pool=pool, endpoint=endpoint, half=half)
            if rows is not None:
                self._on_violations(rows)
