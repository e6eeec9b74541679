"""The stepwise executor with its pools and tables on a device, stepped there by the Triton ops.

Each forward is launched as it comes, and nothing waits for it: the host plans what is written, keeps the tables and sends
along what changed in them. What launches found is read, and reported in order, when something needs it: a log that may
become full, an event that the host carries out, the end. Until then a forward's writers are not marked either, so that
its rows find them as they were.

With history checks, and whenever something may have to be explained from the state as it is in that very forward (a slot or
table entry that there is not, unknown slots, a forward that failed), each forward is read at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.constants import KvHashMode
from ....kernels.ops.plan.reference import VerifyPlan, WritePlan
from ....kernels.ops.violation_log import ViolationLog
from ....kernels.ops.write.reference import write
from ....recorder.capture.host_arrays import ragged_index
from ....recorder.state.forward import Forward
from ....recorder.state.pools import Endpoint, GroupPool, launch_tag
from ....recorder.state.writes import KvChanges, plan_own_writes, readable_prefixes
from ....recorder.trace.batch import EventView
from ...report.report import Results
from ...report.violations import launch_violations
from ...run.out_of_range import beyond_table
from ...run.planning import GroupStep
from ...run.settings import ReplaySettings
from ..stepwise import StepwiseExecutor
from .cuda import find_device, reported
from .event_slots import slots_of_event
from .launches import ForwardLaunches
from .logs import FoundRows
from .mirror import TableNotes, leaves

_HOST_KINDS: Final = frozenset({"kv_copy", "loss", "sweep", "transfer"})  # they change or read what slots hold
_MAX_WIDTH: Final = 1 << 62
_NO_VERIFY_PLAN: Final = VerifyPlan.allocate(capacity=0, request_capacity=0)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A forward under way."""

    forward: Forward
    steps: list[GroupStep]


