"""Write few tokens, a decode step's, in one launch: one program for the chains, a request a lane; others fold KV bytes.

It writes first and looks after. Every seed is read before anything is written. If then each record that was laid is still
what was laid, and each seed what was read, then in whatever order it is done the result is this one; else, or where there
are rows to write, the seeds' records are put back and `write_in_order` does it in order. KV hashes do not depend on order.
"""

from typing import Any

import triton
import triton.language as tl

from ..hash.triton import CHAIN_SEED, hash_chain, load_pair, signed, store_pair, unsigned
from ..hash.triton_kv import fold_slots
from ..triton_buffers import BufferPointers
from ..triton_launch import cdiv, launch
from ..triton_violations import add_where_any, store_rows

_MALFORMED = tl.constexpr(1 << 20)  # more tokens than there ever are here

FOLD_TILE = 32
_FOLD_TILE = tl.constexpr(FOLD_TILE)
LANES_PER_WARP = 32  # one a thread: nothing is ever handed from thread to thread


@triton.jit
def active_requests(num_valid_reqs, capacity):
    """How many requests of the plan count."""
    return tl.maximum(tl.minimum(tl.load(num_valid_reqs), capacity), 0)


@triton.jit
def write_in_order(
    requests, active, tokens, pools, num_tokens, num_slots, ends, STRIDES: tl.constexpr, SOURCES: tl.constexpr,
    ENDS: tl.constexpr, ASSERTS: tl.constexpr,
):  # fmt: skip
    """Do `write.write_loops`, the seeds' records being what they were; returns (records written, look-ups that failed)."""
    buffers: tl.constexpr = len(STRIDES)
    offsets, seed_slots, _counted = requests
    slots_in, ids, positions, expected_ids, expected_positions = tokens
    canaries, kv, kv_slots = pools
    logs, log_entries, capacities, tags, write_indexes = ends[0], ends[1], ends[2], ends[3], ends[4]
    written = tl.load(offsets) * 0
    failed = written
    rows = written
    for r in range(active):
        # Records of requests before may be this one's seed.
        tl.debug_barrier()
        start = tl.load(offsets + r)
        end = tl.load(offsets + r + 1)
        if (start < 0) | (end < start) | (end > num_tokens):
            failed += 1
            start = tl.maximum(start, 0)
            end = tl.minimum(end, num_tokens)
        if end > start:
            seed = tl.load(seed_slots + r)
            if seed >= num_slots:
                failed += 1
                seed = seed * 0 - 1
            running = unsigned(seed * 0) + CHAIN_SEED
            before = seed * 0
            if seed >= 0:
                record = canaries[0] + seed * STRIDES[0]
                before = tl.load(record + 1)
                running = hash_chain(unsigned(tl.load(record + 2)), unsigned(tl.load(record)), unsigned(before))
            for i in range(start, end):
                slot = tl.load(slots_in + i)
                if slot >= num_slots:
                    failed += 1
                elif slot >= 0:
                    token = tl.load(ids + i)
                    position = tl.load(positions + i)
                    if ASSERTS[0]:
                        want = tl.load(expected_ids + i)
                        want_at = tl.load(expected_positions + i)
                        reason = ((token != want).to(tl.int64) * 8) | ((position != want_at).to(tl.int64) * 16)
                        if reason != 0:
                            for b in tl.static_range(buffers):
                                store_rows(
                                    (logs[b], log_entries[b], capacities[b], tags[b]), tl.load(write_indexes[b]) + rows,
                                    reason != 0, i, (slot, position, token, want, signed(running), want_at), reason,
                                )  # fmt: skip
                            rows += 1
                    if ASSERTS[1] and seed >= 0:
                        if position != before + 1:
                            for b in tl.static_range(buffers):
                                store_rows(
                                    (logs[b], log_entries[b], capacities[b], tags[b]), tl.load(write_indexes[b]) + rows,
                                    seed >= 0, i, (slot, position, token, token, signed(running), before + 1), 16,
                                )  # fmt: skip
                            rows += 1
                        before = position
                    for b in tl.static_range(buffers):
                        slots = slot + tl.zeros([32], tl.int64)
                        kv_hash = tl.max(
                            signed(fold_slots(kv, slots, slots >= 0, kv_slots[b], SOURCES, ENDS[b], ENDS[b + 1], 32))
                        )
                        record = canaries[b] + slot * STRIDES[b]
                        tl.store(record, token)
                        tl.store(record + 1, position)
                        tl.store(record + 2, signed(running))
                        tl.store(record + 3, kv_hash)
                    running = hash_chain(running, unsigned(token), unsigned(position))
                    written += 1
    for b in tl.static_range(buffers):
        tl.debug_barrier()
        tl.store(write_indexes[b], tl.load(write_indexes[b]) + rows)
    return written, failed


