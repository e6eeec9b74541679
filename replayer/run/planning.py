"""The plans of one forward: for each pool group what it reads and writes, sized to fit, the unjudgeable left out.

And of a walk of the prefix cache, which the canary's SWEEP launches check: every slot that the cache holds is verified in the
TAIL buffer, chain, position and KV hash, tokens unchecked. A slot 0 stands for a sliding-window half that is gone.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array, record_words
from ...kernels.constants import PADDING_SLOT, UNKNOWN_TOKEN
from ...kernels.ops.oracle.reference import generalized_ids, oracle_tokens
from ...kernels.ops.plan.reference import VerifyPlan, WritePlan, plan_reads
from ...kernels.replay_pass.due import ForwardReads
from ...kernels.tokens import expect_stored
from ...recorder.state.apply import WriteStep
from ...recorder.state.forward import Forward, UnusableEventError, batch_tokens
from ...recorder.state.pools import GroupPool
from ...recorder.state.requests import RequestTable
from ...recorder.state.tables import StateTables
from ...recorder.state.writes import KvChanges, plan_own_writes, readable_prefixes, which_unknown
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView


@dataclass(slots=True)
class GroupStep(WriteStep):
    """One pool group's part of one forward: its plans and the slots it writes, `[T] int64` in the pool's numbering.

    `unknown_entries` of the plan were left out because lost events may have rewritten their slot; `out_of_range`: something
    asked for a slot or a table entry that there is not; `reads` counts the prefix entries that the forward reads, of which an
    incremental replay plans those of `due` (None: all); `changed_slots` `[n] int64` are the slots that it writes or saw change.
    """

    verify_plan: VerifyPlan
    out_of_range: bool = False
    unknown_entries: int = 0
    reads: int = 0
    due: ForwardReads | None = None
    changed_slots: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))


class Planner:
    """Plans forwards; the plans' memory is used again by the next forward."""

    def __init__(self, header: TraceHeader, tables: StateTables, *, backend: str) -> None:
        self._header = header
        self._tables = tables
        self._backend = backend
        self._verify_plans = [VerifyPlan.allocate(capacity=1024, request_capacity=64) for _ in header.groups]
        self._write_plans = [WritePlan.allocate(request_capacity=64) for _ in header.groups]
        self._out_of_range = np.zeros(1, dtype=np.int64)

    def plan(self, pool: GroupPool, forward: Forward, changes: KvChanges | None = None) -> GroupStep:
        """Return a group's plans; raise `UnusableEventError` where the forward asks for an absurd number of entries."""
        index, bs = pool.index, len(forward.req_pool_indices)
        prefix_lens, entries = readable_prefixes(pool, forward, self._tables)
        if bs > len(self._write_plans[index].seed_slots):
            self._write_plans[index] = WritePlan.allocate(request_capacity=2 * bs)
        writes, outside = self._write_plans[index], self._out_of_range
        outside[0] = 0
        slots = plan_own_writes(pool, forward, self._tables, prefix_lens, writes, outside, backend=self._backend)
        step = GroupStep(pool, slots, writes, self._verify_plans[index])
        self._plan_reads(step, forward, changes, prefix_lens, entries)
        step.out_of_range = bool(outside[0])
        expect_stored(step.verify_plan, record_words(pool.pool.tail[pool.group.halves[0]], written=False))
        if pool.any_unknown:
            unknown = leave_out_unknown(pool, step.verify_plan)
            step.unknown_entries = int(unknown.sum())
            if step.due is not None:
                step.due.marks[unknown] = 1
        return step

    def _plan_reads(
        self, step: GroupStep, forward: Forward, changes: KvChanges | None, prefix_lens: Int64Array, entries: int
    ) -> None:
        """Fill a step's verify plan, and say what it reads: `entries`."""
        del changes
        group, tables = step.pool.group, self._tables
        self._make_room(step, entries)
        plan_reads(
            req_pool_indices=forward.req_pool_indices,
            prefix_lens=prefix_lens,
            req_to_token=tables.req_to_token[group.table],
            window=group.window,
            full_to_swa=tables.luts[group.lut] if group.lut >= 0 else None,
            truth_tokens=tables.truth if forward.truth_lens is not None else None,
            truth_lens=forward.truth_lens,
            token_offset=self._header.runners[forward.runner].token_offset,
            verify_plan=step.verify_plan,
            out_of_range=self._out_of_range,
            backend=self._backend,
        )
        step.reads = int(step.verify_plan.num_valid[0])

    def _make_room(self, step: GroupStep, entries: int) -> None:
        """Give a step's verify plan room for so many entries, and for its requests."""
        index, bs = step.pool.index, len(step.write_plan.seed_slots)
        if entries > len(step.verify_plan.slots) or bs + 1 > len(step.verify_plan.request_offsets):
            self._verify_plans[index] = VerifyPlan.allocate(capacity=2 * entries, request_capacity=bs)
        step.verify_plan = self._verify_plans[index]


