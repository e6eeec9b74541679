"""What a forward writes: KV bytes that were observed, and launches of the canary's verify and write ops on a pool's buffers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array
from ...kernels.constants import PADDING_SLOT, KvHashMode, LaunchTag
from ...kernels.dispatch import select
from ...kernels.ops.plan.reference import MAX_PLAN_ENTRIES, VerifyPlan, WritePlan, plan_capacity, plan_writes
from ...kernels.ops.verify.reference import verify
from ...kernels.ops.violation_log import ViolationLog
from ...kernels.ops.write.reference import write
from ...kernels.replay_pass.state import store_bytes_loops, translate_loops
from ..trace.header import PoolGroup, TraceHeader
from ..trace.reader import EventView
from ..trace.schema import PHASE_AFTER, PHASE_BEFORE
from .forward import Forward, UnusableEventError
from .pools import Endpoint, GroupPool, launch_tag
from .tables import StateTables


class KvChanges:
    """An event's observed changes, checked and sorted out by stream; streams are those of `runner`."""

    def __init__(self, view: EventView, header: TraceHeader, runner: int) -> None:
        """Raise `UnusableEventError` where the columns contradict one another or the header."""
        self._streams = header.streams(runner)
        self._stream = view.ints("kv_change_stream")
        self._slot = view.ints("kv_change_slot")
        self._phase = view.ints("kv_change_phase")
        self._bytes = view.bytes("kv_change_bytes")
        if not (len(self._stream) or len(self._slot) or len(self._phase) or len(self._bytes)):
            return  # by far the most frequent
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

    def __bool__(self) -> bool:
        return len(self._stream) > 0

    @property
    def slots(self) -> Int64Array:
        """The slots that changed, each once."""
        return np.unique(self._slot)

    def slots_of(self, group: int) -> Int64Array:
        """The slots of a group that changed, `[n] int64`."""
        if not self:
            return self._slot
        mine = [number for number, (index, _) in enumerate(self._streams) if index == group]
        return self._slot[np.isin(self._stream, mine)]

    def apply(self, phase: int, pools: list[GroupPool], *, backend: str) -> None:
        """Put the bytes observed in `phase` into the pools."""
        if not self:
            return
        seen: dict[int, int] = {}
        for number, (group, stream) in enumerate(self._streams):
            place = seen.get(group, 0)
            seen[group] = place + 1
            chosen = np.flatnonzero((self._stream == number) & (self._phase == phase))
            if len(chosen):
                columns = self._offsets[chosen, None] + np.arange(stream.capture_bytes)
                store = select(store_bytes_loops, backend)
                store(self._slot[chosen], self._bytes[columns], pools[group].pool.kv[place])


def own_slots(pool: GroupPool, forward: Forward, tables: StateTables, *, backend: str) -> Int64Array:
    """Return the slots that a forward writes in a group, `[T] int64` in the pool's own numbering."""
    slots = forward.out_cache_loc[pool.group.table]
    if pool.group.lut < 0:
        return slots
    translated = np.empty_like(slots)
    outside = np.zeros(1, np.int64)
    select(translate_loops, backend)(slots, tables.luts[pool.group.lut], translated, outside)
    return translated


def readable_prefixes(pool: GroupPool, forward: Forward, tables: StateTables) -> tuple[Int64Array, int]:
    """Return the prefix lengths `[bs] int64` cut to the table's width, and how many entries a forward so reads. Raises
    `UnusableEventError` if they are absurdly many.
    """
    # A prefix longer than the table is a finding of its own (`explain_forward`); the plan stops where it does.
    prefix_lens = np.minimum(forward.prefix_lens, tables.req_to_token[pool.group.table].shape[1])
    entries = plan_capacity(prefix_lens, pool.group.window)
    if entries > MAX_PLAN_ENTRIES:
        raise UnusableEventError(f"it reads {entries:,} positions, expected at most {MAX_PLAN_ENTRIES:,}")
    return prefix_lens, entries


