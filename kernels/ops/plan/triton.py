"""Plan on the device: prefix sums over the requests in one program, entries in many."""

from typing import Any

import torch
import triton
import triton.language as tl

from ...arrays import require_tensor
from ...constants import PADDING_ROW, SLOT_OUT_OF_RANGE
from ..triton_launch import launch
from ..triton_violations import add_where_any
from .reference import MAX_LEN, VerifyPlan, WritePlan, require_plan_numbers

_MAX_LEN = tl.constexpr(MAX_LEN)
_OUT_OF_RANGE = tl.constexpr(SLOT_OUT_OF_RANGE)
_PADDING_ROW = tl.constexpr(PADDING_ROW)
_REQUESTS = tl.constexpr(512)

TILE = 256
PROGRAMS = 4096


@triton.jit
def _saturating_add(a, b):
    return tl.minimum(a + b, _MAX_LEN)


@triton.jit
def _look_up(row, position, mask, table, table_rows, table_width, table_stride, lut, lut_len, HAS_LUT: tl.constexpr):
    """`plan.look_up_slot` for each lane of `mask`: the slots, and which look-ups failed."""
    inside = mask & (row >= 0) & (row < table_rows) & (position >= 0) & (position < table_width)
    at = tl.where(inside, row * table_stride + position, 0)
    slot = tl.where(inside, tl.load(table + at, mask=inside, other=0).to(tl.int64), _OUT_OF_RANGE)
    failed = mask & (inside == 0)
    if HAS_LUT:
        known = inside & (slot >= 0) & (slot < lut_len)
        own = tl.load(lut + tl.where(known, slot, 0), mask=known, other=0)
        failed = failed | (inside & (slot >= lut_len))
        slot = tl.where(known, own, tl.where(inside & (slot >= lut_len), _OUT_OF_RANGE, slot))
    return slot, failed


@triton.jit
def _entries_of(rows_in, prefix_lens, r, mask, window):
    """How many entries requests [R] have."""
    row = tl.load(rows_in + r, mask=mask, other=0)
    prefix = tl.minimum(tl.maximum(tl.load(prefix_lens + r, mask=mask, other=0), 0), _MAX_LEN)
    if window > 0:
        prefix = tl.minimum(prefix, window)
    return tl.where(row != _PADDING_ROW, prefix, 0)


@triton.jit(do_not_specialize=["bs", "num_offsets", "capacity", "window"])
def _offsets_kernel(
    rows_in, prefix_lens, offsets, request_offsets, num_valid, enable, bs, num_offsets, capacity, window
):
    total = tl.load(prefix_lens, mask=bs < 0, other=0)  # 0, as the int64 that it becomes
    for first in range(0, tl.maximum(bs, num_offsets), _REQUESTS):
        r = first + tl.arange(0, _REQUESTS)
        # Each lane takes its left neighbour's entries: a saturated sum cannot be taken back.
        left = _entries_of(rows_in, prefix_lens, r - 1, (r > first) & (r <= bs), window)
        before = tl.associative_scan(left, 0, _saturating_add)
        before = tl.minimum(before + total, _MAX_LEN)
        tl.store(offsets + r, before, mask=r < bs)
        tl.store(request_offsets + r, before, mask=r < num_offsets)
        last = tl.max(tl.where(r == first + _REQUESTS - 1, before, 0))
        at_last = _entries_of(rows_in, prefix_lens, r, (r == first + _REQUESTS - 1) & (r < bs), window)
        total = tl.minimum(last + tl.sum(at_last), _MAX_LEN)
    tl.store(num_valid, tl.minimum(total, capacity).to(tl.int32))
    tl.store(enable, (total <= capacity).to(tl.int32))


