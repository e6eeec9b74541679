"""Write many tokens: three launches, in the second of which chains are walked beside everything that is not serial.

That is the reference's result as long as no slot is written twice (but slot 0, where padding goes, whose last write is
kept) and no chain goes on from a slot that this launch writes. Both are looked for in a set of bits for all slots. Where
one is found, or where there are rows to write, `write_in_order` does all of it once more, in order, from the same seeds.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..hash.triton import CHAIN_SEED, hash_chain, load_pair, signed, store_pair, unsigned
from ..hash.triton_chain import SM_COUNT, SM_NUMBER, closed, opened, pass_token, zeros
from ..hash.triton_kv import fold_slots
from ..triton_buffers import BufferPointers
from ..triton_launch import cdiv, launch
from ..triton_violations import add_where_any
from .triton_few import active_requests, write_in_order

_REQUESTS = tl.constexpr(256)
_LANES = tl.constexpr(32)
_BLOCK = tl.constexpr(1024)

# Programs that lay records take memory's time from those who walk: no more of them than are done when the walk is.
LEAST_PROGRAMS, MOST_PROGRAMS = 132, 3072
REQUESTS_PER_PROGRAM = 2


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
def restore_seeds(
    seed_slots, active, capacity, canaries, num_slots, scratch, STRIDES: tl.constexpr,
):  # fmt: skip
    """Put the seeds' records back as `save_seeds` found them."""
    buffers: tl.constexpr = len(STRIDES)
    for first in range(0, active, _REQUESTS):
        r = first + tl.arange(0, _REQUESTS)
        seed = tl.load(seed_slots + r, mask=r < active, other=-1)
        inside = (seed >= 0) & (seed < num_slots)
        cell = tl.where(inside, seed, 0)
        for field in tl.static_range(3):
            was = tl.load(scratch + field * capacity + r, mask=inside, other=0)
            for b in tl.static_range(buffers):
                tl.store(canaries[b] + cell * STRIDES[b] + field, was, mask=inside)


