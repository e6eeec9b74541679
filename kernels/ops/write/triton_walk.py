"""One request's chain, walked by one warp that does nothing else: 32 tokens at a time, held a token a lane."""

import triton
import triton.language as tl

from ..hash.triton import hash_chain, signed, unsigned
from ..hash.triton_chain import SM_COUNT, SM_NUMBER, closed, opened, pass_token, zeros

_LANES = tl.constexpr(32)


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
    start, end, running, before, follows, slots_in, ids, positions, expected_ids, expected_positions, num_slots, canaries,
    padding_out, STRIDES: tl.constexpr, BUFFERS: tl.constexpr, ASSERT_INPUTS: tl.constexpr, ASSERT_STEPS: tl.constexpr,
):  # fmt: skip
    """Put each token's prev_hash into its record, that of the last token of slot 0 into `padding_out`.

    `running`, uint64, and `before`, the seed's position, are scalars. Returns whether there are rows to write. Where all of
    32 tokens have a slot of their own and small words, lanes pass them to the walk one by one; else it looks at each.
    """
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
        if ASSERT_INPUTS:
            want = tl.load(expected_ids + here, mask=valid, other=0)
            want_position = tl.load(expected_positions + here, mask=valid, other=0)
            bad |= (valid & ((token != want) | (position != want_position))).to(tl.int32)
        easy = valid & (slot > 0) & (((token | position) >> 30) == 0)
        if tl.sum(easy.to(tl.int32)) == _LANES:
            if ASSERT_STEPS:
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
            for n in tl.static_range(BUFFERS):
                tl.store(canaries[n] + slot * STRIDES[n] + 2, prev_hash)
            running = closed(low, high)
        else:
            for j in range(tile, tl.minimum(tile + _LANES, end)):
                one = tl.load(slots_in + j)
                if (one >= 0) & (one < num_slots):
                    its_position = tl.load(positions + j)
                    if ASSERT_STEPS:
                        bad |= (follows & (its_position != before + 1)).to(tl.int32)
                        before = its_position + same
                    if one > 0:
                        for n in tl.static_range(BUFFERS):
                            tl.store(canaries[n] + one * STRIDES[n] + 2 + same, signed(running))
                    else:
                        tl.store(padding_out + same, signed(running))
                    running = hash_chain(running, unsigned(tl.load(ids + j)), unsigned(its_position))
        slot, position, token = next_slot, next_position, next_token
        next_slot, next_position, next_token = far_slot, far_position, far_token
    return tl.max(bad)