class DeviceExecutor(StepwiseExecutor):
    """Steps forwards on the device of the settings; rows that are merged or counted are reported before the next event.

    Raises:
        TraceError: there is no such device, or it has too little memory.
    """

    name = "device"

    def __init__(self, results: Results, settings: ReplaySettings, kv_hash_mode: KvHashMode) -> None:
        header = results.summary.header
        self._notes = TableNotes(header)
        super().__init__(results, settings, kv_hash_mode, listener=self._notes)
        self.num_on_host = 0
        self._device = device = settings.device
        counted = settings.fail_fast or settings.max_violations is not None
        self._at_once = settings.merges_rows or counted or self.checks is not None
        self._launched_forwards: list[_Launched] = []
        self._loading = False
        self._beyond = np.zeros(1, np.int64)
        self._prefix_lens = [
            np.zeros(0, np.int64) for _ in self.pools
        ]  # of the forward that is stepped, as it can be read
        self._host_log = ViolationLog.allocate(0)
        where = find_device(device)
        with reported(device, header):
            self._launches = ForwardLaunches(header, self.pools, self._notes, where, backend=settings.backend)
        self._mirror = self._launches.mirror

    def forward(self, forward: Forward, view: EventView) -> None:
        """Step one forward."""
        changes = KvChanges(view, self.header, forward.runner)
        self.tables.apply_changes(view)
        steps = [self._plan(pool, forward, changes) for pool in self.pools if pool.group.runner == forward.runner]
        self._judge(forward, view, steps)
        self._at_once |= self._notes.odd or self._may_leave_tables(forward, steps)
        with reported(self._device, self.header):
            if not self._launches.has_room(forward, steps):
                self._collect()
                self._launches.make_room(forward, steps)
            self._launches.launch(
                forward,
                changes,
                steps,
                self._prefix_lens,
                self._expected,
                self.tables,
                on_stored=lambda: self._keep_on_host(forward, steps),
            )
            self._launched_forwards.append(_Launched(forward, steps))
            if self._at_once or forward.failed or any(step.pool.any_unknown for step in steps):
                self._collect()
        self.tables.apply_forward(forward)
        self._finish_forward(forward, steps)

    def collect(self) -> None:
        """Wait for the launches under way and report what they found."""
        with reported(self._device, self.header):
            self._collect()

    def begin(self, view: EventView) -> None:
        """Take note that an event comes next, before anything is done with it."""
        if self._loading and view.kind != "keyframe":
            self._loading = False
            with reported(self._device, self.header):
                self._push_all()

    @contextmanager
    def on_host(self, view: EventView) -> Iterator[None]:
        """Have the slots that an event names on the host while it is carried out there."""
        slots = None
        if view.kind in _HOST_KINDS or len(view.ints("kv_change_slot")):
            slots = slots_of_event(view, self.pools, self.header)
            with reported(self._device, self.header):
                self._collect()
                for pool, some in zip(self.pools, slots, strict=True):
                    self._mirror.pull_slots(pool, some)
        yield
        if slots is not None:
            with reported(self._device, self.header):
                for pool, some in zip(self.pools, slots, strict=True):
                    self._mirror.push_slots(pool, some)

    def loads_state(self) -> None:
        """Take note that a part of a keyframe has replaced what `tables` and `pools` held."""
        self.collect()
        self._loading = True

    def forget(self) -> None:
        """Take all state for unknown, after a gap whose events may have changed any of it."""
        self.collect()
        super().forget()
        with reported(self._device, self.header):
            self._mirror.push_tables(self.tables)

    def _push_all(self) -> None:
        self._mirror.push_tables(self.tables)
        for pool in self.pools:
            self._mirror.push_slots(pool, np.arange(pool.num_slots))

    def _plan(self, pool: GroupPool, forward: Forward, changes: KvChanges) -> GroupStep:
        """Plan what a group writes; what it reads only where the host needs it, the device plans that itself."""
        prefix_lens, _ = readable_prefixes(pool, forward, self.tables)
        self._prefix_lens[pool.index] = prefix_lens
        if self.checks is not None or pool.any_unknown:
            return super()._plan(pool, forward, changes)
        plan = WritePlan.allocate(request_capacity=len(prefix_lens))  # kept until what the launches found is reported
        self._beyond[0] = 0
        slots = plan_own_writes(pool, forward, self.tables, prefix_lens, plan, self._beyond, backend=self._backend)
        step = GroupStep(pool, slots, plan, _NO_VERIFY_PLAN)
        step.out_of_range = bool(self._beyond[0])
        step.reads = int(_reads(pool, forward, prefix_lens).sum())
        return step

    def _may_leave_tables(self, forward: Forward, steps: list[GroupStep]) -> bool:
        """Whether a forward may ask for a slot or a table entry that there is not; it may say so too often."""
        if any(step.out_of_range or leaves(step.slots, step.pool.num_slots) for step in steps):
            return True
        rows, prefix, extend = forward.req_pool_indices, forward.prefix_lens, forward.extend_lens
        if not len(rows):
            return False
        shapes = [table.shape for table in self.tables.req_to_token]
        if self.tables.truth is not None and forward.truth_lens is not None:
            if leaves(forward.truth_lens, self.tables.truth.shape[1] + 1):
                return True
            shapes.append((len(self.tables.truth), _MAX_WIDTH))
        num_rows, width = (min(lens) for lens in zip(*shapes, strict=True))
        return leaves(rows, num_rows) or leaves(prefix, width + 1) or leaves(prefix + extend, width + 1)

    def _keep_on_host(self, forward: Forward, steps: list[GroupStep]) -> None:
        """Keep what history checks read on the host, too: a forward's bytes, and of records tokens and positions."""
        if self.checks is None:
            return
        self._store_bytes(steps, forward)
        for step in steps if len(forward.req_pool_indices) else ():
            self._keep_records(step, forward)

    def _keep_records(self, step: GroupStep, forward: Forward) -> None:
        half = step.pool.group.halves[0]
        self._host_log.clear()
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
            violations=self._host_log,
            slot_counter=np.zeros(1, np.int64),
            kernel_counter=np.zeros(1, np.int64),
            backend=self._backend,
        )

    # What they found.

    def _collect(self) -> None:
        if not self._launched_forwards:
            return
        launched, self._launched_forwards = self._launched_forwards, []
        found = self._launches.logs.read()
        self._launches.clear()
        for number, one in enumerate(launched):
            self._report(one, None if found is None or not found.any_of(number) else found, number)

    def _report(self, launched: _Launched, found: FoundRows | None, number: int) -> None:
        """Report a forward's rows in the order of its launches, and mark what it wrote."""
        forward, steps = launched.forward, launched.steps
        for step in steps if self._at_once or found is not None else ():
            step.out_of_range |= found is not None and found.out_of_range(number, step.pool.index)
            if self.checks is None and not step.pool.any_unknown:
                step.verify_plan = self._verify_plan(step, forward)
        if len(forward.req_pool_indices):
            for step in steps:
                self._count(step, forward)
            if found is not None:
                self._report_rows(forward, steps, found, number)
        for step in steps:
            self._mark_writers(step, forward)
            if self._at_once:  # else it asked for nothing that there is not
                self._finish(step, forward)

    def _count(self, step: GroupStep, forward: Forward) -> None:
        written = int(step.write_plan.offsets[len(forward.req_pool_indices)])
        if self._at_once:
            slots = step.slots[:written]
            written = int(((slots >= 0) & (slots < step.pool.num_slots)).sum())
        self.launched(step.pool, forwards=1, reads=step.reads, written=written, unknown=step.unknown_entries)

    def _report_rows(self, forward: Forward, steps: list[GroupStep], found: FoundRows, number: int) -> None:
        def report(step: GroupStep, endpoint: Endpoint, half: str, *, verify: bool, write: bool) -> None:
            pool = step.pool
            plans: list[tuple[VerifyPlan | WritePlan, str]] = [(step.verify_plan, "verify")] * verify
            for plan, op in [*plans, *[(step.write_plan, "write")] * write]:
                log = found.log(number, pool.index, endpoint, half, op)
                if log is not None:
                    self.results.violations(launch_violations(log, plan, forward, pool, endpoint, half))

        halves = [(step, half, step.pool.group.reads_before_write) for step in steps for half in step.pool.group.halves]
        for step, half, _ in halves:
            report(step, "HEAD", half, verify=True, write=True)
        for step, half, is_ring in halves:
            report(step, "TAIL", half, verify=is_ring, write=False)
        for step, half, is_ring in halves:
            report(step, "TAIL", half, verify=not is_ring, write=True)

    def _verify_plan(self, step: GroupStep, forward: Forward) -> VerifyPlan:
        """Return where each of a forward's entries stands; the whole plan where one has to be explained."""
        if step.out_of_range or beyond_table(forward, self.tables.req_to_token[step.pool.group.table].shape).any():
            return self._planner.plan(step.pool, forward).verify_plan
        prefix_lens, _ = readable_prefixes(step.pool, forward, self.tables)
        reads = _reads(step.pool, forward, prefix_lens)
        plan = VerifyPlan.allocate(capacity=int(reads.sum()), request_capacity=len(reads))
        plan.request_offsets[1:] = np.cumsum(reads)
        plan.expected_positions[:] = ragged_index(prefix_lens - reads, reads)
        return plan


def _reads(pool: GroupPool, forward: Forward, prefix_lens: Int64Array) -> Int64Array:
    """Return how many prefix entries each request reads, `[bs] int64`."""
    lens = np.maximum(prefix_lens, 0)
    if pool.group.window:
        lens = np.minimum(lens, pool.group.window)
    return np.where(forward.req_pool_indices != 0, lens, 0)
