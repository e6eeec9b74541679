"""Frames of forwards that are taken down where a model begins and where it ends, inside a CUDA graph too.

A graph launches its kernels with the arguments that it was captured with. What changes from forward to forward lies in
device memory instead, in a ticket: `write_ticket_kernel` writes it right before the graph is launched, the kernels in
the graph read it, and the last program of a forward takes it away. A graph that is launched without one takes nothing
down, and so does one that is captured.
"""

from typing import Final

import triton
import triton.language as tl

from .frames import ATTENTION_ENTRY, NUM_COUNTERS
from .triton_frames import _take_inputs, _take_kv_changes, _take_table_changes, _take_written, _through_shadow

TICKET_WORDS: Final = 24
PROGRAMS: Final = 1024  # of each launch: enough to fill a device

# Words of a ticket. The first is the forward's stamp, 0 where nothing is to be taken down.
_AT = tl.constexpr(1)
_FLIGHT = tl.constexpr(2)
_NEXT_FLIGHT = tl.constexpr(3)
_WATCH = tl.constexpr(4)
_FRAMES = tl.constexpr(5)  # addresses of frames, counters and the runner's descriptor
_TABLE_AT = tl.constexpr(8)
_TABLE_CAPACITY = tl.constexpr(9)
_LUT_AT = tl.constexpr(10)
_LUT_CAPACITY = tl.constexpr(11)
_KV_AT = tl.constexpr(12)
_KV_CAPACITY = tl.constexpr(13)
_KV_ENTRY = tl.constexpr(14)
_LENS_AT = tl.constexpr(15)
_ATTENTION_AT = tl.constexpr(16)
_ATTENTION_CAPACITY = tl.constexpr(17)
_PROGRAMS = tl.constexpr(18)  # of all launches together

_NUM_COUNTERS = tl.constexpr(NUM_COUNTERS)
_ATTENTION_ENTRY = tl.constexpr(ATTENTION_ENTRY)
_GROUPS_AT = tl.constexpr(16)  # in the descriptor, as `frames` lays it out
_GROUP_WORDS = tl.constexpr(8)

TICKET_ARGUMENTS = [
    "ticket", "stamp", "at", "flight", "next_flight", "watch", "frames", "counters", "descriptor", "table_at",
    "table_capacity", "lut_at", "lut_capacity", "kv_at", "kv_capacity", "kv_entry", "lens_at", "attention_at",
    "attention_capacity", "programs",
]  # fmt: skip
BEGIN_ARGUMENTS = [
    "ticket", "rows_in", "prefix_in", "minus_in", "extend_in", "ids_in", "positions_in", "loc_in",
    "num_loc", "num_prefix", "extend_each", "bs", "num_tokens",
]  # fmt: skip
ATTENTION_ARGUMENTS = [
    "ticket", "kv_indptr", "kv_indices", "num_indices", "window_indptr", "window_indices", "num_window_indices",
    "qo_indptr", "bs",
]  # fmt: skip
END_ARGUMENTS = ["ticket", "bs", "num_tokens"]


@triton.jit(do_not_specialize=TICKET_ARGUMENTS, do_not_specialize_on_alignment=TICKET_ARGUMENTS)
def write_ticket_kernel(
    ticket, stamp, at, flight, next_flight, watch, frames, counters, descriptor, table_at, table_capacity, lut_at,
    lut_capacity, kv_at, kv_capacity, kv_entry, lens_at, attention_at, attention_capacity, programs,
):  # fmt: skip
    """Write a ticket: one program, for one forward."""
    zero = tl.program_id(0).to(tl.int64)
    tl.store(ticket + 1, zero + at)
    tl.store(ticket + 2, zero + flight)
    tl.store(ticket + 3, zero + next_flight)
    tl.store(ticket + 4, zero + watch)
    tl.store(ticket + 5, frames.to(tl.int64))
    tl.store(ticket + 6, counters.to(tl.int64))
    tl.store(ticket + 7, descriptor.to(tl.int64))
    tl.store(ticket + 8, zero + table_at)
    tl.store(ticket + 9, zero + table_capacity)
    tl.store(ticket + 10, zero + lut_at)
    tl.store(ticket + 11, zero + lut_capacity)
    tl.store(ticket + 12, zero + kv_at)
    tl.store(ticket + 13, zero + kv_capacity)
    tl.store(ticket + 14, zero + kv_entry)
    tl.store(ticket + 15, zero + lens_at)
    tl.store(ticket + 16, zero + attention_at)
    tl.store(ticket + 17, zero + attention_capacity)
    tl.store(ticket + 18, zero + programs)
    tl.store(ticket, zero + stamp)


