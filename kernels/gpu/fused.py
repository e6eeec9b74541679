"""Plan and verify in one launch on the device: an entry lives in registers from the block table to its verdict.

A unit of work is a run of one request's positions, tile by tile; what an entry's successor must carry is hashed once and
handed on to the next lane. The second launch puts rows down where the first counted any (see `violations`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..constants import PADDING_ROW, SLOT_OUT_OF_RANGE
from ..fused import CanaryBuffer
from ..plan import MAX_LEN
from .buffers import BufferPointers
from .hashing import CHAIN_SEED, hash_chain, load_pair, signed, unsigned
from .kv_source import fold_slots
from .plan import plan_inputs
from .violations import add_where_any, store_rows, sum_before

_MAX_LEN = tl.constexpr(MAX_LEN)
_OUT_OF_RANGE = tl.constexpr(SLOT_OUT_OF_RANGE)
_PADDING_ROW = tl.constexpr(PADDING_ROW)
_SHARE = tl.constexpr(32)  # units that a program of the second launch looks after

# Entries of a tile, warps of a program, and how many units there are: enough to keep a device busy whatever the requests'
# lengths, few enough to sum their counts at once.
WORD_SHAPE = (128, 4, 8192)
ROW_SHAPE = (32, 1, 16384)


@triton.jit
def _through_lut(slot, lut, lut_len, mask, HAS_LUT: tl.constexpr):
    """Slots in the group's own numbering, and which of them the table does not have."""
    beyond = mask & (slot >= lut_len) & HAS_LUT
    if HAS_LUT:
        inside = mask & (slot >= 0) & (slot < lut_len)
        own = tl.load(lut + tl.where(inside, slot, 0), mask=inside, other=0)
        slot = tl.where(inside, own, tl.where(beyond, _OUT_OF_RANGE, slot))
    return slot, beyond


@triton.jit
def _closed_form(
    row, prefix, start, table, table_rows, table_width, table_stride, lut, lut_len, truth_rows, truth_width, truth_len,
    token_offset, HAS_LUT: tl.constexpr,
):  # fmt: skip
    """What needs no walk: entries past the table, truth tokens past theirs, the look-up before a window.

    Returns (failed look-ups of the plan, entries that have no slot).
    """
    row_is_there = (row >= 0) & (row < table_rows)
    width = tl.where(row_is_there, table_width, 0)
    beyond = tl.maximum(prefix - tl.maximum(start, width), 0)
    failed = beyond
    if (start > 0) & (start < prefix):
        if start - 1 >= width:
            failed += 1
        else:
            slot = tl.load(table + row * table_stride + start - 1).to(tl.int64)
            if HAS_LUT & (slot >= lut_len):
                failed += 1
    truth_is_there = (row >= 0) & (row < truth_rows)
    first_missing = tl.where(truth_is_there, truth_width, 0)
    failed += tl.maximum(
        tl.minimum(prefix, truth_len - token_offset) - tl.maximum(start, first_missing - token_offset), 0
    )
    return failed, beyond


@triton.jit
def _sum_bytes(packed, quarter):
    """The sums of the four bytes of int32 lanes, [4] int32."""
    sums = tl.zeros([4], tl.int32)
    for b in tl.static_range(4):
        sums += tl.where(quarter == b, tl.sum((packed >> (8 * b)) & 255), 0)
    return sums


