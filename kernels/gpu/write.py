"""Write on the device: the chains, which are serial, beside everything that is not; exact whatever slots repeat.

A request's chain is three hashes a token, one after the other, and nothing shortens it: one warp walks it and does nothing
else. Tokens, positions and KV hashes are laid into the records by other programs of the same launch.

That is the reference's result as long as no slot is written twice (but slot 0, where padding goes, whose last write is
kept) and no chain goes on from a slot that this launch writes. Both are looked for first, in a set of bits for all slots,
or, where tokens are few, by marks in the records themselves. Where one is found, or where there are rows to write,
`write_order` does all of it once more, in order, from the same seeds.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..arrays import require_tensor
from ..fused import CanaryBuffer
from ..kv_source import fold_kv
from ..plan import WritePlan
from .buffers import BufferPointers
from .hashing import CHAIN_SEED, hash_chain, load_pair, signed
from .violations import add_where_any
from .write_order import write_in_order
from .write_steps import (
    active_requests,
    fold_tokens,
    lay_records,
    mark_lanes,
    save_seeds,
    seeds_taken,
    walk_chain,
    walk_lanes,
    well_formed,
)

_BLOCK = tl.constexpr(1024)

FEW_TOKENS = 1024
FOLD_PROGRAMS = 3072
RECORD_TILE = 1024
LANES_PER_WARP = 32


@triton.jit
def _finish(
    bad, written, failed, last, offsets, seed_slots, active, capacity, scratch, slots_in, ids, positions, expected_ids,
    expected_positions, canaries, kv, kv_slots, num_tokens, num_slots, logs, log_entries, capacities, tags, write_indexes,
    failed_counters, slot_counters, kernel_counters,
    STRIDES: tl.constexpr, SOURCES: tl.constexpr, ENDS: tl.constexpr, BUFFERS: tl.constexpr,
    ASSERT_INPUTS: tl.constexpr, ASSERT_STEPS: tl.constexpr,
):  # fmt: skip
    """Give slot 0 its last write and count, or do everything again in order."""
    if bad:
        written, failed = write_in_order(
            offsets, seed_slots, active, capacity, scratch, slots_in, ids, positions, expected_ids, expected_positions,
            canaries, kv, kv_slots, num_tokens, num_slots, logs, log_entries, capacities, tags, write_indexes, STRIDES,
            SOURCES, ENDS, BUFFERS, ASSERT_INPUTS, ASSERT_STEPS,
        )  # fmt: skip
    elif last >= 0:
        for b in tl.static_range(BUFFERS):
            tl.store(canaries[b], tl.load(ids + last))
            tl.store(canaries[b] + 1, tl.load(positions + last))
            tl.store(canaries[b] + 2, tl.load(scratch + 4 * capacity + 1 + last))
    for b in tl.static_range(BUFFERS):
        tl.atomic_add(kernel_counters[b], written * 0 + 1)
        add_where_any(slot_counters[b], written)
        add_where_any(failed_counters[b], failed)


@triton.jit(do_not_specialize=["capacity", "kv_slots", "num_tokens", "num_slots", "capacities", "tags"])
def _few_kernel(
    offsets, seed_slots, num_valid_reqs, capacity, scratch, slots_in, ids, positions, expected_ids, expected_positions,
    canaries, kv, kv_slots, hashes, num_tokens, num_slots, logs, log_entries, capacities, tags, write_indexes,
    failed_counters, slot_counters, kernel_counters,
    STRIDES: tl.constexpr, SOURCES: tl.constexpr, ENDS: tl.constexpr, BUFFERS: tl.constexpr,
    ASSERT_INPUTS: tl.constexpr, ASSERT_STEPS: tl.constexpr, HASHED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """All steps in one program, for few tokens: a request a lane, and what one step finds stays in registers."""
    r = tl.arange(0, LANES)
    here = r < capacity
    start = tl.load(offsets + r, mask=here, other=0)
    end = tl.load(offsets + r + 1, mask=here, other=0)
    seed = tl.load(seed_slots + r, mask=here, other=-1)
    active = active_requests(num_valid_reqs, capacity)
    here = r < active
    count = tl.where(here, end - start, 0)
    is_fine = tl.max((here & ((start < 0) | (end < start) | (end > num_tokens))).to(tl.int32)) == 0
    follows = here & (seed >= 0) & (seed < num_slots)
    cell = tl.where(follows, seed, 0) * STRIDES[0]
    seed_token, seed_position = load_pair(canaries[0], cell, follows, LANES)
    seed_prev, _seed_kv = load_pair(canaries[0], cell + 2, follows, LANES)
    tl.store(scratch + r, signed(seed_token), mask=here)
    tl.store(scratch + capacity + r, signed(seed_position), mask=here)
    tl.store(scratch + 2 * capacity + r, signed(seed_prev), mask=here)
    failed = (here & (count > 0) & (seed >= num_slots)).to(tl.int32)
    written = failed * 0
    last = seed * 0 - 1
    bad = failed * 0 + 1
    if is_fine:
        longest = tl.max(count)
        written, missed, last = mark_lanes(start, count, slots_in, canaries[0], num_slots, longest, STRIDES[0], LANES)
        failed += missed
        # Marks lie where other lanes look for them.
        tl.debug_barrier()
        # A seed that another token is about to overwrite bears that token's mark.
        marked_by = tl.load(canaries[0] + cell + 3, mask=follows, other=0) - 1
        maybe = follows & (count > 0) & (marked_by >= 0) & (marked_by < num_tokens)
        maybe &= tl.load(slots_in + marked_by, mask=maybe, other=-1) == seed
        # Slot 0 bears no mark.
        maybe |= follows & (count > 0) & (seed == 0) & (tl.max(last) >= 0)
        running = tl.where(follows, hash_chain(seed_prev, seed_token, seed_position), CHAIN_SEED)
        bad = maybe.to(tl.int32) | walk_lanes(
            start, count, signed(seed_position), running, follows, slots_in, ids, positions, expected_ids,
            expected_positions, canaries, kv, kv_slots, hashes, num_tokens, num_slots, scratch + 4 * capacity + 1, STRIDES,
            SOURCES, ENDS, BUFFERS, ASSERT_INPUTS, ASSERT_STEPS, HASHED, LANES, longest,
        )  # fmt: skip
    # Both counts fit into one sum: there are not many tokens.
    sums = tl.sum(written + failed * 65536)
    tl.debug_barrier()
    _finish(
        tl.max(bad) != 0, (sums % 65536).to(tl.int64), (sums // 65536).to(tl.int64), tl.max(last), offsets, seed_slots, active,
        capacity, scratch, slots_in, ids, positions, expected_ids, expected_positions, canaries, kv, kv_slots, num_tokens,
        num_slots, logs, log_entries, capacities, tags, write_indexes, failed_counters, slot_counters, kernel_counters,
        STRIDES, SOURCES, ENDS, BUFFERS, ASSERT_INPUTS, ASSERT_STEPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "num_slots", "num_words"])
def _begin_kernel(
    offsets, seed_slots, num_valid_reqs, capacity, scratch, taken, num_words, words, num_slots, STRIDE: tl.constexpr
):
    """The first of four launches: save the seeds while nothing is written yet, empty the bit set."""
    program = tl.program_id(0)
    if program == 0:
        active = active_requests(num_valid_reqs, capacity)
        failed = save_seeds(offsets, seed_slots, active, capacity, words, num_slots, scratch, STRIDE)
        tl.store(scratch + 4 * capacity, failed.to(tl.int64))
    word = program * _BLOCK + tl.arange(0, _BLOCK)
    tl.store(taken + word, tl.zeros([_BLOCK], tl.int32), mask=word < num_words)


@triton.jit(do_not_specialize=["capacity", "kv_slots", "num_tokens", "num_slots"])
def _chain_kernel(
    offsets, num_valid_reqs, seed_slots, capacity, scratch, flags, kv_hashes, slots_in, ids, positions, expected_ids,
    expected_positions, kv, kv_slots, num_tokens, num_slots,
    SOURCES: tl.constexpr, ENDS: tl.constexpr, BUFFERS: tl.constexpr, ASSERT_INPUTS: tl.constexpr,
    ASSERT_STEPS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The second: the first programs walk a chain each, the others fold KV bytes."""
    program = tl.program_id(0)
    active = active_requests(num_valid_reqs, capacity)
    if program < capacity:
        bad = 0
        if program < active:
            start = tl.load(offsets + program)
            end = tl.load(offsets + program + 1)
            # Where offsets are not fine all is done in order; but then, too, nothing may be touched outside.
            if (start >= 0) & (end > start) & (end <= num_tokens):
                seed = tl.load(seed_slots + program)
                bad = walk_chain(
                    start, end, tl.load(scratch + 3 * capacity + program).to(tl.uint64, bitcast=True),
                    tl.load(scratch + capacity + program), (seed >= 0) & (seed < num_slots), slots_in, ids, positions,
                    expected_ids, expected_positions, num_slots, scratch + 4 * capacity + 1,
                    scratch + 4 * capacity + 1 + num_tokens + program, ASSERT_INPUTS, ASSERT_STEPS,
                )  # fmt: skip
        tl.store(flags + program, bad)
    elif well_formed(offsets, active, num_tokens) & (active > 0):
        fold_tokens(
            tl.load(offsets) + (program - capacity) * T, (tl.num_programs(0) - capacity) * T, tl.load(offsets + active),
            slots_in, kv, kv_slots, kv_hashes, num_tokens, SOURCES, ENDS, BUFFERS, T,
        )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "num_tokens", "num_slots"])
