"""Findings for look-ups that no pool or table can answer.

The canary's CUDA kernels clamp such a slot and its reference raises. Offline it is neither: the kernels count it, and
this module, run only when they counted one, says which entry it was.
"""

from collections.abc import Iterator

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.constants import SLOT_OUT_OF_RANGE
from ...kernels.ops.plan.reference import VerifyPlan
from ...recorder.state.forward import Forward
from ...recorder.state.requests import RequestTable
from ..report.findings import Finding, event_finding, forward_finding
from .planning import GroupStep, Sweep

_Beyond = tuple[str, str, int, int, int]  # kind, detail, request, position, slot


def explain_forward(
    step: GroupStep, forward: Forward, table_shape: tuple[int, ...], request_table: RequestTable
) -> list[Finding]:
    """Return a finding for each slot that a forward reads or writes in a group and its pool does not have, and for each
    request whose row or positions are none of its block table's, `table_shape`.

    Of predecessors only those where a window begins: any other is the entry before, which speaks for itself.
    """
    pool, bs = step.pool, len(forward.request_ids)
    found = [
        *_beyond_reads(step.verify_plan, pool.num_slots, forward, table_shape),
        *_beyond_writes(step.slots, step.write_plan.offsets[: bs + 1], pool.num_slots, forward),
    ]
    for request in np.flatnonzero(beyond_table(forward, table_shape)).tolist():
        prefix = int(forward.prefix_lens[request])
        last = prefix + max(int(forward.extend_lens[request]), 0) - 1
        row, (rows, width) = int(forward.req_pool_indices[request]), table_shape
        detail = f"has row {row} and positions {prefix} to {last}, the table has {rows} rows of {width}"
        found.append(("entry_out_of_table", detail, request, last, -1))
    return [
        forward_finding(kind, forward, detail, request_table, request=request, group=pool.index, position=at, slot=slot)
        for kind, detail, request, at, slot in found
    ]


def _beyond_reads(
    plan: VerifyPlan, num_slots: int, forward: Forward, table_shape: tuple[int, ...]
) -> Iterator[_Beyond]:
    count, bs = int(plan.num_valid[0]), len(forward.request_ids)
    slots, ends = plan.slots[:count], plan.request_offsets[1 : bs + 1]
    starts = plan.request_offsets[:bs][plan.request_offsets[:bs] < ends]
    before = starts[plan.prev_slots[starts] >= num_slots]
    beyond = np.flatnonzero((slots < 0) | (slots >= num_slots))
    looked_up = [(entry, -1, int(plan.prev_slots[entry])) for entry in before.tolist()]
    looked_up += [(entry, 0, int(slots[entry])) for entry in beyond.tolist()]
    for entry, back, slot in sorted(looked_up, key=lambda found: found[:2]):
        request = int(np.searchsorted(ends, entry, side="right"))
        row, position = int(forward.req_pool_indices[request]), int(plan.expected_positions[entry]) + back
        what = "the slot before its window, " if back else ""
        if slot != SLOT_OUT_OF_RANGE:
            yield "slot_out_of_pool", f"reads {what}slot {slot}, the pool has {num_slots}", request, position, slot
        elif not 0 <= row < table_shape[0] or position >= table_shape[1]:
            detail = f"reads row {row}, position {position} of a table {list(table_shape)}"
            yield "entry_out_of_table", detail, request, position, -1
        else:
            yield "swa_lut_out_of_range", f"reads {what}a slot beyond the full-to-SWA table", request, position, -1


def _beyond_writes(slots: Int64Array, offsets: Int64Array, num_slots: int, forward: Forward) -> Iterator[_Beyond]:
    for token in np.flatnonzero(slots[: int(offsets[-1])] >= num_slots):
        request = int(np.searchsorted(offsets[1:], token, side="right"))
        slot, position = int(slots[token]), int(forward.positions[token])
        if slot == SLOT_OUT_OF_RANGE:
            yield "swa_lut_out_of_range", "writes a slot beyond the full-to-SWA table", request, position, -1
        else:
            yield "slot_out_of_pool", f"writes slot {slot}, the pool has {num_slots}", request, position, slot


def beyond_table(forward: Forward, table_shape: tuple[int, ...]) -> BoolArray:
    """Say for each request, `[bs] bool`, whether its row or a position of it is none of the block table's."""
    rows, prefix = forward.req_pool_indices, forward.prefix_lens
    ends = prefix + np.maximum(forward.extend_lens, 0)
    beyond: BoolArray = (rows < 0) | (rows >= table_shape[0]) | (prefix < 0) | (ends > table_shape[1])
    return beyond & (rows != 0)


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
