"""Findings for look-ups that no pool or table can answer.

The canary's CUDA kernels clamp such a slot and its reference raises. Offline it is neither: the kernels count it, and
this module, run only when they counted one, says which entry it was.
"""

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.constants import SLOT_OUT_OF_RANGE
from ...kernels.ops.plan.reference import VerifyPlan, WritePlan
from ...recorder.state.forward import Forward
from ...recorder.state.pools import GroupPool
from ...recorder.state.requests import RequestTable
from ..report.findings import Finding, event_finding, forward_finding
from .planning import Sweep


def explain_plan(
    plan: VerifyPlan, forward: Forward, pool: GroupPool, table_shape: tuple[int, ...], request_table: RequestTable
) -> list[Finding]:
    """Return a finding for each slot that a verify plan looks up and the pool does not have.

    Of predecessors only those where a window begins: any other is the entry before, which speaks for itself.
    """
    count, bs = int(plan.num_valid[0]), len(forward.request_ids)
    slots = plan.slots[:count]
    starts = plan.request_offsets[:bs]
    starts = starts[starts < plan.request_offsets[1 : bs + 1]]
    prevs = plan.prev_slots[starts]
    beyond_prevs = prevs >= pool.num_slots
    beyond = np.flatnonzero((slots < 0) | (slots >= pool.num_slots))
    looked_up = [
        *((int(entry), int(slot), 1) for entry, slot in zip(starts[beyond_prevs], prevs[beyond_prevs], strict=True)),
        *((int(entry), int(slots[entry]), 0) for entry in beyond),
    ]
    findings = []
    for entry, slot, back in sorted(looked_up, key=lambda found: (found[0], -found[2])):
        request = int(np.searchsorted(plan.request_offsets[1 : bs + 1], entry, side="right"))
        row, position = int(forward.req_pool_indices[request]), int(plan.expected_positions[entry]) - back
        what = "the slot before its window, " if back else ""
        if slot != SLOT_OUT_OF_RANGE:
            kind, detail = "slot_out_of_pool", f"reads {what}slot {slot}, the pool has {pool.num_slots}"
        elif not 0 <= row < table_shape[0] or position >= table_shape[1]:
            kind, detail = "entry_out_of_table", f"reads row {row}, position {position} of a table {list(table_shape)}"
        else:
            kind, detail = "swa_lut_out_of_range", f"reads {what}a slot beyond the full-to-SWA table"
        findings.append(_finding(kind, detail, forward, pool, request, position, slot, request_table))
    return findings


def explain_writes(
    slots: Int64Array, plan: WritePlan, forward: Forward, pool: GroupPool, request_table: RequestTable
) -> list[Finding]:
    """Return a finding for each written slot that the pool does not have."""
    bs = len(forward.request_ids)
    findings = []
    for token in np.flatnonzero(slots[: int(plan.offsets[bs])] >= pool.num_slots):
        request = int(np.searchsorted(plan.offsets[1 : bs + 1], token, side="right"))
        slot, position = int(slots[token]), int(forward.positions[token])
        if slot == SLOT_OUT_OF_RANGE:
            kind, detail = "swa_lut_out_of_range", "writes a slot beyond the full-to-SWA table"
        else:
            kind, detail = "slot_out_of_pool", f"writes slot {slot}, the pool has {pool.num_slots}"
        findings.append(_finding(kind, detail, forward, pool, request, position, slot, request_table))
    return findings


def beyond_table(forward: Forward, table_shape: tuple[int, ...]) -> BoolArray:
    """Say for each request, `[bs] bool`, whether its row or a position of it is none of the block table's."""
    rows, prefix = forward.req_pool_indices, forward.prefix_lens
    ends = prefix + np.maximum(forward.extend_lens, 0)
    beyond: BoolArray = (rows < 0) | (rows >= table_shape[0]) | (prefix < 0) | (ends > table_shape[1])
    return beyond & (rows != 0)


def explain_requests(
    forward: Forward, pool: GroupPool, table_shape: tuple[int, ...], request_table: RequestTable
) -> list[Finding]:
    """Return a finding for each request whose row or positions are none of the block table's."""
    findings = []
    for request in np.flatnonzero(beyond_table(forward, table_shape)):
        prefix = int(forward.prefix_lens[request])
        last = prefix + max(int(forward.extend_lens[request]), 0) - 1
        detail = (
            f"has row {int(forward.req_pool_indices[request])} and positions {prefix} to {last}, the table has "
            f"{table_shape[0]} rows of {table_shape[1]}"
        )
        findings.append(_finding("entry_out_of_table", detail, forward, pool, int(request), last, -1, request_table))
    return findings


def explain_sweep(sweep: Sweep, group: int, num_slots: int) -> list[Finding]:
    """Return a finding for the slots of a sweep that the pool does not have, none if it has all."""
    plan = sweep.plans[group]
    beyond = np.flatnonzero((plan.slots < 0) | (plan.slots >= num_slots) | (plan.prev_slots >= num_slots))
    if not len(beyond):
        return []
    first = int(beyond[0])
    detail = f"the prefix cache holds {len(beyond)} slots, or predecessors of slots, that the pool of {num_slots} does not have"
    place = {"position": int(plan.expected_positions[first]), "slot": int(plan.slots[first])}
    return [event_finding("slot_out_of_pool", sweep, detail, runner=sweep.runner, group=group, **place)]


def _finding(
    kind: str,
    detail: str,
    forward: Forward,
    pool: GroupPool,
    request: int,
    position: int,
    slot: int,
    request_table: RequestTable,
) -> Finding:
    slot = slot if slot != SLOT_OUT_OF_RANGE else -1
    return forward_finding(
        kind, forward, detail, request_table, request=request, group=pool.index, position=position, slot=slot
    )