def _record_kernel(
    offsets, num_valid_reqs, capacity, scratch, marks, taken, kv_hashes, slots_in, ids, positions, canaries, num_tokens,
    num_slots, STRIDES: tl.constexpr, ENDS: tl.constexpr, BUFFERS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The third: lay the records."""
    program = tl.program_id(0)
    active = active_requests(num_valid_reqs, capacity)
    written, failed, last, twice = 0, 0, tl.load(offsets) * 0 - 1, 0
    if well_formed(offsets, active, num_tokens) & (active > 0):
        written, failed, last, twice = lay_records(
            tl.load(offsets) + program * T, tl.load(offsets + active), slots_in, ids, positions,
            scratch + 4 * capacity + 1, kv_hashes, canaries, taken, num_tokens, num_slots, STRIDES, ENDS, BUFFERS, T,
        )  # fmt: skip
    out = marks + program * 4
    tl.store(out, written)
    tl.store(out + 1, failed)
    tl.store(out + 2, last)
    tl.store(out + 3, twice)


@triton.jit(do_not_specialize=["capacity", "kv_slots", "num_tokens", "num_slots", "capacities", "tags"])
def _finish_kernel(
    offsets, seed_slots, num_valid_reqs, capacity, scratch, marks, num_marks, flags, taken, slots_in, ids, positions,
    expected_ids, expected_positions, canaries, kv, kv_slots, num_tokens, num_slots, logs, log_entries, capacities, tags,
    write_indexes, failed_counters, slot_counters, kernel_counters,
    STRIDES: tl.constexpr, SOURCES: tl.constexpr, ENDS: tl.constexpr, BUFFERS: tl.constexpr,
    ASSERT_INPUTS: tl.constexpr, ASSERT_STEPS: tl.constexpr,
):  # fmt: skip
    """The last, one program: see whether all went well, count."""
    active = active_requests(num_valid_reqs, capacity)
    lane = tl.arange(0, _BLOCK)
    bad = tl.zeros([_BLOCK], tl.int32)
    for first in range(0, capacity, _BLOCK):
        bad |= tl.load(flags + first + lane, mask=first + lane < capacity, other=0)
    written = tl.zeros([_BLOCK], tl.int64)
    failed = tl.zeros([_BLOCK], tl.int64)
    last = tl.zeros([_BLOCK], tl.int64) - 1
    for first in range(0, num_marks, _BLOCK):
        mask = first + lane < num_marks
        at = marks + (first + lane) * 4
        written += tl.load(at, mask=mask, other=0)
        failed += tl.load(at + 1, mask=mask, other=0)
        last = tl.maximum(last, tl.load(at + 2, mask=mask, other=-1))
        bad |= tl.load(at + 3, mask=mask, other=0).to(tl.int32)
    is_bad = (tl.max(bad) != 0) | (well_formed(offsets, active, num_tokens) == 0)
    is_bad |= seeds_taken(offsets, seed_slots, active, num_slots, taken)
    _finish(
        is_bad, tl.sum(written), tl.sum(failed) + tl.load(scratch + 4 * capacity), tl.max(last), offsets, seed_slots, active,
        capacity, scratch, slots_in, ids, positions, expected_ids, expected_positions, canaries, kv, kv_slots, num_tokens,
        num_slots, logs, log_entries, capacities, tags, write_indexes, failed_counters, slot_counters, kernel_counters,
        STRIDES, SOURCES, ENDS, BUFFERS, ASSERT_INPUTS, ASSERT_STEPS,
    )  # fmt: skip


def write_shared(
    *,
    plan: WritePlan,
    input_ids: Any,
    positions: Any,
    out_cache_loc: Any,
    expected_tokens: Any | None,
    expected_positions: Any | None,
    chain_step_assert: bool,
    buffers: Sequence[CanaryBuffer],
) -> None:
    """`fused.write_shared` on tensors: one launch for few tokens, else four."""
    tokens = len(out_cache_loc)
    require_tensor("out_cache_loc", out_cache_loc, "int64", 1)
    require_tensor("input_ids", input_ids, "int64", 1, length=tokens)
    require_tensor("positions", positions, "int64", 1, length=tokens)
    if (expected_tokens is None) != (expected_positions is None):
        raise ValueError("expected_tokens and expected_positions go together; one of them is None")
    want_tokens = input_ids if expected_tokens is None else expected_tokens
    want_positions = positions if expected_positions is None else expected_positions
    require_tensor("expected_tokens", want_tokens, "int64", 1, length=tokens)
    require_tensor("expected_positions", want_positions, "int64", 1, length=tokens)
    many = BufferPointers.of(buffers)
    capacity = len(plan.seed_slots)
    if not capacity:
        for buffer in buffers:
            buffer.kernel_counter.add_(1)
        return
    device = out_cache_loc.device
    constants = {
        "STRIDES": many.strides,
        "SOURCES": many.sources,
        "ENDS": many.source_ends,
        "BUFFERS": len(buffers),
        "ASSERT_INPUTS": expected_tokens is not None,
        "ASSERT_STEPS": chain_step_assert,
    }
    requests = (plan.offsets, plan.seed_slots, plan.num_valid_reqs, capacity)
    inputs = (out_cache_loc, input_ids, positions, want_tokens, want_positions, many.canaries, many.kv, many.kv_slots)
    ends = (
        many.rows, many.entries, many.capacities, many.tags, many.write_indexes, many.failed, many.slot_counters,
        many.kernel_counters,
    )  # fmt: skip
    folds_rows = any(geometry[3] >= 16 for geometry in many.sources)
    if tokens <= FEW_TOKENS and capacity <= FEW_TOKENS and tokens <= 8 * capacity:
        scratch = torch.empty(4 * capacity + 1 + tokens, dtype=torch.int64, device=device)
        hashes = scratch
        if folds_rows:
            # One program would read all rows alone.
            hashes = torch.empty(len(buffers) * tokens, dtype=torch.int64, device=device)
            for n, buffer in enumerate(buffers):
                fold_kv(
                    sources=buffer.sources, mode=buffer.kv_hash_mode, slots=out_cache_loc,
                    out=hashes[n * tokens : (n + 1) * tokens], backend="triton",
                )  # fmt: skip
        lanes = max(32, triton.next_power_of_2(capacity))
        _few_kernel[(1,)](
            *requests, scratch, *inputs, hashes, tokens, many.num_slots, *ends, **constants, HASHED=folds_rows,
            LANES=lanes, num_warps=max(1, min(lanes // LANES_PER_WARP, 8)),
        )  # fmt: skip
        return
    folding, tile = 0, 32 if folds_rows else 128
    if many.sources:
        folding = max(1, min(FOLD_PROGRAMS, triton.cdiv(tokens, tile)))
    laying = max(1, triton.cdiv(tokens, RECORD_TILE))
    bit_words = triton.cdiv(many.num_slots, 32)
    # Seeds and failures, a hash for each token, a word for each chain, what each program of the third launch counted.
    scratch = torch.empty(5 * capacity + 1 + tokens + 4 * laying, dtype=torch.int64, device=device)
    marks = scratch[5 * capacity + 1 + tokens :]
    kv_hashes = torch.empty(len(buffers) * tokens, dtype=torch.int64, device=device) if folding else scratch
    small = torch.empty(capacity + bit_words, dtype=torch.int32, device=device)
    flags, taken = small[:capacity], small[capacity:]
    some = {name: constants[name] for name in ("ENDS", "BUFFERS")}
    _begin_kernel[(max(1, triton.cdiv(bit_words, 1024)),)](
        *requests, scratch, taken, bit_words, many.canaries[0], many.num_slots, STRIDE=many.strides[0]
    )
    _chain_kernel[(capacity + folding,)](
        plan.offsets, plan.num_valid_reqs, plan.seed_slots, capacity, scratch, flags, kv_hashes, *inputs[:5], many.kv,
        many.kv_slots, tokens, many.num_slots, SOURCES=many.sources, **some, ASSERT_INPUTS=constants["ASSERT_INPUTS"],
        ASSERT_STEPS=constants["ASSERT_STEPS"], T=tile, num_warps=1,
    )  # fmt: skip
    _record_kernel[(laying,)](
        plan.offsets, plan.num_valid_reqs, capacity, scratch, marks, taken, kv_hashes, *inputs[:3], many.canaries, tokens,
        many.num_slots, STRIDES=many.strides, **some, T=RECORD_TILE,
    )  # fmt: skip
    _finish_kernel[(1,)](
        *requests,
        scratch,
        marks,
        laying,
        flags,
        taken,
        *inputs,
        tokens,
        many.num_slots,
        *ends,
        **constants,
        num_warps=8,
    )


def write(*, plan: WritePlan, canary: Any, tag: int, sources: Any, kv_hash_mode: Any, violations: Any, slot_counter: Any,
          kernel_counter: Any, **inputs: Any) -> None:  # fmt: skip
    """`write.write` on tensors."""
    buffer = CanaryBuffer(
        canary=canary,
        tag=tag,
        sources=sources,
        kv_hash_mode=kv_hash_mode,
        violations=violations,
        slot_counter=slot_counter,
        kernel_counter=kernel_counter,
    )
    write_shared(plan=plan, buffers=[buffer], **inputs)
