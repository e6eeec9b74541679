"""What of a record does not hang on its chain: token, position and KV hash, laid by as many programs as there are."""

import triton
import triton.language as tl

from ..hash.triton import signed, store_pair
from ..hash.triton_kv import fold_slots
from ..triton_violations import add_where_any


@triton.jit
def lay_records(
    first, step, end, slots_in, ids, positions, kv, kv_slots, canaries, taken, tallies, num_slots, STRIDES: tl.constexpr,
    SOURCES: tl.constexpr, ENDS: tl.constexpr, BUFFERS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Lay tiles of records without their prev_hash, and note their slots in the bit set `taken`.

    Adds to `tallies`: records written, slots not there, the last token of slot 0, whether any slot came twice.
    """
    written = tl.zeros([T], tl.int32)
    missing = tl.zeros([T], tl.int32)
    twice = tl.zeros([T], tl.int32)
    last = tl.zeros([T], tl.int64) - 1
    for tile in range(first, end, step):
        i = tile + tl.arange(0, T)
        slot = tl.load(slots_in + i, mask=i < end, other=-1)
        valid = (slot >= 0) & (slot < num_slots)
        own = valid & (slot > 0)
        cell = tl.where(valid, slot, 0)
        bit = (cell % 32).to(tl.int32)
        before = tl.atomic_or(taken + cell // 32, tl.full([T], 1, tl.int32) << bit, mask=valid, sem="relaxed")
        token = tl.load(ids + i, mask=own, other=0)
        position = tl.load(positions + i, mask=own, other=0)
        for b in tl.static_range(BUFFERS):
            record = canaries[b] + cell * STRIDES[b]
            store_pair(record, token, position, own, T)
            kv_hash = fold_slots(kv, slot, valid, kv_slots[b], SOURCES, ENDS[b], ENDS[b + 1], T)
            tl.store(record + 3, signed(kv_hash), mask=valid)
        written += valid.to(tl.int32)
        missing += (slot >= num_slots).to(tl.int32)
        last = tl.maximum(last, tl.where(slot == 0, i, -1))
        twice |= tl.where(own, (before >> bit) & 1, 0)
    add_where_any(tallies, tl.sum(written).to(tl.int64))
    add_where_any(tallies + 1, tl.sum(missing).to(tl.int64))
    latest = tl.max(last)
    if latest >= 0:
        tl.atomic_max(tallies + 2, latest, sem="relaxed")
    if tl.max(twice) != 0:
        tl.atomic_max(tallies + 3, latest * 0 + 1, sem="relaxed")
