"""The steps of a write on the device: seeds saved, slots marked, chains walked, records laid (see `write`)."""

import triton
import triton.language as tl

from .hashing import CHAIN_SEED, hash_chain, load_pair, signed, store_pair, unsigned
from .kv_source import fold_slots

_REQUESTS = tl.constexpr(256)
_CHAIN_TILE = tl.constexpr(128)


@triton.jit
def active_requests(num_valid_reqs, capacity):
    """How many requests of the plan count."""
    return tl.maximum(tl.minimum(tl.load(num_valid_reqs), capacity), 0)


@triton.jit
def well_formed(offsets, active, num_tokens):
    """Whether the offsets only rise, within the tokens."""
    bad = tl.zeros([_REQUESTS], tl.int32)
    for first in range(0, active, _REQUESTS):
        r = first + tl.arange(0, _REQUESTS)
        start = tl.load(offsets + r, mask=r < active, other=0)
        end = tl.load(offsets + r + 1, mask=r < active, other=0)
        bad |= ((start < 0) | (end < start) | (end > num_tokens)).to(tl.int32)
    return tl.max(bad) == 0


@triton.jit
def save_seeds(offsets, seed_slots, active, capacity, words, num_slots, scratch, STRIDE: tl.constexpr):
    """Keep each seed's record and what goes on from it; returns how many seeds are not there."""
    failed = tl.zeros([_REQUESTS], tl.int32)
    for first in range(0, active, _REQUESTS):
        r = first + tl.arange(0, _REQUESTS)
        mask = r < active
        start = tl.load(offsets + r, mask=mask, other=0)
        end = tl.load(offsets + r + 1, mask=mask, other=0)
        seed = tl.load(seed_slots + r, mask=mask, other=-1)
        failed += (mask & (end > start) & (seed >= num_slots)).to(tl.int32)
        inside = mask & (seed >= 0) & (seed < num_slots)
        at = tl.where(inside, seed, 0) * STRIDE
        token, position = load_pair(words, at, inside, _REQUESTS)
        prev_hash, _unused = load_pair(words, at + 2, inside, _REQUESTS)
        running = tl.where(inside, hash_chain(prev_hash, token, position), CHAIN_SEED)
        tl.store(scratch + r, signed(token), mask=mask)
        tl.store(scratch + capacity + r, signed(position), mask=mask)
        tl.store(scratch + 2 * capacity + r, signed(prev_hash), mask=mask)
        tl.store(scratch + 3 * capacity + r, signed(running), mask=mask)
    return tl.sum(failed)


