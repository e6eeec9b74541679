"""What each event of a trace does to the state: the one place that knows, for keyframes and replays alike.

`EventApplier` moves tables, pools, ledger and activity on, and judges nothing: a replay overrides the steps in between. The
recorder keeps a `RecordedState` on its writer's thread, so that a segment can begin with all that a replay would hold.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.constants import KvHashMode
from ...kernels.dispatch import prepare, select
from ...kernels.ops.hash.kv_source import fold_kv, fold_source_loops
from ...kernels.ops.plan.reference import WritePlan, plan_writes_loops
from ...kernels.ops.write.reference import write_loops
from ...kernels.replay_pass.ledger import note_writes_loops
from ...kernels.replay_pass.state import STATE_LOOPS, mark_writer_loops, store_bytes_loops
from ..trace.header import TraceHeader
from ..trace.reader import EventView
from ..trace.schema import ALLOC_FRESH, PHASE_AFTER, PHASE_BEFORE, SEND, SLOTS_LISTED
from .events import CopyEvent, KnownEvent, SlotEvent, TransferEvent, read_known_event, read_lost_slots
from .forward import Forward, UnusableEventError, batch_tokens, read_forward, runner_of
from .history import ReplayState, RunnerActivity, SlotHistory
from .pools import Endpoint, GroupPool
from .requests import RequestTable
from .tables import StateListener, StateTables, TableUse
from .writes import KvChanges, Launcher, plan_own_writes, readable_prefixes


@dataclass(slots=True)
class WriteStep:
    """What a forward writes in one group: `slots` `[T] int64` in the pool's numbering, and the plan of its chains."""

    pool: GroupPool
    slots: Int64Array
    write_plan: WritePlan


Step = TypeVar("Step", bound=WriteStep)


