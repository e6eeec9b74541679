"""Plan and verify in one launch on the device: an entry lives in registers from the block table to its verdict.

Units of work are runs of one request's positions (`check_unit`). The second launch puts rows down where the first counted
any (see `violations`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ...constants import PADDING_ROW
from ..plan.reference import MAX_LEN
from ..plan.triton import plan_inputs
from ..triton_buffers import BufferPointers
from ..triton_launch import cdiv, launch
from ..triton_violations import add_where_any, sum_before
from .reference import CanaryBuffer, require_buffers
from .triton_tile import check_unit

_MAX_LEN = tl.constexpr(MAX_LEN)
_PADDING_ROW = tl.constexpr(PADDING_ROW)
_SHARE = tl.constexpr(32)  # units that a program of the second launch looks after

# Entries of a tile, warps of a program, and how many units there are: enough to keep a device busy whatever the requests'
# lengths, few enough to sum their counts at once.
WORD_SHAPE = (128, 4, 8192)
ROW_SHAPE = (32, 1, 16384)


_INTS = (
    *("kv_slots", "table_rows", "table_width", "truth_rows", "truth_width", "lut_len", "num_slots", "window"),
    *("token_offset", "splits", "table_stride", "truth_stride"),
)


@triton.jit(do_not_specialize=[*_INTS])
def _count_kernel(
    rows_in, prefix_lens, table, truth, truth_lens, lut, canaries, kv, kv_slots, table_rows, table_width, table_stride,
    truth_rows, truth_width, truth_stride, lut_len, num_slots, window, token_offset, splits, plan_failed, verify_failed,
    slot_counters, write_indexes, counts, starts,
    HAS_LUT: tl.constexpr, HAS_TRUTH: tl.constexpr, CHECK_TOKENS: tl.constexpr, STRIDES: tl.constexpr,
    SOURCES: tl.constexpr, ENDS: tl.constexpr, T: tl.constexpr, BUFFERS: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    found = check_unit(
        unit, rows_in, prefix_lens, table, truth, truth_lens, lut, canaries, kv, kv_slots, table_rows, table_width,
        table_stride, truth_rows, truth_width, truth_stride, lut_len, num_slots, window, token_offset, splits, plan_failed,
        verify_failed, slot_counters, None, None, None, None, None, None, HAS_LUT, HAS_TRUTH, CHECK_TOKENS, STRIDES, SOURCES, ENDS, T,
        BUFFERS, LOW_BITS, False,
    )  # fmt: skip
    lane = tl.arange(0, 4)
    tl.store(counts + lane * tl.num_programs(0) + unit, found, mask=lane < BUFFERS)
    if unit == 0:
        # The next launch moves the indexes on while its other programs still want them as they were.
        for b in tl.static_range(BUFFERS):
            tl.store(starts + b, tl.load(write_indexes[b]))


@triton.jit
def _entries_before(rows_in, prefix_lens, window, end):
    """How many entries the first `end` requests have."""
    total = tl.zeros([1024], tl.int64)
    for first in range(0, end, 1024):
        r = first + tl.arange(0, 1024)
        row = tl.load(rows_in + r, mask=r < end, other=0)
        prefix = tl.minimum(tl.maximum(tl.load(prefix_lens + r, mask=r < end, other=0), 0), _MAX_LEN)
        if window > 0:
            prefix = tl.minimum(prefix, window)
        total += tl.where(row != _PADDING_ROW, prefix, 0)
    return tl.sum(total)


@triton.jit(do_not_specialize=[*_INTS, "capacities", "tags", "units"])
def _emit_kernel(
    rows_in, prefix_lens, table, truth, truth_lens, lut, canaries, kv, kv_slots, table_rows, table_width, table_stride,
    truth_rows, truth_width, truth_stride, lut_len, num_slots, window, token_offset, splits, write_indexes, counts, starts, logs,
    log_entries, capacities, tags, kernel_counters, units,
    HAS_LUT: tl.constexpr, HAS_TRUTH: tl.constexpr, CHECK_TOKENS: tl.constexpr, STRIDES: tl.constexpr,
    SOURCES: tl.constexpr, ENDS: tl.constexpr, T: tl.constexpr, BUFFERS: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program * _SHARE
    mine = first + tl.arange(0, _SHARE)
    found = 0
    for b in tl.static_range(BUFFERS):
        found += tl.sum(tl.load(counts + b * units + mine, mask=mine < units, other=0))
    if program == 0:
        for b in tl.static_range(BUFFERS):
            add_where_any(kernel_counters[b], tl.load(starts) * 0 + 1)
    if found > 0:
        lane = tl.arange(0, 4)
        places = tl.zeros([4], tl.int64)
        for b in tl.static_range(BUFFERS):
            mine_here = tl.sum(tl.load(counts + b * units + mine, mask=mine < units, other=0))
            add_where_any(write_indexes[b], mine_here.to(tl.int64))
            places += tl.where(lane == b, tl.load(starts + b) + sum_before(counts + b * units, first), 0)
        for unit in range(first, tl.minimum(first + _SHARE, units)):
            here = tl.load(counts + lane * units + unit, mask=lane < BUFFERS, other=0)
            if tl.sum(here) > 0:
                check_unit(
                    unit, rows_in, prefix_lens, table, truth, truth_lens, lut, canaries, kv, kv_slots, table_rows,
                    table_width, table_stride, truth_rows, truth_width, truth_stride, lut_len, num_slots, window,
                    token_offset, splits, None, None, None, logs, log_entries, capacities, tags,
                    _entries_before(rows_in, prefix_lens, window, unit // splits), places, HAS_LUT, HAS_TRUTH,
                    CHECK_TOKENS, STRIDES, SOURCES, ENDS, T, BUFFERS, LOW_BITS, True,
                )  # fmt: skip
                places += here


def plan_verify(*, buffers: Sequence[CanaryBuffer], check_tokens: bool, low_bits: bool = False, **asked: Any) -> None:
    """`plan_verify` on tensors: two launches, whatever the batch."""
    require_buffers(buffers)
    inputs = plan_inputs(**asked)
    table = asked["req_to_token"]
    many = BufferPointers.of(buffers)
    tile, warps, most = ROW_SHAPE if many.folds_rows else WORD_SHAPE
    bs = len(inputs[0])
    tiles = cdiv(table.shape[1], tile - 1)
    # All units of a long request have as many tiles.
    share = cdiv(tiles, max(1, most // max(bs, 1)))
    splits = max(1, cdiv(tiles, max(share, 1)))
    units = bs * splits
    if not units:
        for buffer in buffers:
            buffer.kernel_counter.add_(1)
        return
    counts = torch.empty(len(buffers) * units + 1, dtype=torch.int32, device=table.device)
    starts = torch.empty(len(buffers), dtype=torch.int64, device=table.device)
    constants = {
        "HAS_LUT": asked["full_to_swa"] is not None,
        "HAS_TRUTH": asked["truth_lens"] is not None,
        "CHECK_TOKENS": check_tokens,
        "STRIDES": many.strides,
        "SOURCES": many.sources,
        "ENDS": many.source_ends,
        "T": tile,
        "BUFFERS": len(buffers),
        "LOW_BITS": low_bits,
    }
    read = (*inputs[:6], many.canaries, many.kv, many.kv_slots, *inputs[6:13], many.num_slots, *inputs[13:], splits)
    launch(
        _count_kernel,
        units,
        (*read, asked["out_of_range"], many.failed, many.slot_counters, many.write_indexes, counts, starts),
        constants,
        num_warps=warps,
    )
    launch(
        _emit_kernel,
        cdiv(units, 32),
        (
            *read, many.write_indexes, counts, starts, many.rows, many.entries, many.capacities, many.tags,
            many.kernel_counters, units,
        ),
        constants,
        num_warps=warps,
    )  # fmt: skip
