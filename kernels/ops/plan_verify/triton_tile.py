"""A run of one request's positions, planned and verified tile by tile.

What an entry's successor must carry is hashed once and handed on to the next lane.
"""

import triton
import triton.language as tl

from ...constants import PADDING_ROW, SLOT_OUT_OF_RANGE, UNKNOWN_TOKEN
from ..hash.triton import CHAIN_SEED, hash_chain, load_pair, signed, unsigned
from ..hash.triton_kv import fold_slots
from ..plan.reference import MAX_LEN
from ..triton_violations import add_where_any, store_rows

_MAX_LEN = tl.constexpr(MAX_LEN)
_OUT_OF_RANGE = tl.constexpr(SLOT_OUT_OF_RANGE)
_PADDING_ROW = tl.constexpr(PADDING_ROW)
_UNKNOWN_TOKEN = tl.constexpr(UNKNOWN_TOKEN)


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
def _closed_form(row, prefix, start, table, truth_len, numbers, HAS_LUT: tl.constexpr):
    """What needs no walk: entries past the table, truth tokens past theirs, the look-up before a window.

    Returns (failed look-ups of the plan, entries that have no slot).
    """
    table_rows, table_width, table_stride, truth_rows, truth_width, _truth_stride, lut_len, _window, token_offset = (
        numbers
    )
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
def _reads(request, rows_in, prefix_lens, truth_lens, window, HAS_TRUTH: tl.constexpr):
    """A request's row, the end and the start of what it reads, and how much truth it has."""
    row = tl.load(rows_in + request)
    prefix = tl.minimum(tl.maximum(tl.load(prefix_lens + request), 0), _MAX_LEN)
    start = row * 0
    if window > 0:
        start = tl.maximum(prefix - window, 0)
    truth_len = row * 0
    if HAS_TRUTH:
        truth_len = tl.minimum(tl.load(truth_lens + request), _MAX_LEN * 2)
    return row, prefix, start, truth_len


@triton.jit
def _changed_kv(
    kv_hash, canaries, cell, kv, slot, checked, kv_slots, STRIDES: tl.constexpr, SOURCES: tl.constexpr,
    ENDS: tl.constexpr, T: tl.constexpr, BUFFERS: tl.constexpr,
):  # fmt: skip
    """A bit for each buffer whose bytes are not those that were hashed, [T] int32; `kv_hash` is the first one's."""
    bad_kv = tl.zeros([T], tl.int32)
    for b in tl.static_range(BUFFERS):
        if b > 0:
            kv_hash = unsigned(tl.load(canaries[b] + cell * STRIDES[b] + 3, mask=checked, other=0))
        now = fold_slots(kv, slot, checked, kv_slots[b], SOURCES, ENDS[b], ENDS[b + 1], T)
        bad_kv |= tl.where(kv_hash != now, 1 << b, 0)
    return bad_kv


@triton.jit
def _reasons(token, position, prev_hash, want, want_position, want_hash, LOW_BITS: tl.constexpr):
    """The tokens expected, and what is wrong with entries but for their bytes."""
    if LOW_BITS:
        agree = (token == _UNKNOWN_TOKEN) | (token.to(tl.int32).to(tl.int64) == want)
        want = tl.where((want != -1) & agree, token, want)
    reason = tl.where(prev_hash != want_hash, 1, 0)
    reason |= tl.where((want != -1) & (token != want), 32, 0)
    reason |= tl.where(position != want_position, 2, 0)
    return want, reason


@triton.jit
def _put_down(
    logs, counts, places, quarter, checked, reason, bad_kv, entries, values, BUFFERS: tl.constexpr
):  # fmt: skip
    """Put down a tile's rows; `logs` and `values` are tuples. Returns the counts, with them."""
    for b in tl.static_range(BUFFERS):
        here = tl.where(checked, reason | ((bad_kv >> b) & 1) * 4, 0)
        found = (here != 0).to(tl.int32)
        done = tl.sum(tl.where(quarter == b, counts, 0))
        place = tl.sum(tl.where(quarter == b, places, 0)) + done
        store_rows(
            (logs[0][b], logs[1][b], logs[2][b], logs[3][b]), place + (tl.cumsum(found, 0) - found), here != 0, entries,
            (values[0], values[1], values[2], values[3], signed(values[4]), signed(values[5])), here,
        )  # fmt: skip
        counts += tl.where(quarter == b, tl.sum(found), 0)
    return counts


@triton.jit
def _failed_rows(reason, bad_kv, checked, BUFFERS: tl.constexpr):
    """Whether each lane has a row, in a byte for each buffer: a lane has at most 255 tiles before they are summed."""
    failed = checked.to(tl.int32) * 0
    for b in tl.static_range(BUFFERS):
        here = reason | ((bad_kv >> b) & 1)
        failed += tl.where(checked & (here != 0), 1 << (8 * b), 0)
    return failed