@triton.jit
def _check_unit(
    unit, rows_in, prefix_lens, table, truth, truth_lens, lut, canaries, kv, kv_slots, table_rows, table_width,
    table_stride, truth_rows, truth_width, truth_stride, lut_len, num_slots, window, token_offset, splits,
    plan_failed, verify_failed, slot_counters, logs, log_entries, capacities, tags, first_entry, places,
    HAS_LUT: tl.constexpr, HAS_TRUTH: tl.constexpr, CHECK_TOKENS: tl.constexpr, STRIDES: tl.constexpr,
    SOURCES: tl.constexpr, ENDS: tl.constexpr, T: tl.constexpr, BUFFERS: tl.constexpr, EMIT: tl.constexpr,
):  # fmt: skip
    """Check one unit; returns the rows of each buffer, [4] int32. With EMIT it puts them down, else it counts failures."""
    request = unit // splits
    split = unit % splits
    row = tl.load(rows_in + request)
    prefix = tl.minimum(tl.maximum(tl.load(prefix_lens + request), 0), _MAX_LEN)
    start = row * 0
    if window > 0:
        start = tl.maximum(prefix - window, 0)
    truth_len = row * 0
    if HAS_TRUTH:
        truth_len = tl.minimum(tl.load(truth_lens + request), _MAX_LEN * 2)
    quarter = tl.arange(0, 4)
    counts = tl.zeros([4], tl.int32)
    if row != _PADDING_ROW:
        failed_plan = row * 0
        failed_verify = row * 0
        if (split == 0) & (not EMIT):
            failed_plan, failed_verify = _closed_form(
                row, prefix, start, table, table_rows, table_width, table_stride, lut, lut_len, truth_rows, truth_width,
                truth_len, token_offset, HAS_LUT,
            )  # fmt: skip
        end = row * 0
        if (row >= 0) & (row < table_rows):
            end = tl.minimum(prefix, table_width)
        if start < end:
            # The first lane of a tile only hands on: its entry is the last of the tile before, or nobody's.
            length = (end - start).to(tl.int32)
            tiles = (length + T - 2) // (T - 1)
            share = (tiles + splits - 1) // splits
            cells = table + row * table_stride + start
            truths = truth + row * truth_stride + start + token_offset
            # Truth tokens there are for offsets from the start: none where the truth table does not have the row.
            truth_end = row * 0
            if HAS_TRUTH & (row < truth_rows):
                truth_end = tl.minimum(truth_len, truth_width) - start - token_offset
            first = tl.where(start > 0, -1, 0)
            lane = tl.arange(0, T)
            left = tl.maximum(lane - 1, 0)
            missed_plan = tl.zeros([T], tl.int32)
            missed_verify = tl.zeros([T], tl.int32)
            rows_found = tl.zeros([T], tl.int32)
            for tile in range(split * share, tl.minimum(split * share + share, tiles)):
                i = tile * (T - 1) - 1 + lane
                there = (i < length) & (i >= first)
                slot = tl.load(cells + i, mask=there, other=-1).to(tl.int64)
                slot, beyond = _through_lut(slot, lut, lut_len, there, HAS_LUT)
                active = there & (lane > 0)
                want = tl.zeros([T], tl.int64) - 1
                if CHECK_TOKENS & HAS_TRUTH:
                    has_truth = active & (i >= 0 - start - token_offset) & (i < truth_end)
                    want = tl.load(truths + i, mask=has_truth, other=-1).to(tl.int64)
                inside = there & (slot >= 0) & (slot < num_slots)
                checked = inside & (slot > 0) & (lane > 0)
                cell = tl.where(inside, slot, 0)
                token, position = load_pair(canaries[0], cell * STRIDES[0], inside, T)
                prev_hash, kv_hash = load_pair(canaries[0], cell * STRIDES[0] + 2, inside, T)
                bad_kv = tl.zeros([T], tl.int32)
                for b in tl.static_range(BUFFERS):
                    if b > 0:
                        kv_hash = unsigned(tl.load(canaries[b] + cell * STRIDES[b] + 3, mask=checked, other=0))
                    now = fold_slots(kv, slot, checked, kv_slots[b], SOURCES, ENDS[b], ENDS[b + 1], T)
                    bad_kv |= tl.where(kv_hash != now, 1 << b, 0)
                successor = tl.where(slot < 0, CHAIN_SEED, hash_chain(prev_hash, token, position))
                prev_slot = tl.gather(slot, left, 0)
                handed_on = tl.gather(successor, left, 0)
                want_hash = tl.where((prev_slot != 0) & (prev_slot < num_slots), handed_on, prev_hash)
                token, position = signed(token), signed(position)
                reason = tl.where(prev_hash != want_hash, 1, 0)
                reason |= tl.where((want != -1) & (token != want), 32, 0)
                reason |= tl.where(position != start + i, 2, 0)
                if EMIT:
                    for b in tl.static_range(BUFFERS):
                        here = tl.where(checked, reason | ((bad_kv >> b) & 1) * 4, 0)
                        found = (here != 0).to(tl.int32)
                        done = tl.sum(tl.where(quarter == b, counts, 0))
                        place = tl.sum(tl.where(quarter == b, places, 0)) + done
                        store_rows(
                            logs[b], log_entries[b], capacities[b], place + (tl.cumsum(found, 0) - found), here != 0,
                            first_entry + i, tags[b], slot, position, token, want, signed(prev_hash), signed(want_hash), here,
                        )  # fmt: skip
                        counts += tl.where(quarter == b, tl.sum(found), 0)
                else:
                    missed_plan += (beyond & active).to(tl.int32)
                    missed_verify += (active & ((slot < 0) | (slot >= num_slots))).to(tl.int32)
                    missed_verify += (checked & (prev_slot >= num_slots)).to(tl.int32)
                    # A byte for each buffer: a lane has at most 255 tiles before they are summed.
                    for b in tl.static_range(BUFFERS):
                        here = reason | ((bad_kv >> b) & 1)
                        rows_found += tl.where(checked & (here != 0), 1 << (8 * b), 0)
                    if tile - split * share == 254:
                        counts += _sum_bytes(rows_found, quarter)
                        rows_found = tl.zeros([T], tl.int32)
            if not EMIT:
                # One reduction where nothing is wrong.
                if tl.max((missed_plan | missed_verify | rows_found).to(tl.uint32)) != 0:
                    failed_plan += tl.sum(missed_plan)
                    failed_verify += tl.sum(missed_verify)
                    counts += _sum_bytes(rows_found, quarter)
        if not EMIT:
            add_where_any(plan_failed, failed_plan)
            for b in tl.static_range(BUFFERS):
                add_where_any(verify_failed[b], failed_verify)
                if split == 0:
                    add_where_any(slot_counters[b], prefix - start)
    return counts


