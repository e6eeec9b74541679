"""The stepwise executor: what the canary does in one forward, kernel by kernel, on the rebuilt pools.

This is section 9 of the canary's semantics. Nothing is skipped for lack of room: plans and violation logs are sized
to fit before each launch.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..kernels.constants import PADDING_SLOT, KvHashMode, LaunchTag
from ..kernels.plan import VerifyPlan, WritePlan, plan, plan_capacity
from ..kernels.records import ViolationLog
from ..kernels.state import mark_writers, store_bytes, translate
from ..kernels.verify import verify
from ..kernels.write import write
from ..recorder.header import PoolGroup, TraceHeader
from ..recorder.reader import EventView
from ..recorder.schema import PHASE_AFTER, PHASE_BEFORE
from .attribution import verify_violations, write_violations
from .checks import HistoryCheck
from .checks.view import ForwardView, GroupReads
from .findings import Finding
from .forward import Forward, UnusableEventError
from .out_of_range import beyond_table, explain_plan, explain_requests, explain_writes
from .pools import Endpoint, GroupPool, launch_tag
from .requests import RequestBook
from .tables import StateTables
from .violations import LaunchViolations

Int64Array = npt.NDArray[np.int64]
NUM_TAGS = len(LaunchTag)
MAX_PLAN_ENTRIES = 1 << 28  # 512 requests of half a million positions; more is a damaged or hostile file


class GroupStep:
    """One pool group's part of one forward: its plans and the slots it writes."""

    __slots__ = ("looked_beyond", "pool", "slots", "unknown_entries", "verify_plan", "write_plan")

    def __init__(self, pool: GroupPool, slots: Int64Array, verify_plan: VerifyPlan, write_plan: WritePlan) -> None:
        self.pool = pool
        self.slots = slots
        self.verify_plan = verify_plan
        self.write_plan = write_plan
        self.looked_beyond = False
        self.unknown_entries = 0