class EventApplier(ABC, Generic[Step]):
    """Applies a trace's events to `state`, in their order; `listener` is told what changes between forwards. Methods
    that take an event raise `UnusableEventError` when it contradicts itself. The state is to be forgotten then.
    """

    def __init__(self, state: ReplayState, *, backend: str, listener: StateListener | None = None) -> None:
        self.state = state
        self.header = state.header
        self.tables = state.tables
        self.pools = state.pools
        self._backend = backend
        self._listener = StateListener() if listener is None else listener

    def forget(self) -> None:
        """Take all state for unknown, after a gap whose events may have changed any of it."""
        state = self.state
        state.tables.forget()
        state.activity.forget()
        if state.history is not None:
            state.history.forget()
        for pool in state.pools:
            pool.forget()
        self._listener.all_changed()

    # --- forwards

    def apply_forward(self, forward: Forward, view: EventView) -> None:
        """Apply a forward: the steps of the canary's section 9, and what the runner's activity is then."""
        self.forward(forward, view)
        if len(forward.req_pool_indices):
            self.state.activity.forward(forward)

    def forward(self, forward: Forward, view: EventView) -> None:
        """Step a forward in the order of the canary's section 9."""
        changes = KvChanges(view, self.header, forward.runner)
        self.tables.apply_changes(view)
        steps = [self._plan(pool, forward, changes) for pool in self.pools if pool.group.runner == forward.runner]
        self._judge(forward, view, steps)
        launched = [(step, half) for step in steps for half in step.pool.group.halves if len(forward.req_pool_indices)]
        for step, half in launched:
            self._verify("HEAD", half, step, forward)
            self._write("HEAD", half, step, forward)
        changes.apply(PHASE_BEFORE, self.pools, backend=self._backend)
        for step, half in launched:
            if step.pool.group.reads_before_write:  # a ring, on whose prefix this forward's own writes land
                self._verify("TAIL", half, step, forward)
        self._store_bytes(steps, forward)
        changes.apply(PHASE_AFTER, self.pools, backend=self._backend)
        for step, half in launched:
            if not step.pool.group.reads_before_write:
                self._verify("TAIL", half, step, forward)
            self._write("TAIL", half, step, forward)
        for step in steps:
            self._mark_writers(step, forward)
            self._finish(step, forward)
        self.tables.apply_forward(forward)
        self._finish_forward(forward, steps)

    @abstractmethod
    def _plan(self, pool: GroupPool, forward: Forward, changes: KvChanges) -> Step:
        """Return a group's part of a forward."""

    @abstractmethod
    def _judge(self, forward: Forward, view: EventView, steps: list[Step]) -> None:
        """Judge a planned forward before it runs, and move the history on by it."""

    def _verify(self, endpoint: Endpoint, half: str, step: Step, forward: Forward) -> None:
        """Verify what a group's part of a forward reads."""

    @abstractmethod
    def _write(self, endpoint: Endpoint, half: str, step: Step, forward: Forward) -> None:
        """Write a forward's records."""

    def _finish(self, step: Step, forward: Forward) -> None:
        """Take note of a group's part of a forward that has run; the tables are as it found them."""

    def _finish_forward(self, forward: Forward, steps: list[Step]) -> None:
        """Take note of a forward that has run; everything is as it leaves it."""

    def _store_bytes(self, steps: list[Step], forward: Forward) -> None:
        slots = {step.pool.index: step.slots for step in steps}
        seen = dict.fromkeys(slots, 0)
        for (group, _), data in zip(self.header.streams(forward.runner), forward.kv_bytes, strict=True):
            pool = self.pools[group].pool
            select(store_bytes_loops, self._backend)(slots[group], data, pool.kv[seen[group]])
            seen[group] += 1

    def _mark_writers(self, step: Step, forward: Forward) -> None:
        offsets = step.write_plan.offsets[: len(forward.request_ids) + 1]
        event = forward.event + 1  # 0 stands for nobody, so that untouched slots stay zero pages
        mark = select(mark_writer_loops, self._backend)
        mark(step.slots, offsets, forward.request_ids, event, forward.forward, step.pool.pool.writers)
        if forward.failed:
            step.pool.forget(step.slots[(step.slots > 0) & (step.slots < step.pool.num_slots)])
        else:
            step.pool.learn(step.slots)
        step.pool.chain(step.slots, step.write_plan, forward.prefix_lens)

    # --- what happens between forwards

    def apply_event(self, view: EventView) -> None:
        """Apply an event that is no forward; marks, segments and keyframes change no more than the tables."""
        known = self._judge_event(view)
        self.tables.apply_changes(view)  # any event may carry what it was the first to see
        if view.kind == "request":
            self.state.request_table.learn(view)
        elif isinstance(known, SlotEvent):
            if known.kind != "alloc" or known.status == ALLOC_FRESH:
                for part in known.parts:
                    self._listener.slots_changed(part.group, part.slots)
        elif isinstance(known, CopyEvent):
            self._copy(known)
        elif isinstance(known, TransferEvent):
            self._transfer(known, view)
        elif view.kind == "sweep":
            self.sweep(view)
        elif view.kind == "loss" and view.scalar("status") == SLOTS_LISTED:
            self._lose_slots(view)
        elif view.kind == "loss":
            self.forget()
            self.tables.apply_changes(view)
        elif view.kind == "keyframe" and not view.scalar("status"):
            self._listener.all_changed()  # it has no parts, and the history forgets what it knew

    def _judge_event(self, view: EventView) -> KnownEvent | None:
        """Judge an event before it changes anything, and move the history on by it; return what it says of slots."""
        history = self.state.history
        if history is None:  # copies and transfers change what slots hold, all others who holds them
            return read_known_event(view, self.header.groups) if view.kind in ("kv_copy", "transfer") else None
        history.open(view)
        history.apply_event(view)
        return history.known

    def sweep(self, view: EventView) -> None:
        """Apply a walk of the prefix cache: what changed before it."""
        runner = runner_of(view, self.header)
        self._apply_kv(KvChanges(view, self.header, runner))
        self.state.activity.sweep(runner)

    def _copy(self, event: CopyEvent) -> None:
        for part in event.parts:
            self._listener.slots_changed(part.group, part.slots)
        for copy in event.copies:
            self.pools[copy.group].copy_slots(copy)

    def _transfer(self, event: TransferEvent, view: EventView) -> None:
        if event.group < 0:
            return
        pool = self.pools[event.group]
        if event.direction == SEND:
            changes = KvChanges(view, self.header, pool.group.runner)
            self._apply_kv(changes)
            self._sent(event, changes)
        elif event.status == "end":
            self._listener.slots_changed(event.group, event.slots)
            for data, landed in zip(pool.pool.kv, event.landed, strict=not event.unread):
                data[event.slots] = landed
            pool.pool.writers[event.slots] = (event.event + 1, event.forward, event.request_id)
            self._received(event)

    def _sent(self, event: TransferEvent, changes: KvChanges) -> None:
        """Take note of slots that are sent, or were, whose changed bytes are in place."""

    def _received(self, event: TransferEvent) -> None:
        """Take note of slots whose bytes have landed; what the sender wrote there is not known on this side."""
        self.pools[event.group].forget(event.slots)

    def _apply_kv(self, changes: KvChanges) -> None:
        for pool in self.pools if changes else ():
            self._listener.slots_changed(pool.index, changes.slots_of(pool.index))
        changes.apply(PHASE_BEFORE, self.pools, backend=self._backend)
        changes.apply(PHASE_AFTER, self.pools, backend=self._backend)

    def _lose_slots(self, view: EventView) -> None:
        runs = read_lost_slots(view, self.header.groups)
        self.state.activity.forget()  # a walk of the prefix cache may be among what is lost, and names no slots
        listed = np.zeros(len(self.pools), np.int64)
        for group, start, end in runs:
            self.pools[group].forget(slice(start, end))
            # Slot 0, which nobody's write touches, may be unknown from now on; and one slot may be listed often.
            listed[group] += end - start if start else self.pools[group].num_slots + 1
        for group in np.flatnonzero(listed > [pool.num_slots for pool in self.pools]).tolist():
            self._listener.group_changed(group)
        for group, start, end in runs:
            if listed[group] <= self.pools[group].num_slots:
                self._listener.slots_changed(group, np.arange(start, end))