@triton.jit
def lay_records(
    first, step, end, tokens, pools, taken, tallies, num_slots, STRIDES: tl.constexpr, SOURCES: tl.constexpr,
    ENDS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Lay tiles of records without their prev_hash, and note their slots in the bit set `taken`.

    Adds to `tallies`: records written, slots not there, the last token of slot 0, whether any slot came twice.
    """
    buffers: tl.constexpr = len(STRIDES)
    slots_in, ids, positions = tokens[0], tokens[1], tokens[2]
    canaries, kv, kv_slots = pools
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
        for b in tl.static_range(buffers):
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


@triton.jit
def _pass_on(words, first):
    """The words of four lanes from `first`, each for all lanes."""
    second, third, fourth = (
        tl.gather(words, first + 1, 0),
        tl.gather(words, first + 2, 0),
        tl.gather(words, first + 3, 0),
    )
    return tl.gather(words, first, 0), second, third, fourth


@triton.jit
def walk_chain(
    start, end, running, before, follows, tokens, num_slots, canaries, padding_out, STRIDES: tl.constexpr,
    ASSERTS: tl.constexpr,
):  # fmt: skip
    """Put each token's prev_hash into its record, that of the last token of slot 0 into `padding_out`.

    `running`, uint64, and `before`, the seed's position, are scalars. Returns whether there are rows to write. Where all of
    32 tokens have a slot of their own and small words, lanes pass them to the walk one by one; else it looks at each.
    """
    buffers: tl.constexpr = len(STRIDES)
    slots_in, ids, positions, expected_ids, expected_positions = tokens
    lane = tl.arange(0, _LANES)
    same = lane * 0
    bad = same
    # All lanes walk, alike: a value of one lane would have to be passed on to the others first.
    running = running + unsigned(same.to(tl.int64))
    before = before + same
    z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11 = zeros(start, SM_NUMBER)
    y0, y1, y2, y3, y4, y5, y6, y7, y8, y9, y10, y11 = zeros(start, SM_COUNT)
    # Asked for two tiles, some microseconds, before the walk comes to them.
    here = start + lane
    slot = tl.load(slots_in + here, mask=here < end, other=-1)
    position = tl.load(positions + here, mask=here < end, other=0)
    token = tl.load(ids + here, mask=here < end, other=0)
    ahead = here + _LANES
    next_slot = tl.load(slots_in + ahead, mask=ahead < end, other=-1)
    next_position = tl.load(positions + ahead, mask=ahead < end, other=0)
    next_token = tl.load(ids + ahead, mask=ahead < end, other=0)
    for tile in range(start, end, _LANES):
        here = tile + lane
        ahead = here + 2 * _LANES
        far_slot = tl.load(slots_in + ahead, mask=ahead < end, other=-1)
        far_position = tl.load(positions + ahead, mask=ahead < end, other=0)
        far_token = tl.load(ids + ahead, mask=ahead < end, other=0)
        valid = (slot >= 0) & (slot < num_slots)
        if ASSERTS[0]:
            want = tl.load(expected_ids + here, mask=valid, other=0)
            want_position = tl.load(expected_positions + here, mask=valid, other=0)
            bad |= (valid & ((token != want) | (position != want_position))).to(tl.int32)
        easy = valid & (slot > 0) & (((token | position) >> 30) == 0)
        if tl.sum(easy.to(tl.int32)) == _LANES:
            if ASSERTS[1]:
                previous = tl.gather(position, tl.maximum(lane - 1, 0), 0)
                bad |= (follows & (position != tl.where(lane > 0, previous, before) + 1)).to(tl.int32)
                before = tl.gather(position, same + (_LANES - 1), 0)
            words, places = token.to(tl.uint32), position.to(tl.uint32)
            low, high = opened(running)
            # Each lane keeps what its own token's record is to carry.
            kept_low, kept_high = low, high
            a0, a1, a2, a3 = _pass_on(words, same)
            b0, b1, b2, b3 = _pass_on(places, same)
            for group in range(0, _LANES, 4):
                # Handed on a turn before they are wanted.
                c0, c1, c2, c3 = _pass_on(words, (same + (group + 4)) % _LANES)
                d0, d1, d2, d3 = _pass_on(places, (same + (group + 4)) % _LANES)
                turn = lane - group
                low_1, high_1 = pass_token(low, high, a0, b0, z0, z1, z2, z3, z4, z5)
                low_2, high_2 = pass_token(low_1, high_1, a1, b1, z6, z7, z8, z9, z10, z11)
                low_3, high_3 = pass_token(low_2, high_2, a2, b2, y0, y1, y2, y3, y4, y5)
                kept_low = tl.where(turn == 0, low, tl.where(turn == 1, low_1, kept_low))
                kept_high = tl.where(turn == 0, high, tl.where(turn == 1, high_1, kept_high))
                kept_low = tl.where(turn == 2, low_2, tl.where(turn == 3, low_3, kept_low))
                kept_high = tl.where(turn == 2, high_2, tl.where(turn == 3, high_3, kept_high))
                low, high = pass_token(low_3, high_3, a3, b3, y6, y7, y8, y9, y10, y11)
                a0, a1, a2, a3, b0, b1, b2, b3 = c0, c1, c2, c3, d0, d1, d2, d3
            prev_hash = signed(closed(kept_low, kept_high))
            for n in tl.static_range(buffers):
                tl.store(canaries[n] + slot * STRIDES[n] + 2, prev_hash)
            running = closed(low, high)
        else:
            for j in range(tile, tl.minimum(tile + _LANES, end)):
                one = tl.load(slots_in + j)
                if (one >= 0) & (one < num_slots):
                    its_position = tl.load(positions + j)
                    if ASSERTS[1]:
                        bad |= (follows & (its_position != before + 1)).to(tl.int32)
                        before = its_position + same
                    if one > 0:
                        for n in tl.static_range(buffers):
                            tl.store(canaries[n] + one * STRIDES[n] + 2 + same, signed(running))
                    else:
                        tl.store(padding_out + same, signed(running))
                    running = hash_chain(running, unsigned(tl.load(ids + j)), unsigned(its_position))
        slot, position, token = next_slot, next_position, next_token
        next_slot, next_position, next_token = far_slot, far_position, far_token
    return tl.max(bad)


@triton.jit(do_not_specialize=["capacity", "num_words", "num_slots"])
def _begin_kernel(requests, capacity, scratch, taken, num_words, words, num_slots, STRIDE: tl.constexpr):
    """Save the seeds while nothing is written yet; empty the tallies and the bit set."""
    offsets, seed_slots, num_valid_reqs = requests
    program = tl.program_id(0)
    if program == 0:
        active = active_requests(num_valid_reqs, capacity)
        failed = save_seeds(offsets, seed_slots, active, capacity, words, num_slots, scratch, STRIDE)
        nought = failed.to(tl.int64) * 0
        tallies = scratch + 5 * capacity
        tl.store(tallies, nought)
        tl.store(tallies + 1, nought + failed)
        tl.store(tallies + 2, nought - 1)
        tl.store(tallies + 3, nought)
    word = program * _BLOCK + tl.arange(0, _BLOCK)
    tl.store(taken + word, tl.zeros([_BLOCK], tl.int32), mask=word < num_words)


@triton.jit(do_not_specialize=["capacity", "num_tokens", "num_slots"])
def _chain_kernel(
    requests, capacity, memory, tokens, pools, num_tokens, num_slots, STRIDES: tl.constexpr, SOURCES: tl.constexpr, ENDS: tl.constexpr, ASSERTS: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """The first programs walk a chain each, the others lay what is left of the records."""
    scratch, taken = memory
    offsets, seed_slots, num_valid_reqs = requests
    program = tl.program_id(0)
    active = active_requests(num_valid_reqs, capacity)
    tallies = scratch + 5 * capacity
    if program < capacity:
        if program < active:
            start = tl.load(offsets + program)
            end = tl.load(offsets + program + 1)
            # Where offsets are not fine all is done in order; but then, too, nothing may be touched outside.
            if (start >= 0) & (end > start) & (end <= num_tokens):
                seed = tl.load(seed_slots + program)
                bad = walk_chain(
                    start, end, tl.load(scratch + 3 * capacity + program).to(tl.uint64, bitcast=True),
                    tl.load(scratch + capacity + program), (seed >= 0) & (seed < num_slots), tokens, num_slots, pools[0],
                    scratch + 4 * capacity + program, STRIDES, ASSERTS,
                )  # fmt: skip
                if bad != 0:
                    tl.atomic_max(tallies + 3, start * 0 + 1, sem="relaxed")
    elif well_formed(offsets, active, num_tokens) & (active > 0):
        lay_records(
            tl.load(offsets) + (program - capacity) * T, (tl.num_programs(0) - capacity) * T, tl.load(offsets + active),
            tokens, pools, taken, tallies, num_slots, STRIDES, SOURCES, ENDS, T,
        )  # fmt: skip


@triton.jit
def _lay_padding(
    last, offsets, active, hashes, tokens, canaries, STRIDES: tl.constexpr,
):  # fmt: skip
    """Give slot 0 its last token's record."""
    buffers: tl.constexpr = len(STRIDES)
    prev_hash = tl.zeros([_BLOCK], tl.int64)
    for first in range(0, active, _BLOCK):
        r = first + tl.arange(0, _BLOCK)
        start = tl.load(offsets + r, mask=r < active, other=0)
        end = tl.load(offsets + r + 1, mask=r < active, other=0)
        prev_hash |= tl.load(hashes + r, mask=(start <= last) & (last < end), other=0)
    carried = tl.sum(prev_hash)  # of one chain only
    for b in tl.static_range(buffers):
        tl.store(canaries[b], tl.load(tokens[1] + last))
        tl.store(canaries[b] + 1, tl.load(tokens[2] + last))
        tl.store(canaries[b] + 2, carried)


@triton.jit(do_not_specialize=["capacity", "num_tokens", "num_slots"])
def _finish_kernel(
    requests, capacity, memory, tokens, pools, num_tokens, num_slots, ends, STRIDES: tl.constexpr, SOURCES: tl.constexpr, ENDS: tl.constexpr,
    ASSERTS: tl.constexpr,
):  # fmt: skip
    """One program: count, or see that all is done again in order."""
    scratch, taken = memory
    buffers: tl.constexpr = len(STRIDES)
    offsets, seed_slots, num_valid_reqs = requests
    canaries, failed_counters, slot_counters, kernel_counters = pools[0], ends[5], ends[6], ends[7]
    active = active_requests(num_valid_reqs, capacity)
    tallies = scratch + 5 * capacity
    written = tl.load(tallies)
    failed = tl.load(tallies + 1)
    last = tl.load(tallies + 2)
    bad = (tl.load(tallies + 3) != 0) | (well_formed(offsets, active, num_tokens) == 0)
    bad |= seeds_taken(offsets, seed_slots, active, num_slots, taken)
    if bad:
        restore_seeds(seed_slots, active, capacity, canaries, num_slots, scratch, STRIDES)
        written, failed = write_in_order(
            requests, active, tokens, pools, num_tokens, num_slots, ends, STRIDES, SOURCES, ENDS, ASSERTS
        )
    elif last >= 0:
        _lay_padding(last, offsets, active, scratch + 4 * capacity, tokens, canaries, STRIDES)
    for b in tl.static_range(buffers):
        add_where_any(kernel_counters[b], written * 0 + 1)
        add_where_any(slot_counters[b], written)
        add_where_any(failed_counters[b], failed)


def write_many(
    requests: tuple[Any, ...], tokens: tuple[Any, ...], many: BufferPointers, constants: dict[str, Any]
) -> None:
    """Launch; arguments as `write.write_shared` has checked them.

    `requests`: offsets, seed_slots, num_valid_reqs; `tokens`: slots, tokens, positions, expected tokens and positions.
    """
    capacity, count, slots = len(requests[1]), tokens[0].shape[0], many.num_slots
    tile = 32 if many.folds_rows else 128
    wanted = MOST_PROGRAMS if many.folds_rows else max(LEAST_PROGRAMS, capacity // REQUESTS_PER_PROGRAM)
    laying = max(1, min(wanted, MOST_PROGRAMS, cdiv(count, tile)))
    bit_words = cdiv(slots, 32)
    device = tokens[0].device
    # Of each seed token, position, prev_hash, and what goes on from it; of each chain its last token's of slot 0; tallies.
    scratch = torch.empty(5 * capacity + 4, dtype=torch.int64, device=device)
    taken = torch.empty(bit_words, dtype=torch.int32, device=device)
    read = (requests, capacity, (scratch, taken), tokens, many.pools, count, slots)
    launch(
        _begin_kernel,
        max(1, cdiv(bit_words, 1024)),
        (requests, capacity, scratch, taken, bit_words, many.canaries[0], slots),
        {"STRIDE": many.strides[0]},
        num_warps=4,
    )
    # Left to choose, the compiler saves registers where a walk waits for them.
    launch(_chain_kernel, capacity + laying, read, constants | {"T": tile}, num_warps=1, maxnreg=128)
    launch(_finish_kernel, 1, (*read, many.ends), constants, num_warps=8)