@triton.jit
def _fold_records(
    tile, requests, capacity, slots_in, pools, num_tokens, num_slots, STRIDES: tl.constexpr, SOURCES: tl.constexpr, ENDS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Put a tile of KV hashes into their records."""
    buffers: tl.constexpr = len(STRIDES)
    offsets, _seed_slots, num_valid_reqs = requests
    canaries, kv, kv_slots = pools
    r = tl.arange(0, LANES)
    listed = r < tl.minimum(active_requests(num_valid_reqs, capacity), capacity)
    start = tl.load(offsets + r, mask=listed, other=0)
    end = tl.load(offsets + r + 1, mask=listed, other=0)
    i = tile * _FOLD_TILE + tl.arange(0, _FOLD_TILE)
    malformed = tl.max((listed & ((start < 0) | (end < start) | (end > num_tokens))).to(tl.int32))
    first = tl.min(tl.where(listed, start, _MALFORMED).to(tl.int32))
    # Where offsets are not fine all is done in order.
    last = tl.where(malformed == 0, tl.max(tl.where(listed, end, 0).to(tl.int32)), 0)
    for b in tl.static_range(buffers):
        if ENDS[b + 1] > ENDS[b]:
            # Asked for anew: Triton 3.6 cannot lay out a mask that two folds share.
            slot = tl.load(slots_in + i, mask=i < num_tokens, other=-1)
            valid = (slot >= 0) & (slot < num_slots)
            mine = valid & (i >= first) & (i < last)
            kv_hash = fold_slots(kv, slot, valid, kv_slots[b], SOURCES, ENDS[b], ENDS[b + 1], _FOLD_TILE, True)
            tl.store(canaries[b] + tl.where(mine, slot, 0) * STRIDES[b] + 3, signed(kv_hash), mask=mine)


@triton.jit
def _lay(slot, token, position, running, own, canaries, STRIDES: tl.constexpr, ENDS: tl.constexpr, LANES: tl.constexpr):
    """Lay a record a lane; its KV hash too, where there is nothing to hash."""
    buffers: tl.constexpr = len(STRIDES)
    cell = tl.where(own, slot, 0)
    for b in tl.static_range(buffers):
        record = canaries[b] + cell * STRIDES[b]
        store_pair(record, token, position, own, LANES)
        if ENDS[b + 1] > ENDS[b]:
            tl.store(record + 2, signed(running), mask=own)
        else:
            store_pair(record + 2, signed(running), token * 0, own, LANES)


@triton.jit
def _record_now(slot, own, words, STRIDE: tl.constexpr, LANES: tl.constexpr):
    """A lane's record as it is now, but for its KV hash."""
    cell = tl.where(own, slot, 0) * STRIDE
    token, position = load_pair(words, cell, own, LANES)
    return signed(token), signed(position), tl.load(words + cell + 2, mask=own, other=0)


@triton.jit
def _misses(token, position, valid, i, tokens, before, follows, ASSERTS: tl.constexpr):
    """Whether a lane's token has a row to write; 0 or 1."""
    bad = valid.to(tl.int32) * 0
    if ASSERTS[0]:
        want = tl.load(tokens[3] + i, mask=valid, other=0)
        want_position = tl.load(tokens[4] + i, mask=valid, other=0)
        bad |= (valid & ((token != want) | (position != want_position))).to(tl.int32)
    if ASSERTS[1]:
        bad |= (valid & follows & (position != before + 1)).to(tl.int32)
    return bad


@triton.jit
def _next(i, mask, tokens, num_slots):
    """A lane's token `i`: slot, token, position, and whether it is to be written."""
    slot = tl.load(tokens[0] + i, mask=mask, other=-1)
    there = (slot >= 0) & (slot < num_slots)
    return slot, tl.load(tokens[1] + i, mask=there, other=0), tl.load(tokens[2] + i, mask=there, other=0), there


@triton.jit
def _lay_all(
    chain, before, follows, tokens, canaries, num_slots, STRIDES: tl.constexpr, ENDS: tl.constexpr, ASSERTS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Lay all tokens of each lane's request.

    Returns, a lane each: records written, slots not there, the last token of slot 0 and what it carries, and whether there
    are rows to write.
    """
    start, count, longest, running = chain
    written, missing, bad = count * 0, count * 0, count * 0
    last, last_hash = start * 0 - 1, running
    for j in range(longest):
        i = start + j
        slot, token, position, there = _next(i, j < count, tokens, num_slots)
        bad |= _misses(token, position, there, i, tokens, before, follows, ASSERTS)
        _lay(slot, token, position, running, there & (slot > 0), canaries, STRIDES, ENDS, LANES)
        written += there.to(tl.int32)
        missing += (slot >= num_slots).to(tl.int32)
        last = tl.where(there & (slot == 0), i, last)
        last_hash = tl.where(there & (slot == 0), running, last_hash)
        before = tl.where(there, position, before)
        running = tl.where(there, hash_chain(running, unsigned(token), unsigned(position)), running)
    return written, missing, last, last_hash, bad


@triton.jit
def _all_differ(start, count, longest, running, tokens, words, num_slots, STRIDE: tl.constexpr, LANES: tl.constexpr):
    """Whether any record of a lane's request is not what `_lay_all` laid; 0 or 1."""
    bad = count * 0
    for j in range(longest):
        slot, token, position, there = _next(start + j, j < count, tokens, num_slots)
        own = there & (slot > 0)
        token_now, position_now, hash_now = _record_now(slot, own, words, STRIDE, LANES)
        differs = (token_now ^ token) | (position_now ^ position) | (hash_now ^ signed(running))
        bad |= (own & (differs != 0)).to(tl.int32)
        running = tl.where(there, hash_chain(running, unsigned(token), unsigned(position)), running)
    return bad


@triton.jit
def _lay_padding(last, prev_hash, tokens, canaries, STRIDES: tl.constexpr, ENDS: tl.constexpr):
    """Give slot 0 the record of its last token: `last` and what it carries, a lane each."""
    buffers: tl.constexpr = len(STRIDES)
    i = tl.max(last)
    carried = tl.sum(tl.where(last == i, signed(prev_hash), 0))
    for b in tl.static_range(buffers):
        tl.store(canaries[b], tl.load(tokens[1] + i))
        tl.store(canaries[b] + 1, tl.load(tokens[2] + i))
        tl.store(canaries[b] + 2, carried)
        if ENDS[b + 1] == ENDS[b]:
            tl.store(canaries[b] + 3, i * 0)


@triton.jit(do_not_specialize=["capacity", "num_tokens", "num_slots"])
def _few_kernel(
    requests, capacity, tokens, pools, num_tokens, num_slots, ends, STRIDES: tl.constexpr, SOURCES: tl.constexpr, ENDS: tl.constexpr, ASSERTS: tl.constexpr,
    LANES: tl.constexpr
):  # fmt: skip
    offsets, seed_slots, num_valid_reqs = requests
    buffers: tl.constexpr = len(STRIDES)
    canaries, failed_counters, slot_counters, kernel_counters = pools[0], ends[5], ends[6], ends[7]
    if tl.program_id(0) > 0:
        _fold_records(
            tl.program_id(0) - 1,
            requests,
            capacity,
            tokens[0],
            pools,
            num_tokens,
            num_slots,
            STRIDES,
            SOURCES,
            ENDS,
            LANES,
        )
    else:
        r = tl.arange(0, LANES)
        start = tl.load(offsets + r, mask=r < capacity, other=0)
        end = tl.load(offsets + r + 1, mask=r < capacity, other=0)
        seed = tl.load(seed_slots + r, mask=r < capacity, other=-1)
        # Mostly request r has token r alone, which is asked for before that is known.
        slot = tl.load(tokens[0] + r, mask=r < num_tokens, other=-1)
        token = tl.load(tokens[1] + r, mask=r < num_tokens, other=0)
        position = tl.load(tokens[2] + r, mask=r < num_tokens, other=0)
        active = active_requests(num_valid_reqs, capacity)
        here = r < active
        follows = here & (seed >= 0) & (seed < num_slots)
        seed_token, seed_position, seed_prev = _record_now(seed, follows, canaries[0], STRIDES[0], LANES)
        running = hash_chain(unsigned(seed_prev), unsigned(seed_token), unsigned(seed_position))
        running = tl.where(follows, running, CHAIN_SEED)
        own = here & (start == r) & (end == r + 1) & (r < num_tokens) & (slot > 0) & (slot < num_slots)
        rare = (here & ((start != end) | (seed >= num_slots)) & (own == 0)).to(tl.int32)
        rare |= _misses(token, position, own, r, tokens, seed_position, follows, ASSERTS)
        # Every seed has been read.
        tl.debug_barrier()
        _lay(slot, token, position, running, own, canaries, STRIDES, ENDS, LANES)
        # All that is laid lies where other lanes look for it.
        tl.debug_barrier()
        token_now, position_now, hash_now = _record_now(slot, own, canaries[0], STRIDES[0], LANES)
        seed_token_now, seed_position_now, seed_prev_now = _record_now(seed, follows, canaries[0], STRIDES[0], LANES)
        differs = (token_now ^ token) | (position_now ^ position) | (hash_now ^ signed(running))
        rare |= (own & (differs != 0)).to(tl.int32)
        differs = (seed_token_now ^ seed_token) | (seed_position_now ^ seed_position) | (seed_prev_now ^ seed_prev)
        rare |= (follows & (differs != 0)).to(tl.int32)
        # Two sums in one, of 1,024 lanes at most.
        tally = tl.sum(own.to(tl.int32) + (rare << 12))
        written, failed = (tally & 4095).to(tl.int64), (tally >> 12).to(tl.int64) * 0
        if tally >> 12 != 0:
            malformed = here & ((start < 0) | (end < start) | (end > num_tokens))
            count = tl.where(here & (malformed == 0), end - start, 0).to(tl.int32)
            longest = tl.max(count)
            laid, missing, last, last_hash, bad = _lay_all(
                (start, count, longest, running), seed_position, follows, tokens, canaries, num_slots, STRIDES, ENDS,
                ASSERTS, LANES,
            )  # fmt: skip
            tl.debug_barrier()
            bad |= _all_differ(start, count, longest, running, tokens, canaries[0], num_slots, STRIDES[0], LANES)
            seed_token_now, seed_position_now, seed_prev_now = _record_now(
                seed, follows, canaries[0], STRIDES[0], LANES
            )
            differs = (seed_token_now ^ seed_token) | (seed_position_now ^ seed_position) | (seed_prev_now ^ seed_prev)
            bad |= (malformed | (follows & (differs != 0))).to(tl.int32)
            # A chain that goes on from slot 0 may want what another request puts there.
            latest = tl.max(last)
            bad |= tl.where((latest >= 0) & (seed == 0) & (count > 0), 1, 0)
            if tl.max(bad) != 0:
                # Nobody still looks at what is put back.
                tl.debug_barrier()
                for b in tl.static_range(buffers):
                    record = canaries[b] + tl.where(follows, seed, 0) * STRIDES[b]
                    tl.store(record, seed_token, mask=follows)
                    tl.store(record + 1, seed_position, mask=follows)
                    tl.store(record + 2, seed_prev, mask=follows)
                written, failed = write_in_order(
                    requests, active, tokens, pools, num_tokens, num_slots, ends, STRIDES, SOURCES, ENDS, ASSERTS
                )
            else:
                missing += ((count > 0) & (seed >= num_slots)).to(tl.int32)
                written, failed = tl.sum(laid).to(tl.int64), tl.sum(missing).to(tl.int64)
                if latest >= 0:
                    _lay_padding(last, last_hash, tokens, canaries, STRIDES, ENDS)
        for b in tl.static_range(buffers):
            add_where_any(kernel_counters[b], written * 0 + 1)
            add_where_any(slot_counters[b], written)
            add_where_any(failed_counters[b], failed)


def write_few(
    requests: tuple[Any, ...], tokens: tuple[Any, ...], many: BufferPointers, constants: dict[str, Any]
) -> None:
    """Launch; arguments as for `write_many.write_many`."""
    capacity, count = len(requests[1]), tokens[0].shape[0]
    lanes = max(32, 1 << (capacity - 1).bit_length())
    folding = cdiv(count, FOLD_TILE) if many.sources else 0
    launch(
        _few_kernel,
        1 + folding,
        (requests, capacity, tokens, many.pools, count, many.num_slots, many.ends),
        constants | {"LANES": lanes},
        num_warps=lanes // LANES_PER_WARP,
    )