@triton.jit
def _pointer(ticket, word):
    return tl.load(ticket + word).to(tl.pointer_type(tl.int64))


@triton.jit
def _count_as_done(ticket, counters):
    """Count this program, once all that it has stored can be seen; the last one of the forward takes the ticket away."""
    tl.debug_barrier()
    before = tl.atomic_add(counters + 3, 1, sem="acq_rel")
    if before + 1 == tl.load(ticket + _PROGRAMS):
        tl.store(ticket, before * 0)


@triton.jit(do_not_specialize=BEGIN_ARGUMENTS, do_not_specialize_on_alignment=BEGIN_ARGUMENTS)
def begin_kernel(
    ticket, rows_in, prefix_in, minus_in, extend_in, ids_in, positions_in, loc_in,
    num_loc, num_prefix, extend_each, bs, num_tokens,
    HAS_MINUS: tl.constexpr, HAS_EXTEND: tl.constexpr, LUT_INT64: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Take down what a forward reads and writes, as `take_down_kernel` does."""
    stamp = tl.load(ticket)
    if stamp != 0:
        frame = _pointer(ticket, _FRAMES) + tl.load(ticket + _AT)
        counters = _pointer(ticket, _FRAMES + 1) + tl.load(ticket + _FLIGHT) * _NUM_COUNTERS
        descriptor = _pointer(ticket, _FRAMES + 2)
        table_at, table_capacity = tl.load(ticket + _TABLE_AT), tl.load(ticket + _TABLE_CAPACITY)
        lut_at, lut_capacity = tl.load(ticket + _LUT_AT), tl.load(ticket + _LUT_CAPACITY)
        tiles = (tl.maximum(num_tokens, bs) + TILE - 1) // TILE
        splits = tl.maximum(tl.num_programs(0) // tl.maximum(bs, 1), 1)
        for program in range(tl.program_id(0).to(tl.int64), tiles + bs * splits, tl.num_programs(0).to(tl.int64)):
            if program < tiles:
                _take_inputs(
                    program, rows_in, prefix_in, minus_in, extend_in, ids_in, positions_in, loc_in, frame, counters,
                    descriptor, bs, num_tokens, num_loc, num_prefix, extend_each, stamp, lut_at, lut_capacity,
                    HAS_MINUS, HAS_EXTEND, LUT_INT64, TILE,
                )  # fmt: skip
            else:
                _take_table_changes(
                    program - tiles, rows_in, prefix_in, minus_in, extend_in, loc_in, frame, counters, descriptor,
                    num_tokens, num_loc, num_prefix, extend_each, table_at, table_capacity, lut_at, lut_capacity,
                    splits, HAS_MINUS, HAS_EXTEND, LUT_INT64, TILE,
                )  # fmt: skip
        _count_as_done(ticket, counters)


@triton.jit
def _compare_attention(
    group, request, split, splits, indptr, indices, num_indices, kv_len, ticket, frame, counters, descriptor, bs,
    TILE: tl.constexpr,
):  # fmt: skip
    """Compare a share of the slots that attention gets for a request with those that the forward reads and writes.

    The last of them is that of position `kv_len - 1`. Positions that the forward neither reads nor writes are passed
    over.
    """
    tile = tl.arange(0, TILE).to(tl.int64)
    begin = tl.load(indptr + request).to(tl.int64)
    first = kv_len - (tl.load(indptr + request + 1).to(tl.int64) - begin)
    row = tl.load(frame + request)
    prefix = tl.load(frame + bs + request)
    extend = tl.load(frame + 2 * bs + request)
    width = tl.load(descriptor + 2)
    if (row > 0) & (row < tl.load(descriptor + 1)):
        shadow = tl.load(descriptor + 4).to(tl.pointer_type(tl.int32)) + row * width
        window = tl.load(descriptor + _GROUPS_AT + group * _GROUP_WORDS)
        low = tl.maximum(first, 0)
        if window > 0:
            low = tl.maximum(low, prefix - window)
        end = tl.minimum(tl.minimum(kv_len, prefix + tl.maximum(extend, 0)), width)
        out = frame + tl.load(ticket + _ATTENTION_AT)
        capacity = tl.load(ticket + _ATTENTION_CAPACITY)
        for start in range(low + split * TILE, end, splits * TILE):
            position = start + tile
            place = begin + position - first
            mask = (position < end) & (place >= 0) & (place < num_indices)
            got = tl.load(indices + place, mask=mask, other=0).to(tl.int64)
            held = tl.load(shadow + position, mask=mask, other=0).to(tl.int64)
            held = _through_shadow(descriptor, group, held, mask)
            differs = mask & (got != held)
            found = tl.sum(differs.to(tl.int64))
            if found > 0:
                at = tl.atomic_add(counters + 4, found) + tl.cumsum(differs.to(tl.int64), 0) - 1
                fits = differs & (at < capacity)
                entry = out + at * _ATTENTION_ENTRY
                tl.store(entry, tl.zeros_like(position) + group, mask=fits)
                tl.store(entry + 1, tl.zeros_like(position) + request, mask=fits)
                tl.store(entry + 2, position, mask=fits)
                tl.store(entry + 3, got, mask=fits)


@triton.jit(do_not_specialize=ATTENTION_ARGUMENTS, do_not_specialize_on_alignment=ATTENTION_ARGUMENTS)
def attention_kernel(
    ticket, kv_indptr, kv_indices, num_indices, window_indptr, window_indices, num_window_indices, qo_indptr, bs,
    HAS_QO: tl.constexpr, HAS_WINDOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Take down the lengths that attention gets, and slots other than those of the shadow; after `begin_kernel`.

    With `HAS_QO` the keys and values of the query tokens are not among `kv_indices`; without, each request has one
    query token, and they are.
    """
    if tl.load(ticket) != 0:
        frame = _pointer(ticket, _FRAMES) + tl.load(ticket + _AT)
        counters = _pointer(ticket, _FRAMES + 1) + tl.load(ticket + _FLIGHT) * _NUM_COUNTERS
        descriptor = _pointer(ticket, _FRAMES + 2)
        lens = frame + tl.load(ticket + _LENS_AT)
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
            if tl.load(descriptor + _GROUPS_AT + group * _GROUP_WORDS) > 0:
                if HAS_WINDOW:
                    _compare_attention(
                        group, request, split, splits, window_indptr, window_indices, num_window_indices, kv_len, ticket,
                        frame, counters, descriptor, bs, TILE,
                    )  # fmt: skip
            else:
                _compare_attention(
                    group, request, split, splits, kv_indptr, kv_indices, num_indices, kv_len, ticket, frame, counters,
                    descriptor, bs, TILE,
                )  # fmt: skip
        _count_as_done(ticket, counters)


@triton.jit(do_not_specialize=END_ARGUMENTS, do_not_specialize_on_alignment=END_ARGUMENTS)
def end_kernel(ticket, bs, num_tokens, TILE: tl.constexpr):
    """Take down what a forward wrote, and what changed without a write, as `take_back_kernel` does."""
    stamp = tl.load(ticket)
    if stamp != 0:
        frame = _pointer(ticket, _FRAMES) + tl.load(ticket + _AT)
        counters = _pointer(ticket, _FRAMES + 1)
        descriptor = _pointer(ticket, _FRAMES + 2)
        streams = tl.load(descriptor + 8)
        if tl.program_id(0) == 0:
            following = counters + tl.load(ticket + _NEXT_FLIGHT) * _NUM_COUNTERS
            for word in range(_NUM_COUNTERS):
                tl.store(following + word, streams * 0)
        counters += tl.load(ticket + _FLIGHT) * _NUM_COUNTERS
        kv_at, kv_capacity = tl.load(ticket + _KV_AT), tl.load(ticket + _KV_CAPACITY)
        kv_entry = tl.load(ticket + _KV_ENTRY)
        tiles = (num_tokens + TILE - 1) // TILE
        splits = tl.maximum(tl.num_programs(0) // tl.maximum(bs, 1), 1)
        written = streams * tiles
        total = written
        if tl.load(ticket + _WATCH) != 0:
            total += streams * bs * splits
        for program in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0).to(tl.int64)):
            if program < written:
                _take_written(program, frame, descriptor, bs, num_tokens, tiles, TILE)
            else:
                _take_kv_changes(
                    program - written, frame, counters, descriptor, bs, stamp, kv_at, kv_capacity, kv_entry, splits,
                    TILE,
                )  # fmt: skip
        _count_as_done(ticket, counters)