@triton.jit
def _add_counts(ends, failed_plan, failed_verify, entries, split, BUFFERS: tl.constexpr):
    """Add a unit's failed look-ups, and of a request's first unit its entries, to the counters."""
    add_where_any(ends[0], failed_plan)
    for b in tl.static_range(BUFFERS):
        add_where_any(ends[1][b], failed_verify)
        if split == 0:
            add_where_any(ends[2][b], entries)


@triton.jit
def check_unit(
    place, inputs, numbers, pools, num_slots, ends, ASKED: tl.constexpr, STRIDES: tl.constexpr, SOURCES: tl.constexpr,
    ENDS: tl.constexpr, T: tl.constexpr, EMIT: tl.constexpr,
):  # fmt: skip
    """Check one unit; returns the rows of each buffer, [4] int32. With EMIT it puts them down, else it counts failures.

    `place` is the unit, and how many a request has; `inputs` and `numbers` are those of `plan_inputs`; `ends` with EMIT
    the logs, the request's first entry and the rows' places, else counters: failed look-ups of plan and verify, slots.
    """
    rows_in, prefix_lens, table, truth, truth_lens, lut = inputs
    table_rows, table_width, table_stride, truth_rows, truth_width, truth_stride, lut_len, window, token_offset = (
        numbers
    )
    canaries, kv, kv_slots = pools
    with_lut: tl.constexpr = ASKED[0]
    with_truth: tl.constexpr = ASKED[1]
    unit, splits = place
    buffers: tl.constexpr = len(STRIDES)
    request = unit // splits
    split = unit % splits
    row, prefix, start, truth_len = _reads(request, rows_in, prefix_lens, truth_lens, window, with_truth)
    quarter = tl.arange(0, 4)
    counts = tl.zeros([4], tl.int32)
    if row != _PADDING_ROW:
        failed_plan, failed_verify = row * 0, row * 0
        if (split == 0) & (not EMIT):
            failed_plan, failed_verify = _closed_form(row, prefix, start, table, truth_len, numbers, with_lut)
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
            if with_truth & (row < truth_rows):
                truth_end = tl.minimum(truth_len, truth_width) - start - token_offset
            first = tl.where(start > 0, -1, 0)
            lane = tl.arange(0, T)
            left = tl.maximum(lane - 1, 0)
            missed_plan, missed_verify = tl.zeros([T], tl.int32), tl.zeros([T], tl.int32)
            rows_found = tl.zeros([T], tl.int32)
            ahead = split * share * (T - 1) - 1 + lane
            next_slot = tl.load(
                cells + ahead, mask=(ahead < length) & (ahead >= first), other=-1, eviction_policy="evict_first"
            )
            for tile in range(split * share, tl.minimum(split * share + share, tiles)):
                i = tile * (T - 1) - 1 + lane
                there = (i < length) & (i >= first)
                # The next tile's slots are on their way while this one's records are.
                slot = next_slot.to(tl.int64)
                ahead = i + (T - 1)
                next_slot = tl.load(cells + ahead, mask=ahead < length, other=-1, eviction_policy="evict_first")
                slot, beyond = _through_lut(slot, lut, lut_len, there, with_lut)
                active = there & (lane > 0)
                want = tl.zeros([T], tl.int64) - 1
                if ASKED[2] & with_truth:
                    has_truth = active & (i >= 0 - start - token_offset) & (i < truth_end)
                    want = tl.load(truths + i, mask=has_truth, other=-1, eviction_policy="evict_first").to(tl.int64)
                inside = there & (slot >= 0) & (slot < num_slots)
                checked = inside & (slot > 0) & (lane > 0)
                cell = tl.where(inside, slot, 0)
                token, position = load_pair(canaries[0], cell * STRIDES[0], inside, T)
                prev_hash, kv_hash = load_pair(canaries[0], cell * STRIDES[0] + 2, inside, T)
                bad_kv = _changed_kv(
                    kv_hash, canaries, cell, kv, slot, checked, kv_slots, STRIDES, SOURCES, ENDS, T, buffers
                )
                successor = tl.where(slot < 0, CHAIN_SEED, hash_chain(prev_hash, token, position))
                prev_slot = tl.gather(slot, left, 0)
                handed_on = tl.gather(successor, left, 0)
                want_hash = tl.where((prev_slot != 0) & (prev_slot < num_slots), handed_on, prev_hash)
                token, position = signed(token), signed(position)
                want, reason = _reasons(token, position, prev_hash, want, start + i, want_hash, ASKED[3])
                if EMIT:
                    counts = _put_down(
                        ends[0], counts, ends[2], quarter, checked, reason, bad_kv, ends[1] + i,
                        (slot, position, token, want, prev_hash, want_hash), buffers,
                    )  # fmt: skip
                else:
                    missed_plan += (beyond & active).to(tl.int32)
                    missed_verify += (active & ((slot < 0) | (slot >= num_slots))).to(tl.int32)
                    missed_verify += (checked & (prev_slot >= num_slots)).to(tl.int32)
                    rows_found += _failed_rows(reason, bad_kv, checked, buffers)
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
            _add_counts(ends, failed_plan, failed_verify, prefix - start, split, buffers)
    return counts
