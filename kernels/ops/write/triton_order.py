"""Write as the reference does, in order, by one program: for what `write` finds that it cannot do side by side."""

import triton
import triton.language as tl

from ..hash.triton import CHAIN_SEED, hash_chain, signed, unsigned
from ..hash.triton_kv import fold_slots
from ..triton_violations import store_rows


@triton.jit
def write_in_order(
    offsets, seed_slots, active, slots_in, ids, positions, expected_ids, expected_positions, canaries, kv, kv_slots,
    num_tokens, num_slots, logs, log_entries, capacities, tags, write_indexes,
    STRIDES: tl.constexpr, SOURCES: tl.constexpr, ENDS: tl.constexpr, BUFFERS: tl.constexpr,
    ASSERT_INPUTS: tl.constexpr, ASSERT_STEPS: tl.constexpr,
):  # fmt: skip
    """Do `write.write_loops`, the seeds' records being what they were; returns (records written, look-ups that failed)."""
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
                    if ASSERT_INPUTS:
                        want = tl.load(expected_ids + i)
                        want_at = tl.load(expected_positions + i)
                        reason = ((token != want).to(tl.int64) * 8) | ((position != want_at).to(tl.int64) * 16)
                        if reason != 0:
                            for b in tl.static_range(BUFFERS):
                                store_rows(
                                    logs[b], log_entries[b], capacities[b], tl.load(write_indexes[b]) + rows, reason != 0, i,
                                    tags[b], slot, position, token, want, signed(running), want_at, reason,
                                )  # fmt: skip
                            rows += 1
                    if ASSERT_STEPS and seed >= 0:
                        if position != before + 1:
                            for b in tl.static_range(BUFFERS):
                                store_rows(
                                    logs[b], log_entries[b], capacities[b], tl.load(write_indexes[b]) + rows, seed >= 0,
                                    i, tags[b], slot, position, token, token, signed(running), before + 1, 16,
                                )  # fmt: skip
                            rows += 1
                        before = position
                    for b in tl.static_range(BUFFERS):
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
    for b in tl.static_range(BUFFERS):
        tl.debug_barrier()
        tl.store(write_indexes[b], tl.load(write_indexes[b]) + rows)
    return written, failed
