"""The applier: state tables, pools and the history of slots, and what each event of a trace does to them.

A replay judges with the same parts while it moves them on. Here nothing is judged: this is what the recorder runs on
its writer's thread, so that a segment of a trace can begin with all that a replay would hold at that point.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array
from ...kernels.constants import KvHashMode, LaunchTag
from ...kernels.dispatch import select
from ...kernels.ops.hash.kv_source import fold_kv, fold_source_loops
from ...kernels.ops.plan.reference import WritePlan, plan_writes, plan_writes_loops
from ...kernels.ops.violation_log import ViolationLog
from ...kernels.ops.write.reference import write, write_loops
from ...kernels.replay_pass import ledger
from ...kernels.replay_pass import state as state_kernels
from ...kernels.replay_pass.state import mark_writers, store_bytes
from ..capture.host_arrays import runs_to_slots
from ..trace.header import TraceHeader
from ..trace.reader import EventView
from ..trace.schema import PHASE_AFTER, PHASE_BEFORE, SEND, SLOTS_LISTED
from .events import SampleEvent, read_transfer
from .forward import Forward, UnusableEventError, batch_tokens, read_forward
from .history import SlotHistory
from .pools import GroupPool
from .replay_state import ReplayState, RunnerActivity
from .requests import RequestTable
from .tables import StateTables, TableUse
from .writes import KvChanges, own_slots, part_from_unknown, part_from_unstored, readable_prefixes


def apply_copies(view: EventView, pools: Sequence[GroupPool]) -> None:
    """Copy what a kv_copy event says; raise `UnusableEventError` where it contradicts itself or the pools."""
    columns = [view.ints(f"copy_{c}") for c in ("group", "src_tier", "src", "dst_tier", "dst", "count")]
    if len({len(column) for column in columns}) != 1:
        raise UnusableEventError("the copy columns differ in length")
    runs: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for group, src_tier, src, dst_tier, dst, count in zip(*(c.tolist() for c in columns), strict=True):
        if not 0 <= group < len(pools) or src_tier not in (0, 1) or dst_tier not in (0, 1):
            raise UnusableEventError(f"a copy in group {group} from tier {src_tier} to tier {dst_tier}")
        limit = pools[group].largest_tier
        if not 0 <= count <= limit:
            raise UnusableEventError(f"a copy of {count} slots, the larger tier has {limit}")
        runs.setdefault((group, src_tier, dst_tier), []).append((src, dst, count))
    for (group, src_tier, dst_tier), given in runs.items():
        # Everything is read before anything is written: a run may begin where another one ends.
        starts, targets, counts = np.array(given, dtype=np.int64).T
        pool = pools[group]
        if int(counts.sum()) > pool.largest_tier:
            raise UnusableEventError(f"a copy of {int(counts.sum())} slots, the larger tier has {pool.largest_tier}")
        if pool.copy_slots(src_tier, runs_to_slots(starts, counts), dst_tier, runs_to_slots(targets, counts)):
            raise UnusableEventError(f"a copy of {int(counts.sum())} slots leaves its tier")


def forget_listed(view: EventView, pools: Sequence[GroupPool]) -> None:
    """Take the slots that a loss event lists for unknown; raise `UnusableEventError` where there are no such slots."""
    groups, starts, counts = (view.ints(f"slot_{c}") for c in ("group", "start", "count"))
    if not len(groups) == len(starts) == len(counts):
        raise UnusableEventError("the slot columns differ in length")
    for group, start, count in zip(groups.tolist(), starts.tolist(), counts.tolist(), strict=True):
        if not 0 <= group < len(pools) or start < 0 or count < 0:
            raise UnusableEventError(f"a run of {count} slots from {start} in group {group}")
        pools[group].forget(slice(start, start + count))


@dataclass(frozen=True, slots=True)
class _Step:
    """What a forward writes in one group: `slots` `[T] int64`, and the plan of its chains."""

    pool: GroupPool
    slots: Int64Array
    plan: WritePlan


class EventApplier:
    """Takes a trace's events in order; `state` is what a replay of them would hold, `use` how far its tables are filled.

    Memory is that of a replay: `pools.pool_bytes` when every page is touched. The kernels are compiled, or loaded, here.
    """

    def __init__(self, header: TraceHeader, *, backend: str = "cpu") -> None:
        _prepare(backend)
        pools = [GroupPool(g, index=i, kv_hash_mode=KvHashMode.PARTIAL) for i, g in enumerate(header.groups)]
        self.history = SlotHistory(header, backend=backend)
        self.state = ReplayState(
            header=header,
            tables=StateTables(header, backend=backend),
            pools=pools,
            request_table=RequestTable(),
            activity=RunnerActivity(len(header.runners)),
            history=self.history,
        )
        self.use = TableUse(header)
        self._header = header
        self._backend = backend
        self._log = ViolationLog.allocate(0)
        self._counters = np.zeros(2, np.int64)
        self._out_of_range = np.zeros(1, np.int64)
        self._plans = [WritePlan.allocate(request_capacity=64) for _ in pools]
        for pool in pools:  # which bytes are hashed is for a replay to choose
            if any(stream.capture_bytes > 16 for stream in pool.group.streams):
                for tier in (pool.pool, pool.host):
                    tier.whole_hashes = {half: np.zeros(len(tier.writers), np.int64) for half in pool.group.halves}

    def take(self, view: EventView) -> None:
        """Move on by one event; one that contradicts itself makes everything unknown, as it does in a replay."""
        try:
            if view.kind == "forward":
                self._forward(read_forward(view, self._header), view)
            else:
                self._between_forwards(view)
        except UnusableEventError:
            self.forget()

    def forget(self) -> None:
        """Take all state for unknown."""
        state = self.state
        state.tables.forget()
        self.use.forget()
        self.history.forget()
        state.activity.forget()
        for pool in state.pools:
            pool.forget()
            pool.forget_host()

    def _between_forwards(self, view: EventView) -> None:
        state, kind = self.state, view.kind
        self.history.open(view)
        if isinstance(self.history.known, SampleEvent):
            self.history.samples.take_sample(self.history.known)
        self.history.take_event(view)
        self._apply_changes(view)
        if kind == "request":
            state.request_table.learn(view)
        elif kind == "kv_copy":
            apply_copies(view, state.pools)
        elif kind == "transfer":
            self._transfer(view)
        elif kind == "sweep":
            self._sweep(view)
        elif kind == "loss" and view.scalar("status") == SLOTS_LISTED:
            forget_listed(view, state.pools)
        elif kind == "loss":
            self.forget()
            self._apply_changes(view)

    def _apply_changes(self, view: EventView) -> None:
        self.state.tables.apply_changes(view)
        self.use.take_changes(view)

    def _sweep(self, view: EventView) -> None:
        runner = int(view.scalar("runner"))
        if not 0 <= runner < len(self._header.runners):
            raise UnusableEventError(f"runner {runner}, the header names {len(self._header.runners)}")
        self._apply(KvChanges(view, self._header, runner))
        self.state.activity.sweep(runner)

    def _transfer(self, view: EventView) -> None:
        transfer = read_transfer(view, self.state.pools)
        if transfer is None:
            return
        if transfer.direction == SEND:
            self._apply(KvChanges(view, self._header, transfer.pool.group.runner))
        elif transfer.status == "end":  # what the sender wrote there is not known on this side
            transfer.land()
            transfer.pool.forget(transfer.slots)

    def _apply(self, changes: KvChanges) -> None:
        for phase in (PHASE_BEFORE, PHASE_AFTER):
            changes.apply(phase, self.state.pools, backend=self._backend)

    def _forward(self, forward: Forward, view: EventView) -> None:
        state = self.state
        changes = KvChanges(view, self._header, forward.runner)
        self._apply_changes(view)
        steps = [self._plan(pool, forward) for pool in state.pools if pool.group.runner == forward.runner]
        bs = len(forward.request_ids)
        tokens = batch_tokens(forward)
        if forward.runner == 0 and bs:
            self.history.samples.take_forward(forward, tokens)
        if self.history.complete:
            ledger, dropped = self.history.ledger, self.history.dropped
            for _ in dropped.still_held(forward, ledger):
                pass  # a replay says it; the ledger loses track of it here as there
            for step in steps:
                dropped.note(forward, tokens, step.pool, step.slots, state.tables, ledger)
        self.history.take_forward(
            forward, [(step.pool.index, step.slots, int(step.plan.offsets[bs])) for step in steps]
        )
        if bs:
            for step in steps:
                for half, records in step.pool.pool.head.items():
                    self._write(step, forward, half, records, KvHashMode.NONE)
        changes.apply(PHASE_BEFORE, state.pools, backend=self._backend)
        self._store_bytes(steps, forward)
        changes.apply(PHASE_AFTER, state.pools, backend=self._backend)
        for step in steps:
            tier = step.pool.pool
            if bs:
                for half, records in tier.tail.items():
                    self._write(step, forward, half, records, step.pool.kv_hash_mode)
                for half, hashes in tier.whole_hashes.items():
                    self._hash_whole(step, half, hashes, int(step.plan.offsets[bs]))
            mark_writers(
                slots=step.slots,
                offsets=step.plan.offsets[: bs + 1],
                request_ids=forward.request_ids,
                event=forward.event + 1,
                forward=forward.forward,
                writers=tier.writers,
                backend=self._backend,
            )
            step.pool.learn(step.slots)
        state.tables.apply_forward(forward)
        self.use.take_forward(forward)
        if bs:
            state.activity.forward(forward)

    def _plan(self, pool: GroupPool, forward: Forward) -> _Step:
        tables, group = self.state.tables, pool.group
        bs = len(forward.req_pool_indices)
        if bs > len(self._plans[pool.index].seed_slots):
            self._plans[pool.index] = WritePlan.allocate(request_capacity=2 * bs)
        step = _Step(pool, own_slots(pool, forward, tables, backend=self._backend), self._plans[pool.index])
        plan_writes(
            req_pool_indices=forward.req_pool_indices,
            prefix_lens=readable_prefixes(pool, forward, tables)[0],
            extend_lens=forward.extend_lens,
            req_to_token=tables.req_to_token[group.table],
            full_to_swa=tables.luts[group.lut] if group.lut >= 0 else None,
            write_plan=step.plan,
            out_of_range=self._out_of_range,
            backend=self._backend,
        )
        part_from_unknown(pool, step.plan, bs)
        part_from_unstored(pool, step.plan, step.slots, bs)
        return step

    def _write(
        self, step: _Step, forward: Forward, half: str, records: npt.NDArray[np.uint8], mode: KvHashMode
    ) -> None:
        self._log.clear()
        write(
            canary=records,
            tag=LaunchTag.HEAD_K_FULL,  # of rows that nobody reads
            plan=step.plan,
            input_ids=forward.input_ids,
            positions=forward.positions,
            out_cache_loc=step.slots,
            expected_tokens=None,
            expected_positions=None,
            chain_step_assert=False,
            sources=() if mode is KvHashMode.NONE else step.pool.sources[half],
            kv_hash_mode=mode,
            violations=self._log,
            slot_counter=self._counters[:1],
            kernel_counter=self._counters[1:],
            backend=self._backend,
        )

    def _hash_whole(self, step: _Step, half: str, hashes: Int64Array, end: int) -> None:
        slots = step.slots[:end]
        slots = slots[(slots >= 0) & (slots < len(hashes))]
        folded = np.empty(len(slots), np.int64)
        fold_kv(sources=step.pool.sources[half], mode=KvHashMode.ALL, slots=slots, out=folded, backend=self._backend)
        hashes[slots] = folded

    def _store_bytes(self, steps: list[_Step], forward: Forward) -> None:
        slots = {step.pool.index: step.slots for step in steps}
        seen = dict.fromkeys(slots, 0)
        for (group, _), data in zip(self._header.streams(forward.runner), forward.kv_bytes, strict=True):
            pool = self.state.pools[group].pool
            store_bytes(slots=slots[group], data=data, pool=pool.kv[seen[group]], backend=self._backend)
            seen[group] += 1


def _prepare(backend: str) -> None:
    state_kernels.prepare(backend)
    ledger.prepare_notes(backend)
    for loops in (plan_writes_loops, write_loops, fold_source_loops):
        select(loops, backend)