def plan_own_writes(
    pool: GroupPool,
    forward: Forward,
    tables: StateTables,
    prefix_lens: Int64Array,
    plan: WritePlan,
    out_of_range: Int64Array,
    *,
    backend: str,
) -> Int64Array:
    """Plan the chains of what a forward writes in a group; return the slots, `[T] int64` in the pool's own numbering."""
    group, slots = pool.group, own_slots(pool, forward, tables, backend=backend)
    plan_writes(
        req_pool_indices=forward.req_pool_indices,
        prefix_lens=prefix_lens,
        extend_lens=forward.extend_lens,
        req_to_token=tables.req_to_token[group.table],
        full_to_swa=tables.luts[group.lut] if group.lut >= 0 else None,
        write_plan=plan,
        out_of_range=out_of_range,
        backend=backend,
    )
    bs = len(prefix_lens)
    seeds = plan.seed_slots[:bs]  # a chain begins anew where it is -1
    if (
        pool.any_unknown
    ):  # lost events may have rewritten the record; slot 0 is a table entry that a gap has made unknown
        seeds[which_unknown(pool, seeds) | (seeds == PADDING_SLOT)] = -1
    if group.window and group.lut < 0 and len(slots):
        # A chunk that is longer than the window leaves out what nobody will read, and the record before it is then not the one
        # before what is stored. Behind a full-to-SWA table such a token goes to slot 0.
        starts, ends = plan.offsets[:bs], plan.offsets[1 : bs + 1]
        seeds[(starts < ends) & (slots[np.minimum(starts, len(slots) - 1)] < 0)] = -1
    return slots


def which_unknown(pool: GroupPool, slots: Int64Array) -> npt.NDArray[np.bool_]:
    """Say for each slot, `[n] bool`, whether its content is unknown."""
    unknown = pool.pool.unknown
    inside = (slots >= 0) & (slots < len(unknown))
    return inside & unknown[np.where(inside, slots, 0)]


def stays(slots: Int64Array, group: PoolGroup) -> npt.NDArray[np.bool_]:
    """Say of each token, `[n] bool`, whether its slot is one of the pool's, no padding, and no later token takes it."""
    found = np.zeros(slots.size, np.bool_)
    found[slots.size - 1 - np.unique(slots[::-1], return_index=True)[1]] = True
    return found & (slots >= 0) & (slots < group.num_slots) & ~np.isin(slots, group.padding_slots)


class Launcher:
    """Runs launches, each into a log that has room for everything it may find. `slot_counters` and `kernel_counters`
    are `[12] int64`, the canary's own health counters by launch tag. A log that is returned is the launcher's own and
    good until the next launch.
    """

    def __init__(self, *, backend: str) -> None:
        self.slot_counters: Int64Array = np.zeros(len(LaunchTag), dtype=np.int64)
        self.kernel_counters: Int64Array = np.zeros(len(LaunchTag), dtype=np.int64)
        self._backend = backend
        self._log = ViolationLog.allocate(1024)

    def verify(
        self, endpoint: Endpoint, half: str, pool: GroupPool, plan: VerifyPlan, *, check_tokens: bool
    ) -> ViolationLog:
        """Verify a buffer against a plan."""
        capacity = int(plan.num_valid[0])
        return self._launch(verify, endpoint, half, pool, capacity, plan=plan, check_tokens=check_tokens)

    def write(
        self,
        endpoint: Endpoint,
        half: str,
        pool: GroupPool,
        plan: WritePlan,
        forward: Forward,
        *,
        slots: Int64Array,
        expected_tokens: Int64Array | None = None,
        asserts_steps: bool = False,
    ) -> ViolationLog:
        """Write a forward's records; `expected_tokens` `[T] int64` turns the write-input assert on."""
        return self._launch(
            write,
            endpoint,
            half,
            pool,
            (2 if asserts_steps or expected_tokens is not None else 0) * forward.num_tokens,
            plan=plan,
            input_ids=forward.input_ids,
            positions=forward.positions,
            out_cache_loc=slots,
            expected_tokens=expected_tokens,
            # Nobody but the chain knows better than the engine where a token belongs.
            expected_positions=None if expected_tokens is None else forward.positions,
            chain_step_assert=asserts_steps,
        )

    def _launch(
        self, op: Callable[..., None], endpoint: Endpoint, half: str, pool: GroupPool, capacity: int, **given: Any
    ) -> ViolationLog:
        """Launch on a buffer: HEAD without KV hash, TAIL and SWEEP on the TAIL buffer with it."""
        if capacity > len(self._log.entries):
            self._log = ViolationLog.allocate(2 * capacity)
        self._log.clear()
        tag, head = launch_tag(endpoint, half, pool.group.kind), endpoint == "HEAD"
        op(
            canary=(pool.pool.head if head else pool.pool.tail)[half],
            tag=tag,
            sources=() if head else pool.sources[half],
            kv_hash_mode=KvHashMode.NONE if head else pool.kv_hash_mode,
            violations=self._log,
            slot_counter=self.slot_counters[tag : tag + 1],
            kernel_counter=self.kernel_counters[tag : tag + 1],
            backend=self._backend,
            **given,
        )
        return self._log
