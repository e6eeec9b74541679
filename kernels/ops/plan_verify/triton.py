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


@triton.jit(do_not_specialize=["num_slots", "splits"])
def _count_kernel(
    inputs, pools, numbers, num_slots, splits, ends, counted, ASKED: tl.constexpr, STRIDES: tl.constexpr,
    SOURCES: tl.constexpr, ENDS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """`ASKED`: whether there is a full-to-SWA table, a truth table, a check of tokens, of their low bits alone."""
    buffers: tl.constexpr = len(STRIDES)
    counts, starts = counted
    write_indexes = ends[3]
    unit = tl.program_id(0)
    found = check_unit((unit, splits), inputs, numbers, pools, num_slots, ends, ASKED, STRIDES, SOURCES, ENDS, T, False)
    lane = tl.arange(0, 4)
    tl.store(counts + lane * tl.num_programs(0) + unit, found, mask=lane < buffers)
    if unit == 0:
        # The next launch moves the indexes on while its other programs still want them as they were.
        for b in tl.static_range(buffers):
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


@triton.jit(do_not_specialize=["num_slots"])
def _emit_kernel(
    inputs, pools, numbers, num_slots, work, ends, counted, ASKED: tl.constexpr, STRIDES: tl.constexpr,
    SOURCES: tl.constexpr, ENDS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    buffers: tl.constexpr = len(STRIDES)
    splits, units = work
    write_indexes, kernel_counters, logs = ends
    counts, starts = counted
    program = tl.program_id(0)
    first = program * _SHARE
    mine = first + tl.arange(0, _SHARE)
    found = 0
    for b in tl.static_range(buffers):
        found += tl.sum(tl.load(counts + b * units + mine, mask=mine < units, other=0))
    if program == 0:
        for b in tl.static_range(buffers):
            add_where_any(kernel_counters[b], tl.load(starts) * 0 + 1)
    if found > 0:
        lane = tl.arange(0, 4)
        places = tl.zeros([4], tl.int64)
        for b in tl.static_range(buffers):
            mine_here = tl.sum(tl.load(counts + b * units + mine, mask=mine < units, other=0))
            add_where_any(write_indexes[b], mine_here.to(tl.int64))
            places += tl.where(lane == b, tl.load(starts + b) + sum_before(counts + b * units, first), 0)
        for unit in range(first, tl.minimum(first + _SHARE, units)):
            here = tl.load(counts + lane * units + unit, mask=lane < buffers, other=0)
            if tl.sum(here) > 0:
                first_entry = _entries_before(inputs[0], inputs[1], numbers[7], unit // splits)
                check_unit(
                    (unit, splits), inputs, numbers, pools, num_slots, (logs, first_entry, places), ASKED, STRIDES, SOURCES,
                    ENDS, T, True,
                )  # fmt: skip
                places += here


def plan_verify(*, buffers: Sequence[CanaryBuffer], check_tokens: bool, low_bits: bool = False, **asked: Any) -> None:
    """`plan_verify` on tensors: two launches, whatever the batch."""
    require_buffers(buffers)
    inputs, numbers = plan_inputs(**asked)
    table = asked["req_to_token"]
    many = BufferPointers.of(buffers)
    tile, warps, most = ROW_SHAPE if many.folds_rows else WORD_SHAPE
    bs = len(asked["req_pool_indices"])
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
        "ASKED": (asked["full_to_swa"] is not None, asked["truth_lens"] is not None, check_tokens, low_bits),
        **many.layout,
        "T": tile,
    }
    read, counters = (inputs, many.pools, numbers, many.num_slots), (many.failed, many.slot_counters)
    launch(
        _count_kernel,
        units,
        (*read, splits, (asked["out_of_range"], *counters, many.write_indexes), (counts, starts)),
        constants,
        num_warps=warps,
    )
    launch(
        _emit_kernel,
        cdiv(units, 32),
        (*read, (splits, units), (many.write_indexes, many.kernel_counters, many.logs), (counts, starts)),
        constants,
        num_warps=warps,
    )
