"""The kernels that fill frames where a model begins and where it ends, inside a CUDA graph too.

A graph launches its kernels with the arguments that it was captured with. What changes from forward to forward lies in
device memory instead, in a ticket: `write_ticket_kernel` writes it before the model runs, the other kernels read it, and
the last program of a forward clears it. Kernels that find no ticket do nothing: those of a graph that is launched
without one, and those of a graph that is being captured. The last word of a forward's counters says how many programs
have ended, so that nobody has to record an event.
"""

from typing import Any, Final

import triton
import triton.language as tl

from ..ops.state_hash.triton import slot_hash
from .frame_kv import compare_kv, copy_written, find_values, searched_layers
from .frame_parts import (
    ATTENTION_AT,
    ATTENTION_CAPACITY,
    ATTENTION_ENTRY,
    FRAMES,
    GROUP_WORDS,
    GROUPS_AT,
    LENS_AT,
    NEXT_COUNTERS_ROW,
    NOT_SAID,
    NUM_COUNTERS,
    POOL_WORDS,
    PROGRAMS,
    STATE_SAID,
    STATE_VALUES,
    STATES_AT,
    WATCH,
    compare_table,
    copy_lens,
    copy_requests,
    copy_tokens,
    counters_of,
    descriptor_of,
    frame_of,
    lens_of,
    pointer,
    shadow_row,
    table_of,
    through_shadow,
    tokens_before,
    write_shadow,
)

TICKET_WORDS: Final = 24
CARRIED_TILE: tl.constexpr = tl.constexpr(512)  # values a round of the one program that writes a ticket


def device_kernel(arguments: int) -> Any:
    """Make a kernel of one form for all values and alignments of so many arguments; only dtypes make another.

    A new form would be compiled on the engine's thread.
    """
    numbers = list(range(arguments))
    return triton.jit(do_not_specialize=numbers, do_not_specialize_on_alignment=numbers)


@device_kernel(3)
def write_ticket_kernel(ticket, memory, numbers, values, carried):
    """Write a ticket: one program, for one forward; `numbers` in the order of its words, the addresses after four of them.

    What the frame carries beside its forward is copied too: for each of `values`, `carried` has a place in the frames and how
    many.
    """
    zero = tl.program_id(0).to(tl.int64)
    for part in tl.static_range(len(values)):
        for start in range(0, carried[2 * part + 1], CARRIED_TILE):
            i = start + tl.arange(0, CARRIED_TILE)
            mask = i < carried[2 * part + 1]
            tl.store(memory[0] + carried[2 * part] + i, tl.load(values[part] + i, mask=mask), mask=mask)
    for word in tl.static_range(1, FRAMES):
        tl.store(ticket + word, zero + numbers[word])
    for number in tl.static_range(len(memory)):
        tl.store(ticket + FRAMES + number, zero + memory[number].to(tl.int64))
    for word in tl.static_range(FRAMES, len(numbers)):
        tl.store(ticket + len(memory) + word, zero + numbers[word])
    tl.store(ticket, zero + numbers[0])


@triton.jit
def _count_as_done(ticket, counters):
    """Count this program, once all that it has stored can be seen; the last one of the forward clears the ticket."""
    tl.debug_barrier()
    before = tl.atomic_add(counters + 3, 1, sem="acq_rel")
    if before + 1 == tl.load(ticket + PROGRAMS):
        tl.store(ticket, before * 0)


