"""The plans of one forward: for each pool group what it reads and writes, sized to fit, the unjudgeable left out."""

import numpy as np
import numpy.typing as npt

from ..kernels.constants import PADDING_SLOT
from ..kernels.plan import VerifyPlan, WritePlan, plan, plan_capacity
from ..kernels.state import translate
from ..recorder.header import TraceHeader
from .forward import Forward, UnusableEventError
from .pools import GroupPool
from .tables import StateTables

Int64Array = npt.NDArray[np.int64]
MAX_PLAN_ENTRIES = 1 << 28  # 512 requests of half a million positions; more is a damaged or hostile file


class GroupStep:
    """One pool group's part of one forward: its plans and the slots it writes, `[T] int64` in the pool's numbering.

    `unknown_entries` counts plan entries that were left out because lost events may have rewritten their slot;
    `looked_beyond` says that something asked for a slot or a table entry that there is not.
    """

    __slots__ = ("looked_beyond", "pool", "slots", "unknown_entries", "verify_plan", "write_plan")

    def __init__(self, pool: GroupPool, slots: Int64Array, verify_plan: VerifyPlan, write_plan: WritePlan) -> None:
        self.pool = pool
        self.slots = slots
        self.verify_plan = verify_plan
        self.write_plan = write_plan
        self.looked_beyond = False
        self.unknown_entries = 0


class Planner:
    """Plans forwards; the plans' memory is used again by the next forward."""

    def __init__(self, header: TraceHeader, tables: StateTables, *, backend: str) -> None:
        self._header = header
        self._tables = tables
        self._backend = backend
        self._verify_plans = [VerifyPlan.allocate(capacity=1024, request_capacity=64) for _ in header.groups]
        self._write_plans = [WritePlan.allocate(request_capacity=64) for _ in header.groups]
        self._out_of_range = np.zeros(1, dtype=np.int64)

    def plan(self, pool: GroupPool, forward: Forward) -> GroupStep:
        """Return a group's plans; raise `UnusableEventError` where the forward asks for an absurd number of entries."""
        group, index, tables = pool.group, pool.index, self._tables
        slots = forward.out_cache_loc[group.table]
        lut = None
        if group.lut >= 0:
            lut = tables.luts[group.lut]
            translated = np.empty_like(slots)
            translate(slots=slots, lut=lut, out=translated, backend=self._backend)
            slots = translated
        bs = len(forward.req_pool_indices)
        # A prefix longer than the table is a finding of its own (`explain_requests`); the plan stops where it does.
        prefix_lens = np.minimum(forward.prefix_lens, tables.req_to_token[group.table].shape[1])
        entries = plan_capacity(prefix_lens, group.window)
        if entries > MAX_PLAN_ENTRIES:
            raise UnusableEventError(f"it reads {entries:,} positions, expected at most {MAX_PLAN_ENTRIES:,}")
        if entries > len(self._verify_plans[index].slots) or bs + 1 > len(self._verify_plans[index].request_offsets):
            self._verify_plans[index] = VerifyPlan.allocate(capacity=2 * entries, request_capacity=2 * bs)
        if bs > len(self._write_plans[index].seed_slots):
            self._write_plans[index] = WritePlan.allocate(request_capacity=2 * bs)
        step = GroupStep(pool, slots, self._verify_plans[index], self._write_plans[index])
        self._out_of_range[0] = 0
        plan(
            req_pool_indices=forward.req_pool_indices,
            prefix_lens=prefix_lens,
            extend_lens=forward.extend_lens,
            req_to_token=tables.req_to_token[group.table],
            window=group.window,
            full_to_swa=lut,
            truth_tokens=tables.truth if forward.truth_lens is not None else None,
            truth_lens=forward.truth_lens,
            token_offset=self._header.runners[forward.runner].token_offset,
            verify_plan=step.verify_plan,
            write_plan=step.write_plan,
            out_of_range=self._out_of_range,
            backend=self._backend,
        )
        step.looked_beyond = bool(self._out_of_range[0])
        if pool.any_unknown:
            step.unknown_entries = leave_out_unknown(pool, step.verify_plan)
            seeds = step.write_plan.seed_slots[:bs]
            # Slot 0 as a seed is a table entry that a gap has made unknown.
            seeds[_lookup(pool, seeds) | (seeds == PADDING_SLOT)] = -1
        return step


def leave_out_unknown(pool: GroupPool, verify_plan: VerifyPlan) -> int:
    """Turn plan entries that stand on lost events into padding, which is never verified; return how many."""
    count = int(verify_plan.num_valid[0])
    slots, prevs = verify_plan.slots[:count], verify_plan.prev_slots[:count]
    hit = _lookup(pool, slots)
    slots[hit] = PADDING_SLOT
    prevs[_lookup(pool, prevs)] = PADDING_SLOT
    return int(hit.sum())


def _lookup(pool: GroupPool, slots: Int64Array) -> npt.NDArray[np.bool_]:
    unknown = pool.pool.unknown
    inside = (slots >= 0) & (slots < len(unknown))
    return inside & unknown[np.where(inside, slots, 0)]
