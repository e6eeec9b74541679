"""What a write of many tokens on the device does before it lays records, and looks for after (see `write_many`)."""

import triton
import triton.language as tl

from ..hash.triton import CHAIN_SEED, hash_chain, load_pair, signed

_REQUESTS = tl.constexpr(256)


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
def restore_seeds(
    seed_slots, active, capacity, canaries, num_slots, scratch, STRIDES: tl.constexpr, BUFFERS: tl.constexpr
):
    """Put the seeds' records back as `save_seeds` found them."""
    for first in range(0, active, _REQUESTS):
        r = first + tl.arange(0, _REQUESTS)
        seed = tl.load(seed_slots + r, mask=r < active, other=-1)
        inside = (seed >= 0) & (seed < num_slots)
        cell = tl.where(inside, seed, 0)
        for field in tl.static_range(3):
            was = tl.load(scratch + field * capacity + r, mask=inside, other=0)
            for b in tl.static_range(BUFFERS):
                tl.store(canaries[b] + cell * STRIDES[b] + field, was, mask=inside)
