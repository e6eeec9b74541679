"""Write many tokens: three launches, in the second of which chains are walked beside everything that is not serial.

That is the reference's result as long as no slot is written twice (but slot 0, where padding goes, whose last write is
kept) and no chain goes on from a slot that this launch writes. Both are looked for in a set of bits for all slots. Where
one is found, or where there are rows to write, `write_order` does all of it once more, in order, from the same seeds.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..triton_buffers import BufferPointers
from ..triton_launch import cdiv, launch
from ..triton_violations import add_where_any
from .triton_lay import lay_records
from .triton_order import write_in_order
from .triton_steps import active_requests, restore_seeds, save_seeds, seeds_taken, well_formed
from .triton_walk import walk_chain

_BLOCK = tl.constexpr(1024)

# Programs that lay records take memory's time from those who walk: no more of them than are done when the walk is.
LEAST_PROGRAMS, MOST_PROGRAMS = 132, 3072
REQUESTS_PER_PROGRAM = 2


@triton.jit(do_not_specialize=["capacity", "num_words", "num_slots"])
def _begin_kernel(
    offsets, seed_slots, num_valid_reqs, capacity, scratch, taken, num_words, words, num_slots, STRIDE: tl.constexpr
):
    """Save the seeds while nothing is written yet; empty the tallies and the bit set."""
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


@triton.jit(do_not_specialize=["capacity", "kv_slots", "num_tokens", "num_slots"])
def _chain_kernel(
    offsets, seed_slots, num_valid_reqs, capacity, scratch, taken, slots_in, ids, positions, expected_ids,
    expected_positions, canaries, kv, kv_slots, num_tokens, num_slots, STRIDES: tl.constexpr, SOURCES: tl.constexpr,
    ENDS: tl.constexpr, BUFFERS: tl.constexpr, ASSERT_INPUTS: tl.constexpr, ASSERT_STEPS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The first programs walk a chain each, the others lay what is left of the records."""
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
                    tl.load(scratch + capacity + program), (seed >= 0) & (seed < num_slots), slots_in, ids, positions,
                    expected_ids, expected_positions, num_slots, canaries, scratch + 4 * capacity + program, STRIDES, BUFFERS,
                    ASSERT_INPUTS, ASSERT_STEPS,
                )  # fmt: skip
                if bad != 0:
                    tl.atomic_max(tallies + 3, start * 0 + 1, sem="relaxed")
    elif well_formed(offsets, active, num_tokens) & (active > 0):
        lay_records(
            tl.load(offsets) + (program - capacity) * T, (tl.num_programs(0) - capacity) * T, tl.load(offsets + active),
            slots_in, ids, positions, kv, kv_slots, canaries, taken, tallies, num_slots, STRIDES, SOURCES, ENDS, BUFFERS, T,
        )  # fmt: skip


@triton.jit
def _lay_padding(last, offsets, active, hashes, ids, positions, canaries, STRIDES: tl.constexpr, BUFFERS: tl.constexpr):
    """Give slot 0 its last token's record."""
    prev_hash = tl.zeros([_BLOCK], tl.int64)
    for first in range(0, active, _BLOCK):
        r = first + tl.arange(0, _BLOCK)
        start = tl.load(offsets + r, mask=r < active, other=0)
        end = tl.load(offsets + r + 1, mask=r < active, other=0)
        prev_hash |= tl.load(hashes + r, mask=(start <= last) & (last < end), other=0)
    carried = tl.sum(prev_hash)  # of one chain only
    for b in tl.static_range(BUFFERS):
        tl.store(canaries[b], tl.load(ids + last))
        tl.store(canaries[b] + 1, tl.load(positions + last))
        tl.store(canaries[b] + 2, carried)


@triton.jit(do_not_specialize=["capacity", "kv_slots", "num_tokens", "num_slots", "capacities", "tags"])
def _finish_kernel(
    offsets, seed_slots, num_valid_reqs, capacity, scratch, taken, slots_in, ids, positions, expected_ids,
    expected_positions, canaries, kv, kv_slots, num_tokens, num_slots, logs, log_entries, capacities, tags, write_indexes,
    failed_counters, slot_counters, kernel_counters,
    STRIDES: tl.constexpr, SOURCES: tl.constexpr, ENDS: tl.constexpr, BUFFERS: tl.constexpr,
    ASSERT_INPUTS: tl.constexpr, ASSERT_STEPS: tl.constexpr,
):  # fmt: skip
    """One program: count, or see that all is done again in order."""
    active = active_requests(num_valid_reqs, capacity)
    tallies = scratch + 5 * capacity
    written = tl.load(tallies)
    failed = tl.load(tallies + 1)
    last = tl.load(tallies + 2)
    bad = (tl.load(tallies + 3) != 0) | (well_formed(offsets, active, num_tokens) == 0)
    bad |= seeds_taken(offsets, seed_slots, active, num_slots, taken)
    if bad:
        restore_seeds(seed_slots, active, capacity, canaries, num_slots, scratch, STRIDES, BUFFERS)
        written, failed = write_in_order(
            offsets, seed_slots, active, slots_in, ids, positions, expected_ids, expected_positions, canaries, kv, kv_slots,
            num_tokens, num_slots, logs, log_entries, capacities, tags, write_indexes, STRIDES, SOURCES, ENDS, BUFFERS,
            ASSERT_INPUTS, ASSERT_STEPS,
        )  # fmt: skip
    elif last >= 0:
        _lay_padding(last, offsets, active, scratch + 4 * capacity, ids, positions, canaries, STRIDES, BUFFERS)
    for b in tl.static_range(BUFFERS):
        add_where_any(kernel_counters[b], written * 0 + 1)
        add_where_any(slot_counters[b], written)
        add_where_any(failed_counters[b], failed)


def write_many(
    requests: tuple[Any, ...], inputs: tuple[Any, ...], many: BufferPointers, constants: dict[str, Any]
) -> None:
    """Launch; arguments as `write.write_shared` has checked them.

    `requests`: offsets, seed_slots, num_valid_reqs, how many requests there may be; `inputs`: slots, tokens, positions,
    expected tokens and positions.
    """
    capacity, tokens, slots = requests[3], inputs[0].shape[0], many.num_slots
    tile = 32 if many.folds_rows else 128
    wanted = MOST_PROGRAMS if many.folds_rows else max(LEAST_PROGRAMS, capacity // REQUESTS_PER_PROGRAM)
    laying = max(1, min(wanted, MOST_PROGRAMS, cdiv(tokens, tile)))
    bit_words = cdiv(slots, 32)
    device = inputs[0].device
    # Of each seed token, position, prev_hash, and what goes on from it; of each chain its last token's of slot 0; tallies.
    scratch = torch.empty(5 * capacity + 4, dtype=torch.int64, device=device)
    taken = torch.empty(bit_words, dtype=torch.int32, device=device)
    read = (*requests, scratch, taken, *inputs, many.canaries, many.kv, many.kv_slots, tokens, slots)
    launch(
        _begin_kernel,
        max(1, cdiv(bit_words, 1024)),
        (*requests, scratch, taken, bit_words, many.canaries[0], slots),
        {"STRIDE": many.strides[0]},
        num_warps=4,
    )
    # Left to choose, the compiler saves registers where a walk waits for them.
    launch(_chain_kernel, capacity + laying, read, constants | {"T": tile}, num_warps=1, maxnreg=128)
    launch(_finish_kernel, 1, (*read, *many.ends), constants, num_warps=8)