@triton.jit(do_not_specialize=["splits"])
def _entries_kernel(
    inputs, numbers, offsets, enable, entries, out_of_range, splits, HAS_LUT: tl.constexpr, HAS_TRUTH: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    rows_in, prefix_lens, table, truth, truth_lens, lut = inputs
    table_rows, table_width, table_stride, truth_rows, truth_width, truth_stride, lut_len, window, token_offset = (
        numbers
    )
    slots, expected_tokens, expected_positions, prev_slots = entries
    request = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    row = tl.load(rows_in + request)
    if (tl.load(enable) != 0) & (row != _PADDING_ROW):
        prefix = tl.minimum(tl.maximum(tl.load(prefix_lens + request), 0), _MAX_LEN)
        start = row * 0
        if window > 0:
            start = tl.maximum(prefix - window, 0)
        truth_len = row * 0
        if HAS_TRUTH:
            truth_len = tl.load(truth_lens + request)
        entry = tl.load(offsets + request)
        lane = tl.arange(0, T)
        failed = tl.zeros([T], tl.int32)
        for tile in range(start + split * T, prefix, splits * T):
            p = tile + lane
            mask = p < prefix
            rows = row + p * 0
            slot, missed = _look_up(rows, p, mask, table, table_rows, table_width, table_stride, lut, lut_len, HAS_LUT)
            failed += missed.to(tl.int32)
            prev, missed = _look_up(
                rows, p - 1, mask & (p > 0), table, table_rows, table_width, table_stride, lut, lut_len, HAS_LUT
            )
            failed += (missed & (p == start)).to(tl.int32)
            expected = tl.zeros([T], tl.int32) - 1
            if HAS_TRUTH:
                at = p + token_offset
                wanted = mask & (at >= 0) & (at < truth_len)
                there = wanted & (rows >= 0) & (rows < truth_rows) & (at < truth_width)
                expected = tl.load(truth + tl.where(there, rows * truth_stride + at, 0), mask=there, other=-1)
                failed += (wanted & (there == 0)).to(tl.int32)
            i = entry + p - start
            tl.store(slots + i, slot, mask=mask)
            tl.store(expected_tokens + i, expected.to(tl.int64), mask=mask)
            tl.store(expected_positions + i, p, mask=mask)
            tl.store(prev_slots + i, tl.where(p == 0, -1, prev), mask=mask)
        add_where_any(out_of_range, tl.sum(failed.to(tl.int64)))


@triton.jit
def _extends_of(rows_in, extend_lens, r, mask):
    """How many tokens requests [R] write."""
    row = tl.load(rows_in + r, mask=mask, other=0)
    extend = tl.minimum(tl.maximum(tl.load(extend_lens + r, mask=mask, other=0), 0), _MAX_LEN)
    return tl.where(row != _PADDING_ROW, extend, 0)


@triton.jit(do_not_specialize=["bs", "num_seeds"])
def _writes_kernel(inputs, numbers, extend_lens, plan, out_of_range, bs, num_seeds, HAS_LUT: tl.constexpr):
    rows_in, prefix_lens, table, _truth, _truth_lens, lut = inputs
    table_rows, table_width, table_stride, lut_len = numbers[0], numbers[1], numbers[2], numbers[6]
    offsets, seed_slots, num_valid_reqs = plan
    total = tl.load(extend_lens, mask=bs < 0, other=0)
    for first in range(0, tl.maximum(bs, num_seeds) + 1, _REQUESTS):
        r = first + tl.arange(0, _REQUESTS)
        left = _extends_of(rows_in, extend_lens, r - 1, (r > first) & (r <= bs))
        before = tl.minimum(tl.associative_scan(left, 0, _saturating_add) + total, _MAX_LEN)
        tl.store(offsets + r, tl.where(r <= bs, before, 0), mask=r <= num_seeds)
        extend = _extends_of(rows_in, extend_lens, r, r < bs)
        row = tl.load(rows_in + r, mask=r < bs, other=0)
        prefix = tl.load(prefix_lens + r, mask=r < bs, other=0)
        seeded = (r < tl.minimum(bs, num_seeds)) & (extend > 0) & (prefix > 0)
        seed, failed = _look_up(
            row, prefix - 1, seeded, table, table_rows, table_width, table_stride, lut, lut_len, HAS_LUT
        )
        tl.store(seed_slots + r, tl.where(seeded, seed, -1), mask=r < tl.minimum(bs, num_seeds))
        add_where_any(out_of_range, tl.sum(failed.to(tl.int64)))
        is_last = r == first + _REQUESTS - 1
        total = tl.minimum(tl.max(tl.where(is_last, before, 0)) + tl.sum(tl.where(is_last, extend, 0)), _MAX_LEN)
    tl.store(num_valid_reqs, bs)


def plan_inputs(
    *,
    req_pool_indices: Any,
    prefix_lens: Any,
    req_to_token: Any,
    window: int,
    full_to_swa: Any | None,
    truth_tokens: Any | None,
    truth_lens: Any | None,
    token_offset: int,
    out_of_range: Any,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Check what plans read; return it as kernels take it: tensors, and numbers.

    Returns:
        rows, prefix_lens, table, truth, truth_lens, full_to_swa.
        Rows, width and stride of both tables; the length of full_to_swa; window; token_offset.
    """
    bs = req_pool_indices.shape[0]
    require_tensor("req_pool_indices", req_pool_indices, "int64", 1)
    require_tensor("prefix_lens", prefix_lens, "int64", 1, length=bs)
    require_tensor("req_to_token", req_to_token, "int32", 2)
    require_tensor("out_of_range", out_of_range, "int64", 1, length=1)
    require_plan_numbers(bs, window, token_offset, truth_tokens, truth_lens)
    truth = req_to_token[:0] if truth_tokens is None else truth_tokens
    lens = prefix_lens if truth_lens is None else truth_lens
    lut = prefix_lens if full_to_swa is None else full_to_swa
    require_tensor("truth_tokens", truth, "int32", 2)
    require_tensor("truth_lens", lens, "int64", 1, length=bs)
    require_tensor("full_to_swa", lut, "int64", 1)
    of_tables = (*req_to_token.shape, req_to_token.stride(0), *truth.shape, truth.stride(0))
    numbers = (*of_tables, lut.shape[0], window, token_offset)
    return (req_pool_indices, prefix_lens, req_to_token, truth, lens, lut), numbers


def plan(*, extend_lens: Any, verify_plan: VerifyPlan, write_plan: WritePlan, **asked: Any) -> None:
    """`plan.plan` on tensors: three launches."""
    inputs, numbers = plan_inputs(**asked)
    rows, prefix_lens, table = inputs[:3]
    bs, width = len(rows), table.shape[1]
    require_tensor("verify_plan.slots", verify_plan.slots, "int64", 1)
    offsets = torch.empty(bs, dtype=torch.int64, device=table.device)
    _offsets_kernel[(1,)](
        rows, prefix_lens, offsets, verify_plan.request_offsets, verify_plan.num_valid, verify_plan.enable, bs,
        len(verify_plan.request_offsets), len(verify_plan.slots), asked["window"],
    )  # fmt: skip
    if bs:
        splits = max(1, min(PROGRAMS // bs, triton.cdiv(max(width, 1), TILE)))
        entries = tuple(
            getattr(verify_plan, name) for name in ("slots", "expected_tokens", "expected_positions", "prev_slots")
        )
        launch(
            _entries_kernel,
            bs * splits,
            (inputs, numbers, offsets, verify_plan.enable, entries, asked["out_of_range"], splits),
            {"HAS_LUT": asked["full_to_swa"] is not None, "HAS_TRUTH": asked["truth_lens"] is not None, "T": TILE},
            num_warps=4,
        )
    _fill_writes(inputs, numbers, extend_lens, write_plan, asked)


def plan_writes(*, extend_lens: Any, write_plan: WritePlan, **asked: Any) -> None:
    """`plan.plan_writes` on tensors: one launch."""
    inputs, numbers = plan_inputs(window=0, truth_tokens=None, truth_lens=None, token_offset=0, **asked)
    _fill_writes(inputs, numbers, extend_lens, write_plan, asked)


def _fill_writes(
    inputs: tuple[Any, ...], numbers: tuple[int, ...], extend_lens: Any, plan: WritePlan, asked: dict[str, Any]
) -> None:
    bs = len(inputs[0])
    require_tensor("extend_lens", extend_lens, "int64", 1, length=bs)
    require_tensor("write_plan.offsets", plan.offsets, "int64", 1)
    written = plan.offsets, plan.seed_slots, plan.num_valid_reqs
    launch(
        _writes_kernel,
        1,
        (inputs, numbers, extend_lens, written, asked["out_of_range"], bs, len(plan.seed_slots)),
        {"HAS_LUT": asked["full_to_swa"] is not None},
        num_warps=4,
    )