@device_kernel(1)
def begin_kernel(
    ticket, requests, tokens, lens, numbers, HAS_MINUS: tl.constexpr, HAS_EXTEND: tl.constexpr, HAS_LENS: tl.constexpr,
    LUT_INT64: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Put what a forward reads and writes into its frame, and the table entries that the trace does not know.

    The first programs go along the tokens, the others along the requests' prefixes. With `HAS_LENS` the lengths that
    attention gets are copied too.
    """
    rows_in, prefix_in, minus_in, extend_in = requests
    ids_in, positions_in, loc_in = tokens
    seq_lens_in, starts_in = lens
    num_loc, num_prefix, extend_each, bs, num_tokens, loc_stride = numbers
    if tl.load(ticket) != 0:
        tiles = (tl.maximum(num_tokens, bs) + TILE - 1) // TILE
        # A share for each program: a second round, even of shares that are empty, takes as long as the first.
        splits = tl.maximum((tl.num_programs(0) - tiles) // tl.maximum(bs, 1), 1)
        for program in range(tl.program_id(0).to(tl.int64), tiles + bs * splits, tl.num_programs(0).to(tl.int64)):
            if program < tiles:
                i = program * TILE + tl.arange(0, TILE).to(tl.int64)
                prefixes, extends = lens_of(
                    i, i < bs, prefix_in, minus_in, extend_in, num_prefix, extend_each, HAS_MINUS, HAS_EXTEND
                )
                copy_requests(program, rows_in, prefixes, extends, ticket, bs, TILE)
                if HAS_LENS:
                    copy_lens(program, seq_lens_in, starts_in, ticket, bs, TILE)
                copy_tokens(
                    program, ids_in, positions_in, loc_in, num_loc, loc_stride, ticket, bs, num_tokens, LUT_INT64, TILE
                )
            else:
                request, split = (program - tiles) // splits, (program - tiles) % splits
                row = tl.load(rows_in + request).to(tl.int64)
                here = request < bs
                prefix, extend = lens_of(
                    request, here, prefix_in, minus_in, extend_in, num_prefix, extend_each, HAS_MINUS, HAS_EXTEND
                )
                before = tokens_before(request, rows_in, extend_in, extend_each, HAS_EXTEND, TILE)
                for table in range(tl.load(descriptor_of(ticket) + 9)):
                    compare_table(table, request, row, prefix, split, splits, ticket, LUT_INT64, TILE)
                    write_shadow(
                        table, request, row, prefix, extend, before, split, splits, loc_in + table * loc_stride, num_loc,
                        num_tokens, ticket, TILE,
                    )  # fmt: skip
        _count_as_done(ticket, counters_of(ticket))


@triton.jit
def _compare_attention(
    group, request, split, splits, indptr, indices, num_indices, kv_len, ticket, bs, TILE: tl.constexpr
):  # fmt: skip
    """Compare a share of the slots that attention gets for a request with those that the forward reads and writes.

    The last of them is that of position `kv_len - 1`. Positions that the forward neither reads nor writes are passed
    over.
    """
    tile = tl.arange(0, TILE).to(tl.int64)
    frame, descriptor = frame_of(ticket), descriptor_of(ticket)
    begin = tl.load(indptr + request).to(tl.int64)
    first = kv_len - (tl.load(indptr + request + 1).to(tl.int64) - begin)
    row = tl.load(frame + request)
    prefix = tl.load(frame + bs + request)
    extend = tl.load(frame + 2 * bs + request)
    of_table = table_of(descriptor, group)
    width = tl.load(of_table + 6)
    if (row > 0) & (row < tl.load(of_table + 5)):
        shadow = shadow_row(of_table, row)
        window = tl.load(descriptor + GROUPS_AT + group * GROUP_WORDS)
        low = tl.maximum(first, 0)
        if window > 0:
            low = tl.maximum(low, prefix - window)
        end = tl.minimum(tl.minimum(kv_len, prefix + tl.maximum(extend, 0)), width)
        out = frame + tl.load(ticket + ATTENTION_AT)
        capacity = tl.load(ticket + ATTENTION_CAPACITY)
        for start in range(low + split * TILE, end, splits * TILE):
            position = start + tile
            place = begin + position - first
            mask = (position < end) & (place >= 0) & (place < num_indices)
            got = tl.load(indices + place, mask=mask, other=0).to(tl.int64)
            held = tl.load(shadow + position, mask=mask, other=0).to(tl.int64)
            held = through_shadow(descriptor, group, held, mask)
            differs = mask & (got != held)
            found = tl.sum(differs.to(tl.int64))
            if found > 0:
                at = tl.atomic_add(counters_of(ticket) + 4, found) + tl.cumsum(differs.to(tl.int64), 0) - 1
                fits = differs & (at < capacity)
                entry = out + at * ATTENTION_ENTRY
                tl.store(entry, tl.zeros_like(position) + group, mask=fits)
                tl.store(entry + 1, tl.zeros_like(position) + request, mask=fits)
                tl.store(entry + 2, position, mask=fits)
                tl.store(entry + 3, got, mask=fits)


@device_kernel(9)
def attention_kernel(
    ticket, kv_indptr, kv_indices, window_indptr, window_indices, qo_indptr, num_indices, num_window_indices, bs,
    HAS_QO: tl.constexpr, HAS_WINDOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Put the lengths that attention gets into the frame, and slots other than the shadow's; after `begin_kernel`.

    With `HAS_QO` the keys and values of the query tokens are not among `kv_indices`; without, each request has one
    query token, and they are.
    """
    if tl.load(ticket) != 0:
        descriptor = descriptor_of(ticket)
        lens = frame_of(ticket) + tl.load(ticket + LENS_AT)
        groups = tl.load(descriptor + 6)
        splits = tl.maximum(tl.num_programs(0) // tl.maximum(bs * groups, 1), 1)
        for number in range(tl.program_id(0).to(tl.int64), groups * bs * splits, tl.num_programs(0).to(tl.int64)):
            group = number // (bs * splits)
            request = (number // splits) % bs
            split = number % splits
            kv_len = tl.load(kv_indptr + request + 1).to(tl.int64) - tl.load(kv_indptr + request).to(tl.int64)
            query = kv_len * 0 + 1
            seq_len = kv_len
            if HAS_QO:
                query = tl.load(qo_indptr + request + 1).to(tl.int64) - tl.load(qo_indptr + request).to(tl.int64)
                seq_len = kv_len + query
            if (group == 0) & (split == 0):
                tl.store(lens + request, seq_len)
                tl.store(lens + bs + request, query)
            if tl.load(descriptor + GROUPS_AT + group * GROUP_WORDS) > 0:
                if HAS_WINDOW:
                    _compare_attention(
                        group, request, split, splits, window_indptr, window_indices, num_window_indices, kv_len, ticket,
                        bs, TILE,
                    )  # fmt: skip
            else:
                _compare_attention(
                    group, request, split, splits, kv_indptr, kv_indices, num_indices, kv_len, ticket, bs, TILE
                )
        _count_as_done(ticket, counters_of(ticket))


@device_kernel(6)
def state_kernel(
    ticket,
    first,
    second,
    first_reads,
    second_reads,
    numbers,
    AFTER: tl.constexpr,
    SAVED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Put the slots of recurrent state that a pool's layers get into the frame, and the hash of each, or with `AFTER` the
    hashes alone, of the same slots; behind `begin_kernel`. Of padding, and of a request that begins, nothing is read before:
    one of no prefix, unless the reads say who does. With `SAVED` the slots are in `first`, and how many tokens their states
    are behind in `second`.
    """
    if tl.load(ticket) != 0:
        place, pool, bs, num_first, num_second, first_stride, second_stride, first_said, second_said = numbers
        frame = frame_of(ticket)
        of_pool = descriptor_of(ticket) + STATES_AT + pool * POOL_WORDS
        out = frame + tl.load(ticket + LENS_AT) + 2 * bs + place * STATE_VALUES * bs
        for request in range(tl.program_id(0).to(tl.int64), bs, tl.num_programs(0).to(tl.int64)):
            is_request = tl.load(frame + request) > 0
            if AFTER:
                slot = tl.load(out + request)
                slot = tl.where(slot < 0, slot, slot % STATE_SAID)
                tl.store(out + 2 * bs + request, slot_hash(of_pool, tl.where(is_request, slot, -1), TILE))
            elif SAVED:
                slot = tl.load(first + request * first_stride, mask=request < num_first, other=-1).to(tl.int64)
                tokens = tl.load(second + request * second_stride, mask=request < num_second, other=0).to(tl.int64)
                tl.store(out + request, slot)
                tl.store(out + bs + request, tokens)
            else:
                behind = request - num_first
                in_second = (behind >= 0) & (behind < num_second)
                slot = tl.load(first + request * first_stride, mask=behind < 0, other=-1).to(tl.int64)
                other = tl.load(second + behind * second_stride, mask=in_second, other=-1).to(tl.int64)
                slot = tl.where(in_second, other, slot)
                # Of the reads the strides are said, or that all or nobody knows who do.
                own = tl.load(first_reads + request * first_said, mask=(behind < 0) & (first_said >= 0), other=1)
                others = tl.load(second_reads + behind * second_said, mask=in_second & (second_said >= 0), other=1)
                reads = tl.where(in_second, others, own) != 0
                is_said = tl.where(in_second, second_said, first_said) != NOT_SAID
                read = is_request & tl.where(is_said, reads, tl.load(frame + bs + request) > 0)
                on_top = tl.where(is_said & (slot >= 0), (reads.to(tl.int64) + 1) * STATE_SAID, 0)
                tl.store(out + request, slot + on_top)
                tl.store(out + bs + request, slot_hash(of_pool, tl.where(read, slot, -1), TILE))
        _count_as_done(ticket, counters_of(ticket))


@device_kernel(3)
def end_kernel(ticket, bs, num_tokens, TILE: tl.constexpr):
    """Put the bytes that a forward wrote into its frame, values that no model writes, and, if they are watched, its prefix's
    bytes that changed without a write.
    """
    if tl.load(ticket) != 0:
        streams = tl.load(descriptor_of(ticket) + 8)
        if tl.program_id(0) == 0:
            following = pointer(ticket, FRAMES + 1) + tl.load(ticket + NEXT_COUNTERS_ROW) * NUM_COUNTERS
            for word in range(NUM_COUNTERS):
                tl.store(following + word, streams * 0)
        tiles = (num_tokens + TILE - 1) // TILE
        written = streams * tiles
        splits = tl.maximum((tl.num_programs(0) - written) // tl.maximum(streams * bs, 1), 1)
        total = written
        if tl.load(ticket + WATCH) != 0:
            total += streams * bs * splits
        for program in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0).to(tl.int64)):
            if program < written:
                copy_written(program, ticket, bs, num_tokens, tiles, TILE)
            else:
                compare_kv(program - written, ticket, bs, splits, TILE)
        for stream in range(streams):
            layers = searched_layers(descriptor_of(ticket), stream)
            for row in range(tl.program_id(0).to(tl.int64), num_tokens * layers, tl.num_programs(0).to(tl.int64)):
                find_values(stream, row // layers, row % layers, ticket, bs, num_tokens)
        _count_as_done(ticket, counters_of(ticket))