class StepwiseExecutor:
    """Steps forwards through plan, verify and write on rebuilt pools.

    `slot_counters` and `kernel_counters` are `[12] int64`, the canary's own health counters by launch tag;
    `verified` and `written` count what those launches looked at; `unknown_entries` counts plan entries that were left
    out because lost events may have rewritten their slot.
    """

    def __init__(
        self,
        header: TraceHeader,
        *,
        kv_hash_mode: KvHashMode,
        backend: str,
        book: RequestBook,
        on_violations: Callable[[LaunchViolations], None],
        on_findings: Callable[[list[Finding]], None],
        checks: Sequence[HistoryCheck] = (),
    ) -> None:
        self.header = header
        self.tables = StateTables(header, backend=backend)
        self.pools = [
            GroupPool(group, index=index, kv_hash_mode=kv_hash_mode) for index, group in enumerate(header.groups)
        ]
        self.slot_counters = np.zeros(NUM_TAGS, dtype=np.int64)
        self.kernel_counters = np.zeros(NUM_TAGS, dtype=np.int64)
        self.verified = 0
        self.written = 0
        self.unknown_entries = 0
        self._backend = backend
        self._book = book
        self._on_violations = on_violations
        self._on_findings = on_findings
        self._checks = checks
        self._log = ViolationLog.allocate(1024)
        self._verify_plans = [VerifyPlan.allocate(capacity=1024, request_capacity=64) for _ in self.pools]
        self._write_plans = [WritePlan.allocate(request_capacity=64) for _ in self.pools]
        self._out_of_range = np.zeros(1, dtype=np.int64)

    def forward(self, forward: Forward, view: EventView) -> None:
        """Step one forward; raise `UnusableEventError` when its recorded changes contradict themselves."""
        changes = _KvChanges(view, self.header, forward.runner)
        self.tables.apply_changes(view)
        steps = [self._plan(pool, forward) for pool in self.pools if pool.group.runner == forward.runner]
        self._check(forward, steps)
        if len(forward.req_pool_indices):
            for step in steps:
                for half in step.pool.group.halves:
                    self._verify("HEAD", half, step, forward)
                    self._write("HEAD", half, step, forward)
        changes.apply(PHASE_BEFORE, self.pools)
        # A ring buffer's prefix is read before this forward's own writes land on it, so that is when it is judged.
        self._tails(steps, forward, verify=lambda group: group.reads_before_write, write=False)
        self._store_bytes(steps, forward)
        changes.apply(PHASE_AFTER, self.pools)
        self._tails(steps, forward, verify=lambda group: not group.reads_before_write, write=True)
        for step in steps:
            self._finish(step, forward)
        self.tables.apply_forward(forward)

    def check_event(self, view: EventView) -> None:
        """Let the history checks judge an event that is no forward, before it changes anything."""
        for check in self._checks:
            findings = check.event(view)
            if findings:
                self._on_findings(findings)

    def finish(self) -> None:
        """Let the history checks judge the end of a complete trace."""
        for check in self._checks:
            findings = check.finish()
            if findings:
                self._on_findings(findings)

    def _check(self, forward: Forward, steps: list[GroupStep]) -> None:
        if not self._checks:
            return
        bs = len(forward.req_pool_indices)
        groups = [
            GroupReads(
                pool=step.pool,
                plan=step.verify_plan,
                written=step.slots,
                write_offsets=step.write_plan.offsets[: bs + 1],
            )
            for step in steps
        ]
        view = ForwardView(forward=forward, tables=self.tables, groups=groups)
        for check in self._checks:
            findings = check.forward(view)
            if findings:
                self._on_findings(findings)

    def forget(self) -> None:
        """Take all state for unknown, after a gap whose events may have changed any of it."""
        self.tables.forget()
        for check in self._checks:
            check.forget()
        for pool in self.pools:
            pool.forget()
            pool.forget_host()

    def _plan(self, pool: GroupPool, forward: Forward) -> GroupStep:
        group, index = pool.group, pool.index
        slots = forward.out_cache_loc[group.table]
        lut = None
        if group.lut >= 0:
            lut = self.tables.luts[group.lut]
            translated = np.empty_like(slots)
            translate(slots=slots, lut=lut, out=translated, backend=self._backend)
            slots = translated
        bs = len(forward.req_pool_indices)
        # A prefix longer than the table is a finding of its own (`_finish`); the plan stops where the table does.
        prefix_lens = np.minimum(forward.prefix_lens, self.tables.req_to_token[group.table].shape[1])
        entries = plan_capacity(prefix_lens, group.window)
        if entries > MAX_PLAN_ENTRIES:
            raise UnusableEventError(f"it reads {entries:,} positions, expected at most {MAX_PLAN_ENTRIES:,}")
        if entries > len(self._verify_plans[index].slots) or bs + 1 > len(self._verify_plans[index].request_offsets):
            self._verify_plans[index] = VerifyPlan.allocate(capacity=2 * entries, request_capacity=2 * bs)
        if bs > len(self._write_plans[index].seed_slots):
            self._write_plans[index] = WritePlan.allocate(request_capacity=2 * bs)
        step = GroupStep(pool, slots, self._verify_plans[index], self._write_plans[index])
        self._out_of_range[0] = 0
        truth = self.tables.truth if forward.truth_lens is not None else None
        plan(
            req_pool_indices=forward.req_pool_indices,
            prefix_lens=prefix_lens,
            extend_lens=forward.extend_lens,
            req_to_token=self.tables.req_to_token[group.table],
            window=group.window,
            full_to_swa=lut,
            truth_tokens=truth,
            truth_lens=forward.truth_lens,
            token_offset=self.header.runners[forward.runner].token_offset,
            verify_plan=step.verify_plan,
            write_plan=step.write_plan,
            out_of_range=self._out_of_range,
            backend=self._backend,
        )
        step.looked_beyond = bool(self._out_of_range[0])
        if pool.any_unknown:
            self._leave_out_unknown(step, bs)
        return step

    def _leave_out_unknown(self, step: GroupStep, bs: int) -> None:
        """Turn plan entries that stand on lost events into padding: slot 0 is never verified."""
        unknown = step.pool.pool.unknown
        count = int(step.verify_plan.num_valid[0])
        slots, prevs = step.verify_plan.slots[:count], step.verify_plan.prev_slots[:count]
        hit = _lookup(unknown, slots)
        step.unknown_entries = int(hit.sum())
        self.unknown_entries += step.unknown_entries
        slots[hit] = PADDING_SLOT
        prevs[_lookup(unknown, prevs)] = PADDING_SLOT
        seeds = step.write_plan.seed_slots[:bs]
        # Slot 0 as a seed is a table entry that a gap has made unknown.
        seeds[_lookup(unknown, seeds) | (seeds == PADDING_SLOT)] = -1

    def _tails(
        self, steps: list[GroupStep], forward: Forward, *, verify: Callable[[PoolGroup], bool], write: bool
    ) -> None:
        if not len(forward.req_pool_indices):
            return
        for step in steps:
            for half in step.pool.group.halves:
                if verify(step.pool.group):
                    self._verify("TAIL", half, step, forward)
                if write:
                    self._write("TAIL", half, step, forward)

    def _verify(self, endpoint: Endpoint, half: str, step: GroupStep, forward: Forward) -> None:
        pool = step.pool
        tag = launch_tag(endpoint, half, pool.group.kind)
        log = self._cleared_log(int(step.verify_plan.num_valid[0]))
        verify(
            canary=(pool.pool.head if endpoint == "HEAD" else pool.pool.tail)[half],
            tag=tag,
            plan=step.verify_plan,
            check_tokens=forward.truth_lens is not None,
            sources=() if endpoint == "HEAD" else pool.sources[half],
            kv_hash_mode=KvHashMode.NONE if endpoint == "HEAD" else pool.kv_hash_mode,
            violations=log,
            slot_counter=self.slot_counters[tag : tag + 1],
            kernel_counter=self.kernel_counters[tag : tag + 1],
            backend=self._backend,
        )
        self.verified += int(step.verify_plan.num_valid[0]) - step.unknown_entries
        if log.write_index[0]:
            self._on_violations(
                verify_violations(log, plan=step.verify_plan, forward=forward, pool=pool, endpoint=endpoint, half=half)
            )
        step.looked_beyond |= bool(log.out_of_range[0])

    def _write(self, endpoint: Endpoint, half: str, step: GroupStep, forward: Forward) -> None:
        pool = step.pool
        tag = launch_tag(endpoint, half, pool.group.kind)
        log = self._cleared_log(2 * forward.num_tokens)
        before = int(self.slot_counters[tag])
        write(
            canary=(pool.pool.head if endpoint == "HEAD" else pool.pool.tail)[half],
            tag=tag,
            plan=step.write_plan,
            input_ids=forward.input_ids,
            positions=forward.positions,
            out_cache_loc=step.slots,
            expected_tokens=None,
            expected_positions=None,
            chain_step_assert=True,
            sources=() if endpoint == "HEAD" else pool.sources[half],
            kv_hash_mode=KvHashMode.NONE if endpoint == "HEAD" else pool.kv_hash_mode,
            violations=log,
            slot_counter=self.slot_counters[tag : tag + 1],
            kernel_counter=self.kernel_counters[tag : tag + 1],
            backend=self._backend,
        )
        self.written += int(self.slot_counters[tag]) - before
        if log.write_index[0]:
            self._on_violations(
                write_violations(log, plan=step.write_plan, forward=forward, pool=pool, endpoint=endpoint, half=half)
            )
        step.looked_beyond |= bool(log.out_of_range[0])

    def _cleared_log(self, capacity: int) -> ViolationLog:
        if capacity > len(self._log.entries):
            self._log = ViolationLog.allocate(2 * capacity)
        self._log.clear()
        return self._log

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
            findings = explain_plan(step.verify_plan, forward, step.pool, shape, self._book)
            findings += explain_writes(step.slots, step.write_plan, forward, step.pool, self._book)
            findings += explain_requests(forward, step.pool, shape, self._book)
            self._on_findings(findings)


