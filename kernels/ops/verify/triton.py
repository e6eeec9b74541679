"""Verify a plan on the device, for entries that are there already (a sweep's); `fused` does without them."""

from typing import Any

import torch
import triton
import triton.language as tl

from ...arrays import require_tensor
from ..hash.triton import CHAIN_SEED, hash_chain, load_pair, signed
from ..hash.triton_kv import fold_slots
from ..plan.reference import VerifyPlan
from ..plan_verify.reference import CanaryBuffer
from ..triton_buffers import BufferPointers
from ..triton_launch import cdiv, launch
from ..triton_violations import add_where_any, store_rows, sum_before

PROGRAMS = 4096
_UNIT_BLOCK = tl.constexpr(32)


@triton.jit
def _active(num_valid, enable, capacity):
    """How many entries count."""
    return tl.where(tl.load(enable) != 0, tl.maximum(tl.minimum(tl.load(num_valid), capacity), 0), 0)


@triton.jit
def _check_share(
    unit, units, active, entries, pools, num_slots, ends, CHECK_TOKENS: tl.constexpr, STRIDES: tl.constexpr,
    SOURCES: tl.constexpr, T: tl.constexpr, EMIT: tl.constexpr,
):  # fmt: skip
    """Check one unit's share of the entries; returns how many rows it has.

    With EMIT it puts them down, and `ends` are the logs and the first row's place; else the counters of failed look-ups.
    """
    slots_in, tokens_in, positions_in, prevs_in = entries
    words = pools[0][0]
    stride: tl.constexpr = STRIDES[0]
    lane = tl.arange(0, T)
    share = (active + units * T - 1) // (units * T) * T
    count = tl.zeros([T], tl.int32)
    failed = tl.zeros([T], tl.int32)
    for tile in range(unit * share, tl.minimum(unit * share + share, active), T):
        i = tile + lane
        mask = i < active
        slot = tl.load(slots_in + i, mask=mask, other=0)
        prev = tl.load(prevs_in + i, mask=mask, other=0)
        inside = (slot > 0) & (slot < num_slots)
        at = tl.where(inside, slot, 0) * stride
        token, position = load_pair(words, at, inside, T)
        prev_hash, kv_hash = load_pair(words, at + 2, inside, T)
        has_record = inside & (prev > 0) & (prev < num_slots)
        at = tl.where(has_record, prev, 0) * stride
        prev_token, prev_position = load_pair(words, at, has_record, T)
        prev_prev, _unused = load_pair(words, at + 2, has_record, T)
        successor = tl.where(prev < 0, CHAIN_SEED, hash_chain(prev_prev, prev_token, prev_position))
        want_hash = tl.where(has_record | (prev < 0), successor, prev_hash)
        want = tl.zeros([T], tl.int64) - 1
        if CHECK_TOKENS:
            want = tl.load(tokens_in + i, mask=mask, other=-1)
        reason = tl.where(prev_hash != want_hash, 1, 0)
        reason |= tl.where((want != -1) & (signed(token) != want), 32, 0)
        reason |= tl.where(signed(position) != tl.load(positions_in + i, mask=mask, other=0), 2, 0)
        reason |= tl.where(
            kv_hash != fold_slots(pools[1], slot, inside, pools[2][0], SOURCES, 0, len(SOURCES), T), 4, 0
        )
        reason = tl.where(inside, reason, 0)
        found = (reason != 0).to(tl.int32)
        if EMIT:
            done = tl.sum(count)
            logs = ends[0]
            store_rows(
                (logs[0][0], logs[1][0], logs[2][0], logs[3][0]), ends[1] + done + (tl.cumsum(found, 0) - found),
                reason != 0, i, (slot, signed(position), signed(token), want, signed(prev_hash), signed(want_hash)), reason,
            )  # fmt: skip
        else:
            failed += ((slot < 0) | (slot >= num_slots)).to(tl.int32)
            failed += (inside & (prev >= num_slots)).to(tl.int32)
        count += found
    if not EMIT:
        add_where_any(ends[0], tl.sum(failed.to(tl.int64)))
    return tl.sum(count)


@triton.jit(do_not_specialize=["plan_capacity", "num_slots"])
def _count_kernel(
    entries, limits, plan_capacity, pools, num_slots, failed, write_indexes, counted, CHECK_TOKENS: tl.constexpr,
    STRIDES: tl.constexpr, SOURCES: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    active = _active(limits[0], limits[1], plan_capacity)
    found = _check_share(
        unit, tl.num_programs(0), active, entries, pools, num_slots, failed, CHECK_TOKENS, STRIDES, SOURCES, T, False
    )
    tl.store(counted[0] + unit, found)
    if unit == 0:
        tl.store(counted[1], tl.load(write_indexes[0]))


@triton.jit(do_not_specialize=["plan_capacity", "num_slots", "units"])
def _emit_kernel(
    entries, limits, plan_capacity, pools, num_slots, counted, ends, units, CHECK_TOKENS: tl.constexpr,
    STRIDES: tl.constexpr, SOURCES: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    counts, begin = counted
    logs = ends[0]
    write_index, slot_counter, kernel_counter = ends[1][0], ends[2][0], ends[3][0]
    first = tl.program_id(0) * _UNIT_BLOCK
    mine = first + tl.arange(0, _UNIT_BLOCK)
    here = tl.load(counts + mine, mask=mine < units, other=0)
    active = _active(limits[0], limits[1], plan_capacity)
    if first == 0:
        tl.atomic_add(kernel_counter, tl.load(begin) * 0 + 1)
        add_where_any(slot_counter, active.to(tl.int64))
    if tl.sum(here) > 0:
        add_where_any(write_index, tl.sum(here).to(tl.int64))
        place = tl.load(begin) + sum_before(counts, first)
        for unit in range(first, tl.minimum(first + _UNIT_BLOCK, units)):
            if tl.load(counts + unit) > 0:
                place += _check_share(
                    unit,
                    units,
                    active,
                    entries,
                    pools,
                    num_slots,
                    (logs, place),
                    CHECK_TOKENS,
                    STRIDES,
                    SOURCES,
                    T,
                    True,
                )


def verify(*, plan: VerifyPlan, check_tokens: bool, **buffer: Any) -> None:
    """`verify.verify` on tensors: two launches."""
    one = BufferPointers.of([CanaryBuffer(**buffer)])
    require_tensor("verify_plan.slots", plan.slots, "int64", 1)
    folds_rows = any(geometry[3] >= 16 for geometry in one.sources)
    tile, warps = (32, 1) if folds_rows else (256, 4)
    units = max(1, min(PROGRAMS, triton.cdiv(len(plan.slots), tile)))
    counts = torch.empty(units, dtype=torch.int32, device=plan.slots.device)
    begin = torch.empty(1, dtype=torch.int64, device=plan.slots.device)
    entries = (plan.slots, plan.expected_tokens, plan.expected_positions, plan.prev_slots)
    read = (entries, (plan.num_valid, plan.enable), len(plan.slots), one.pools, one.num_slots)
    constants = {"CHECK_TOKENS": check_tokens, "STRIDES": one.strides, "SOURCES": one.sources, "T": tile}
    launch(_count_kernel, units, (*read, one.failed, one.write_indexes, (counts, begin)), constants, num_warps=warps)
    ends = (one.logs, one.write_indexes, one.slot_counters, one.kernel_counters)
    launch(_emit_kernel, cdiv(units, 32), (*read, (counts, begin), ends, units), constants, num_warps=warps)