class RecordedState(EventApplier[WriteStep]):
    """What a replay of the events so far would hold, kept by whoever records them; `use` is how far its tables are filled.

    Memory is that of a replay: `pools.pool_bytes` when every page is touched. The kernels are compiled, or loaded, here.
    """

    def __init__(self, header: TraceHeader, *, backend: str = "cpu") -> None:
        prepare(*STATE_LOOPS, note_writes_loops, plan_writes_loops, write_loops, fold_source_loops, backend=backend)
        pools = [GroupPool(g, index=i, kv_hash_mode=KvHashMode.PARTIAL) for i, g in enumerate(header.groups)]
        self.history = SlotHistory(header, backend=backend)
        self.use = TableUse(header)
        state = ReplayState(
            header=header,
            tables=StateTables(header, backend=backend, listener=self.use),
            pools=pools,
            request_table=RequestTable(),
            activity=RunnerActivity(len(header.runners)),
            history=self.history,
        )
        super().__init__(state, backend=backend)
        self._launcher = Launcher(backend=backend)
        self._out_of_range = np.zeros(1, np.int64)
        self._plans = [WritePlan.allocate(request_capacity=64) for _ in pools]
        for pool in pools:  # which bytes are hashed is for a replay to choose
            if any(stream.capture_bytes > 16 for stream in pool.group.streams):
                for tier in (pool.pool, pool.host):
                    tier.whole_hashes = {half: np.zeros(len(tier.writers), np.int64) for half in pool.group.halves}

    def apply(self, view: EventView) -> None:
        """Apply an event; one that contradicts itself makes everything unknown, as it does in a replay."""
        try:
            if view.kind == "forward":
                self.apply_forward(read_forward(view, self.header), view)
            else:
                self.apply_event(view)
        except UnusableEventError:
            self.forget()

    def forget(self) -> None:
        """Take all state for unknown."""
        super().forget()
        self.use.forget()

    def _plan(self, pool: GroupPool, forward: Forward, changes: KvChanges) -> WriteStep:
        del changes
        bs = len(forward.req_pool_indices)
        if bs > len(self._plans[pool.index].seed_slots):
            self._plans[pool.index] = WritePlan.allocate(request_capacity=2 * bs)
        plan, tables = self._plans[pool.index], self.tables
        prefix_lens, _ = readable_prefixes(pool, forward, tables)
        slots = plan_own_writes(pool, forward, tables, prefix_lens, plan, self._out_of_range, backend=self._backend)
        return WriteStep(pool, slots, plan)

    def _judge(self, forward: Forward, view: EventView, steps: list[WriteStep]) -> None:
        del view
        bs, history = len(forward.request_ids), self.history
        tokens = batch_tokens(forward)
        if history.complete:
            for _ in history.dropped.still_held(forward, history.ledger):
                pass  # a replay reports it; the ledger loses track of it here as there
            for step in steps:
                history.dropped.note(forward, tokens, step.pool, step.slots, self.tables, history.ledger)
        written = [(step.pool.index, step.slots, int(step.write_plan.offsets[bs])) for step in steps]
        history.apply_forward(forward, written, self.tables)

    def _write(self, endpoint: Endpoint, half: str, step: WriteStep, forward: Forward) -> None:
        self._launcher.write(endpoint, half, step.pool, step.write_plan, forward, slots=step.slots)

    def _finish(self, step: WriteStep, forward: Forward) -> None:
        """Hash all captured bytes of what was written, where that is another hash than the record's."""
        bs = len(forward.req_pool_indices)
        for half, hashes in step.pool.pool.whole_hashes.items() if bs else ():
            slots = step.slots[: int(step.write_plan.offsets[bs])]
            slots = slots[(slots >= 0) & (slots < len(hashes))]
            folded = np.empty(len(slots), np.int64)
            fold_kv(
                sources=step.pool.sources[half], mode=KvHashMode.ALL, slots=slots, out=folded, backend=self._backend
            )
            hashes[slots] = folded