def _lookup(unknown: npt.NDArray[np.bool_], slots: Int64Array) -> npt.NDArray[np.bool_]:
    inside = (slots >= 0) & (slots < len(unknown))
    return inside & unknown[np.where(inside, slots, 0)]


class _KvChanges:
    """An event's observed KV changes, sorted out by stream."""

    def __init__(self, view: EventView, header: TraceHeader, runner: int) -> None:
        self._streams = header.streams(runner)
        self._stream = view.ints("kv_change_stream")
        self._slot = view.ints("kv_change_slot")
        self._phase = view.ints("kv_change_phase")
        self._bytes = view.bytes("kv_change_bytes")
        if not len(self._stream) == len(self._slot) == len(self._phase):
            raise UnusableEventError("the kv_change columns differ in length")
        if not set(np.unique(self._phase).tolist()) <= {PHASE_BEFORE, PHASE_AFTER}:
            raise UnusableEventError(f"kv_change_phase names a phase other than {PHASE_BEFORE} and {PHASE_AFTER}")
        if len(self._stream) and not 0 <= self._stream.min() <= self._stream.max() < len(self._streams):
            raise UnusableEventError(f"kv_change_stream names stream {self._stream.max()} of {len(self._streams)}")
        widths = np.array([stream.capture_bytes for _, stream in self._streams] or [0], dtype=np.int64)[self._stream]
        if len(self._bytes) != int(widths.sum()):
            raise UnusableEventError(f"kv_change_bytes has {len(self._bytes)} bytes, expected {int(widths.sum())}")
        slots = np.array([header.groups[group].num_slots for group, _ in self._streams] or [0], dtype=np.int64)
        if bool(((self._slot < 0) | (self._slot >= slots[self._stream])).any()):
            raise UnusableEventError("kv_change_slot names a slot that its pool does not have")
        self._offsets = np.cumsum(widths) - widths

    def apply(self, phase: int, pools: list[GroupPool]) -> None:
        """Put the bytes observed in `phase` into the pools."""
        if not len(self._stream):
            return
        seen: dict[int, int] = {}
        for number, (group, stream) in enumerate(self._streams):
            place = seen.get(group, 0)
            seen[group] = place + 1
            chosen = np.flatnonzero((self._stream == number) & (self._phase == phase))
            if len(chosen):
                columns = self._offsets[chosen, None] + np.arange(stream.capture_bytes)
                store_bytes(slots=self._slot[chosen], data=self._bytes[columns], pool=pools[group].pool.kv[place])