@triton.jit(
    do_not_specialize=[
        "kv_slots",
        "table_rows",
        "table_width",
        "truth_rows",
        "truth_width",
        "lut_len",
        "num_slots",
        "window",
        "token_offset",
        "splits",
    ]
)
def _count_kernel(
    rows_in, prefix_lens, table, truth, truth_lens, lut, canaries, kv, kv_slots, table_rows, table_width, table_stride,
    truth_rows, truth_width, truth_stride, lut_len, num_slots, window, token_offset, splits, plan_failed, verify_failed,
    slot_counters, write_indexes, counts, starts,
    HAS_LUT: tl.constexpr, HAS_TRUTH: tl.constexpr, CHECK_TOKENS: tl.constexpr, STRIDES: tl.constexpr,
    SOURCES: tl.constexpr, ENDS: tl.constexpr, T: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    found = _check_unit(
        unit, rows_in, prefix_lens, table, truth, truth_lens, lut, canaries, kv, kv_slots, table_rows, table_width,
        table_stride, truth_rows, truth_width, truth_stride, lut_len, num_slots, window, token_offset, splits, plan_failed,
        verify_failed, slot_counters, None, None, None, None, None, None, HAS_LUT, HAS_TRUTH, CHECK_TOKENS, STRIDES, SOURCES, ENDS, T,
        BUFFERS, False,
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


@triton.jit(
    do_not_specialize=[
        "kv_slots",
        "table_rows",
        "table_width",
        "truth_rows",
        "truth_width",
        "lut_len",
        "num_slots",
        "window",
        "token_offset",
        "splits",
        "capacities",
        "tags",
        "units",
    ]
)
def _emit_kernel(
    rows_in, prefix_lens, table, truth, truth_lens, lut, canaries, kv, kv_slots, table_rows, table_width, table_stride,
    truth_rows, truth_width, truth_stride, lut_len, num_slots, window, token_offset, splits, write_indexes, counts, starts, logs,
    log_entries, capacities, tags, kernel_counters, units,
    HAS_LUT: tl.constexpr, HAS_TRUTH: tl.constexpr, CHECK_TOKENS: tl.constexpr, STRIDES: tl.constexpr,
    SOURCES: tl.constexpr, ENDS: tl.constexpr, T: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program * _SHARE
    mine = first + tl.arange(0, _SHARE)
    found = 0
    for b in tl.static_range(BUFFERS):
        found += tl.sum(tl.load(counts + b * units + mine, mask=mine < units, other=0))
    if program == 0:
        for b in tl.static_range(BUFFERS):
            tl.atomic_add(kernel_counters[b], tl.load(starts) * 0 + 1)
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
                _check_unit(
                    unit, rows_in, prefix_lens, table, truth, truth_lens, lut, canaries, kv, kv_slots, table_rows,
                    table_width, table_stride, truth_rows, truth_width, truth_stride, lut_len, num_slots, window,
                    token_offset, splits, None, None, None, logs, log_entries, capacities, tags,
                    _entries_before(rows_in, prefix_lens, window, unit // splits), places, HAS_LUT, HAS_TRUTH,
                    CHECK_TOKENS, STRIDES, SOURCES, ENDS, T, BUFFERS, True,
                )  # fmt: skip
                places += here


def plan_verify(
    *,
    req_pool_indices: Any,
    prefix_lens: Any,
    req_to_token: Any,
    window: int,
    full_to_swa: Any | None,
    truth_tokens: Any | None,
    truth_lens: Any | None,
    token_offset: int,
    check_tokens: bool,
    buffers: Sequence[CanaryBuffer],
    out_of_range: Any,
) -> None:
    """`fused.plan_verify` on tensors: two launches, whatever the batch."""
    inputs = plan_inputs(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        req_to_token=req_to_token,
        window=window,
        full_to_swa=full_to_swa,
        truth_tokens=truth_tokens,
        truth_lens=truth_lens,
        token_offset=token_offset,
        out_of_range=out_of_range,
    )
    many = BufferPointers.of(buffers)
    folds_rows = any(geometry[3] >= 16 for geometry in many.sources)
    tile, warps, most = ROW_SHAPE if folds_rows else WORD_SHAPE
    bs = len(req_pool_indices)
    splits = max(1, min(most // max(bs, 1), triton.cdiv(req_to_token.shape[1], tile - 1)))
    units = bs * splits
    if not units:
        for buffer in buffers:
            buffer.kernel_counter.add_(1)
        return
    counts = torch.empty(len(buffers) * units + 1, dtype=torch.int32, device=req_to_token.device)
    starts = torch.empty(len(buffers), dtype=torch.int64, device=req_to_token.device)
    constants = {
        "HAS_LUT": full_to_swa is not None,
        "HAS_TRUTH": truth_lens is not None,
        "CHECK_TOKENS": check_tokens,
        "STRIDES": many.strides,
        "SOURCES": many.sources,
        "ENDS": many.source_ends,
        "T": tile,
        "BUFFERS": len(buffers),
        "num_warps": warps,
    }
    read = (*inputs[:6], many.canaries, many.kv, many.kv_slots, *inputs[6:13], many.num_slots, *inputs[13:], splits)
    _count_kernel[(units,)](
        *read, out_of_range, many.failed, many.slot_counters, many.write_indexes, counts, starts, **constants
    )
    _emit_kernel[(triton.cdiv(units, 32),)](
        *read, many.write_indexes, counts, starts, many.rows, many.entries, many.capacities, many.tags,
        many.kernel_counters, units, **constants,
    )  # fmt: skip