@triton.jit
def seeds_taken(offsets, seed_slots, active, num_slots, taken):
    """Whether any chain began at a slot in the bit set."""
    found = tl.zeros([_REQUESTS], tl.int32)
    for first in range(0, active, _REQUESTS):
        r = first + tl.arange(0, _REQUESTS)
        mask = r < active
        mask &= tl.load(offsets + r + 1, mask=mask, other=0) > tl.load(offsets + r, mask=mask, other=0)
        seed = tl.load(seed_slots + r, mask=mask, other=-1)
        inside = mask & (seed >= 0) & (seed < num_slots)
        cell = tl.where(inside, seed, 0)
        bits = tl.load(taken + cell // 32, mask=inside, other=0)
        found |= (bits >> (cell % 32).to(tl.int32)) & 1
    return tl.max(found) != 0


@triton.jit
def fold_tokens(
    first, step, end, slots_in, kv, kv_slots, out, num_tokens, SOURCES: tl.constexpr, ENDS: tl.constexpr,
    BUFFERS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The KV hashes of the tokens' slots, for each buffer, into `out` [buffers, tokens]."""
    lane = tl.arange(0, T)
    for tile in range(first, end, step):
        i = tile + lane
        slot = tl.load(slots_in + i, mask=i < end, other=-1)
        for b in tl.static_range(BUFFERS):
            if ENDS[b + 1] > ENDS[b]:
                kv_hash = fold_slots(kv, slot, i < end, kv_slots[b], SOURCES, ENDS[b], ENDS[b + 1], T)
                tl.store(out + b * num_tokens + i, signed(kv_hash), mask=i < end)


@triton.jit
def lay_records(
    tile, end, slots_in, ids, positions, hashes, kv_hashes, canaries, taken, num_tokens, num_slots, STRIDES: tl.constexpr,
    ENDS: tl.constexpr, BUFFERS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Lay a tile of whole records, and note their slots in the bit set `taken`.

    Returns (records written, slots not there, last token of slot 0, whether another token came to a slot before).
    """
    i = tile + tl.arange(0, T)
    slot = tl.load(slots_in + i, mask=i < end, other=-1)
    valid = (slot >= 0) & (slot < num_slots)
    own = valid & (slot > 0)
    cell = tl.where(valid, slot, 0)
    bit = (cell % 32).to(tl.int32)
    before = tl.atomic_or(taken + cell // 32, tl.full([T], 1, tl.int32) << bit, mask=valid, sem="relaxed")
    token = tl.load(ids + i, mask=valid, other=0)
    position = tl.load(positions + i, mask=valid, other=0)
    prev_hash = tl.load(hashes + i, mask=valid, other=0)
    for b in tl.static_range(BUFFERS):
        kv_hash = prev_hash * 0
        if ENDS[b + 1] > ENDS[b]:
            kv_hash = tl.load(kv_hashes + b * num_tokens + i, mask=valid, other=0)
        record = canaries[b] + cell * STRIDES[b]
        store_pair(record, token, position, own, T)
        store_pair(record + 2, prev_hash, kv_hash, own, T)
        tl.store(record + 3, kv_hash, mask=valid & (slot == 0))
    twice = tl.where(own, (before >> bit) & 1, 0)
    missing = (slot >= num_slots).to(tl.int32)
    return tl.sum(valid.to(tl.int32)), tl.sum(missing), tl.max(tl.where(slot == 0, i, -1)), tl.max(twice)


@triton.jit
def _four(words, at):
    """Four neighbouring words, uint64."""
    first, second = unsigned(tl.load(words + at)), unsigned(tl.load(words + at + 1))
    return first, second, unsigned(tl.load(words + at + 2)), unsigned(tl.load(words + at + 3))


@triton.jit
def walk_chain(
    start, end, running, before, follows, slots_in, ids, positions, expected_ids, expected_positions, num_slots, hashes_out,
    touched_out, ASSERT_INPUTS: tl.constexpr, ASSERT_STEPS: tl.constexpr,
):  # fmt: skip
    """Walk one request's chain: what each token's record must carry, into `hashes_out`; whether there are rows to write.

    Tokens are asked for a tile before the walk comes to them, so that what it loads itself lies in the nearest cache.
    """
    lane = tl.arange(0, _CHAIN_TILE)
    own = tl.arange(0, 32)
    bad = tl.zeros([_CHAIN_TILE], tl.int32)
    touched = tl.zeros([_CHAIN_TILE], tl.int64)
    here = start + lane
    slot = tl.load(slots_in + here, mask=here < end, other=-1)
    position = tl.load(positions + here, mask=here < end, other=0)
    token = tl.load(ids + here, mask=here < end, other=0)
    for tile in range(start, end, _CHAIN_TILE):
        here = tile + lane
        ahead = here + _CHAIN_TILE
        next_slot = tl.load(slots_in + ahead, mask=ahead < end, other=-1)
        next_position = tl.load(positions + ahead, mask=ahead < end, other=0)
        next_token = tl.load(ids + ahead, mask=ahead < end, other=0)
        valid = (slot >= 0) & (slot < num_slots)
        touched |= token
        if ASSERT_INPUTS:
            want = tl.load(expected_ids + here, mask=valid, other=0)
            want_position = tl.load(expected_positions + here, mask=valid, other=0)
            bad |= (valid & ((token != want) | (position != want_position))).to(tl.int32)
        if tl.sum(valid.to(tl.int32)) == _CHAIN_TILE:
            if ASSERT_STEPS:
                previous = tl.load(positions + here - 1, mask=lane > 0, other=0)
                previous = tl.where(lane > 0, previous, before)
                bad |= (follows & (position != previous + 1)).to(tl.int32)
                before = tl.load(positions + tile + _CHAIN_TILE - 1)
            a0, a1, a2, a3 = _four(ids, tile)
            b0, b1, b2, b3 = _four(positions, tile)
            for part in range(tile, tile + _CHAIN_TILE, 32):
                # Each lane keeps the hash of its own token, and four tokens are always loaded ahead of the walk.
                hashes = tl.zeros([32], tl.uint64)
                for group in range(0, 32, 4):
                    at = tl.minimum(part + group + 4, end - 4)
                    c0, c1, c2, c3 = _four(ids, at)
                    d0, d1, d2, d3 = _four(positions, at)
                    turn = own - group
                    r1 = hash_chain(running, a0, b0)
                    r2 = hash_chain(r1, a1, b1)
                    r3 = hash_chain(r2, a2, b2)
                    hashes = tl.where(turn == 0, running, tl.where(turn == 1, r1, hashes))
                    hashes = tl.where(turn == 2, r2, tl.where(turn == 3, r3, hashes))
                    running = hash_chain(r3, a3, b3)
                    a0, a1, a2, a3, b0, b1, b2, b3 = c0, c1, c2, c3, d0, d1, d2, d3
                tl.store(hashes_out + part + own, signed(hashes))
        else:
            for j in range(tile, tl.minimum(tile + _CHAIN_TILE, end)):
                one = tl.load(slots_in + j)
                if (one >= 0) & (one < num_slots):
                    if ASSERT_STEPS:
                        bad |= (follows & (tl.load(positions + j) != before + 1)).to(tl.int32)
                        before = tl.load(positions + j)
                    tl.store(hashes_out + j, signed(running))
                    running = hash_chain(running, unsigned(tl.load(ids + j)), unsigned(tl.load(positions + j)))
        slot, position, token = next_slot, next_position, next_token
    # Tokens that nobody looks at would not be asked for ahead at all.
    tl.store(touched_out, tl.max(touched))
    return tl.max(bad)


@triton.jit
def walk_lanes(
    start, count, seed_position, running, follows, slots_in, ids, positions, expected_ids, expected_positions, canaries, kv,
    kv_slots, hashes, num_tokens, num_slots, padding, STRIDES: tl.constexpr, SOURCES: tl.constexpr, ENDS: tl.constexpr,
    BUFFERS: tl.constexpr, ASSERT_INPUTS: tl.constexpr, ASSERT_STEPS: tl.constexpr, HASHED: tl.constexpr,
    LANES: tl.constexpr, longest,
):  # fmt: skip
    """Write few tokens of many requests, a request a lane, in slots that `mark_lanes` has marked.

    Returns, a lane each, what must be done in order after all.
    """
    bad = tl.zeros([LANES], tl.int32)
    before = seed_position
    for j in range(longest):
        i = start + j
        slot = tl.load(slots_in + i, mask=j < count, other=-1)
        valid = (slot >= 0) & (slot < num_slots)
        own = valid & (slot > 0)
        cell = tl.where(valid, slot, 0)
        found = tl.load(canaries[0] + cell * STRIDES[0] + 3, mask=own, other=0)
        token = tl.load(ids + i, mask=valid, other=0)
        position = tl.load(positions + i, mask=valid, other=0)
        if ASSERT_INPUTS:
            want = tl.load(expected_ids + i, mask=valid, other=0)
            want_position = tl.load(expected_positions + i, mask=valid, other=0)
            bad |= (valid & ((token != want) | (position != want_position))).to(tl.int32)
        if ASSERT_STEPS:
            bad |= (valid & follows & (position != before + 1)).to(tl.int32)
            before = tl.where(valid, position, before)
        bad |= (own & (found != i + 1)).to(tl.int32)
        # Every lane has looked before any mark goes.
        tl.debug_barrier()
        for b in tl.static_range(BUFFERS):
            if HASHED:
                kv_hash = tl.load(hashes + b * num_tokens + i, mask=valid, other=0)
            else:
                kv_hash = signed(fold_slots(kv, slot, valid, kv_slots[b], SOURCES, ENDS[b], ENDS[b + 1], LANES))
            record = canaries[b] + cell * STRIDES[b]
            store_pair(record, token, position, own, LANES)
            store_pair(record + 2, signed(running), kv_hash, own, LANES)
            tl.store(record + 3, kv_hash, mask=valid & (slot == 0))
        tl.store(padding + i, signed(running), mask=valid & (slot == 0))
        running = tl.where(valid, hash_chain(running, unsigned(token), unsigned(position)), running)
    return bad


@triton.jit
def mark_lanes(start, count, slots_in, words, num_slots, longest, STRIDE: tl.constexpr, LANES: tl.constexpr):
    """Leave each token's number where its KV hash will go.

    Returns, a lane each, records to be written, slots that are not there, the last token of slot 0.
    """
    written = tl.zeros([LANES], tl.int32)
    failed = tl.zeros([LANES], tl.int32)
    last = tl.zeros([LANES], tl.int64) - 1
    for j in range(longest):
        i = start + j
        slot = tl.load(slots_in + i, mask=j < count, other=-1)
        valid = (slot >= 0) & (slot < num_slots)
        written += valid.to(tl.int32)
        failed += (slot >= num_slots).to(tl.int32)
        last = tl.maximum(last, tl.where(slot == 0, i, -1))
        marked = valid & (slot > 0)
        tl.store(words + tl.where(marked, slot, 0) * STRIDE + 3, i + 1, mask=marked)
    return written, failed, last