def leave_out_unknown(pool: GroupPool, verify_plan: VerifyPlan) -> npt.NDArray[np.bool_]:
    """Turn plan entries that stand on lost events into padding, which is never verified; return which, `[n] bool`.

    So are predecessors whose chain begins elsewhere than the entry's: what was hashed before is known of one of them alone.
    """
    count = int(verify_plan.num_valid[0])
    slots, prevs = verify_plan.slots[:count], verify_plan.prev_slots[:count]
    hit = which_unknown(pool, slots)
    slots[hit] = PADDING_SLOT
    prevs[which_unknown(pool, prevs)] = PADDING_SLOT
    starts, most = pool.pool.chain_starts, pool.num_slots
    inside = (slots > 0) & (slots < most) & (prevs > 0) & (prevs < most)
    prevs[inside & (starts[slots * inside] != starts[prevs * inside])] = PADDING_SLOT
    return hit


def expected_tokens(
    forward: Forward, header: TraceHeader, request_table: RequestTable, *, backend: str
) -> Int64Array | None:
    """Return the token that each of a forward's inputs must be, `[T] int64`; None if nothing can be asserted.

    A draft's input at position p is the token of p + 1. Requests go by their room if they have one.
    """
    offset = header.runners[forward.runner].token_offset
    asked = forward.mode == "draft_extend" or (forward.mode == "decode" and not offset)
    if header.oracle is None or not asked or not len(forward.request_ids):
        return None
    tokens = batch_tokens(forward)
    if not len(tokens.request):
        return None
    rooms, prompts, known_requests = request_table.rooms_and_prompts(forward.request_ids)
    ids = np.empty(len(forward.request_ids), np.int64)
    generalized_ids(request_ids=forward.request_ids, rooms=rooms, out=ids)
    # The model goes by the positions that it is fed; where those are wrong, the chain says so.
    at = forward.positions[: len(tokens.request)] + offset
    predicted = np.empty(len(at), np.int64)
    oracle_tokens(
        request_ids=ids[tokens.request],
        positions=at,
        vocab_size=header.oracle.vocab_size,
        out=predicted,
        backend=backend,
    )
    known = known_requests[tokens.request]
    if forward.mode == "draft_extend":  # its inputs may be the prompt's
        known &= (prompts >= 0)[tokens.request] & (at >= prompts[tokens.request])
    expected = forward.input_ids.copy()
    known &= expected[: len(at)] != UNKNOWN_TOKEN
    expected[: len(at)][known] = predicted[known]
    return expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep event, checked; `plans` holds one verify plan for each group of `runner`, by the group's index."""

    event: int
    forward: int
    time_ns: int
    runner: int
    plans: dict[int, VerifyPlan]
    mode: str = "sweep"


def read_sweep(view: EventView, header: TraceHeader) -> Sweep:
    """Return a sweep event's plans; raise `UnusableEventError` if its columns do not fit one another or the header."""
    runner = int(view.scalar("runner"))
    if not 0 <= runner < len(header.runners):
        raise UnusableEventError(f"runner {runner}, the header names {len(header.runners)}")
    names = ("group", "slot", "position", "prev", "locked")
    groups, slots, positions, prevs, _ = columns = [view.ints(f"sweep_{name}") for name in names]
    if len({len(column) for column in columns}) != 1:
        raise UnusableEventError("the sweep_* columns differ in length")
    mine = [index for index, group in enumerate(header.groups) if group.runner == runner]
    if not np.isin(groups, mine).all():
        raise UnusableEventError(f"sweep_group names a group that runner {runner} does not have")
    plans = {}
    for index in mine:
        chosen = groups == index
        count = int(chosen.sum())
        plans[index] = VerifyPlan(
            slots=slots[chosen],
            expected_tokens=np.full(count, -1, np.int64),
            expected_positions=positions[chosen],
            prev_slots=prevs[chosen],
            num_valid=np.array([count], np.int32),
            enable=np.ones(1, np.int32),
            request_offsets=np.array([0, count], np.int64),
        )
    return Sweep(
        event=view.number, forward=int(view.scalar("forward")), time_ns=view.time_ns, runner=runner, plans=plans
    )
