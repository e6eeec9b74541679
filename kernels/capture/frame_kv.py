"""What the programs of `end_kernel` do with the bytes of pools: copy what was written, find what changed without a write and rows
that hold values which no model writes.
"""

import triton
import triton.language as tl

from ..ops.hash.triton import hash_word
from .frame_parts import (
    GROUP_WORDS,
    GROUPS_AT,
    KV_AT,
    KV_CAPACITY,
    KV_ENTRY,
    STREAM_WORDS,
    STREAMS_AT,
    VALUE_KINDS,
    VALUES_AT,
    counters_of,
    descriptor_of,
    frame_of,
    shadow_row,
    table_of,
    through_shadow,
)
from .layers import INFINITE, NAN, SATURATED, ZEROS

ROW_TILE = tl.constexpr(64)  # pieces of 16 bytes of a row that are looked at at once
_NAN = tl.constexpr(NAN)
_INFINITE = tl.constexpr(INFINITE)
_ZEROS = tl.constexpr(ZEROS)
_SATURATED = tl.constexpr(SATURATED)


@triton.jit
def _turn(word, seed):
    """What `layers` adds to the number of a layer or a piece; of 64-bit integers that are not negative."""
    return (hash_word(word.to(tl.uint64) ^ seed.to(tl.uint64)) & 0xFFFFFF).to(tl.int64)


@triton.jit
def token_word(at, cell):
    """Where a slot's token begins in a layer of a stream's, from the stream's address or the layer's on."""
    page = tl.load(at + 7)
    return cell // page * tl.load(at + 1) + cell % page * tl.load(at + 8)


@triton.jit
def _word_of(at, cell):
    """Where a slot's captured words begin, from a stream's address on: of one that samples layers as `layers` says."""
    word = token_word(at, cell)
    num_layers = tl.load(at + 10)
    if num_layers > 0:
        num_chunks, seed = tl.load(at + 12), tl.load(at + 14)
        turn = cell // num_layers
        layer = (cell - turn * num_layers + _turn(turn, seed)) % num_layers
        chunk = (turn + _turn(turn // num_chunks, seed + 1)) % num_chunks
        word += tl.load(tl.load(at + 11).to(tl.pointer_type(tl.int64)) + layer)
        word += tl.load(tl.load(at + 13).to(tl.pointer_type(tl.int64)) + chunk)
    return word


@triton.jit
def written_slots(stream_at, i, mask, ticket, bs, num_tokens):
    """The slots of a stream's group that tokens are written to, and which of them are slots of its pool."""
    descriptor, group = descriptor_of(ticket), tl.load(stream_at + 5)
    table = tl.load(descriptor + GROUPS_AT + group * GROUP_WORDS + 4)
    loc = tl.load(frame_of(ticket) + 3 * bs + (2 + table) * num_tokens + i, mask=mask, other=-1)
    slot = through_shadow(descriptor, group, loc, mask)
    return slot, mask & (slot >= 0) & (slot < tl.load(stream_at + 2))


@triton.jit
def copy_written(program, ticket, bs, num_tokens, token_programs, TILE: tl.constexpr):
    """Copy the bytes of a tile of written tokens, of one stream, into the frame and the shadow."""
    tile = tl.arange(0, TILE).to(tl.int64)
    frame, descriptor = frame_of(ticket), descriptor_of(ticket)
    stream = program // token_programs
    at = descriptor + STREAMS_AT + stream * STREAM_WORDS
    i = (program % token_programs) * TILE + tile
    is_token = i < num_tokens
    slot, inside = written_slots(at, i, is_token, ticket, bs, num_tokens)
    words = tl.load(at + 3)
    rows = tl.load(at).to(tl.pointer_type(tl.int64))
    shadow = tl.load(at + 4).to(tl.pointer_type(tl.int64))
    cell = tl.where(inside, slot, 0)
    there = rows + _word_of(at, cell)
    inputs = 3 * bs + (2 + tl.load(descriptor + 9)) * num_tokens
    out = frame + inputs + num_tokens * tl.load(at + 6) + i * words
    for word in range(words):
        content = tl.load(there + word, mask=inside, other=0)
        tl.store(out + word, content, mask=is_token)
        tl.store(shadow + cell * words + word, content, mask=inside)
    known = tl.load(at + 9).to(tl.pointer_type(tl.uint8))
    tl.store(known + cell, tl.full([TILE], 1, tl.uint8), mask=inside)


@triton.jit
def compare_kv(program, ticket, bs, splits, TILE: tl.constexpr):
    """Compare the bytes of a share of one request's prefix with the shadow, of one stream."""
    tile = tl.arange(0, TILE).to(tl.int64)
    frame, descriptor = frame_of(ticket), descriptor_of(ticket)
    stamp = tl.load(ticket)
    stream = program // (bs * splits)
    request = (program // splits) % bs
    split = program % splits
    at = descriptor + STREAMS_AT + stream * STREAM_WORDS
    group = tl.load(at + 5)
    of_group = descriptor + GROUPS_AT + group * GROUP_WORDS
    row = tl.load(frame + request)
    prefix = tl.load(frame + bs + request)
    of_table = table_of(descriptor, group)
    width = tl.load(of_table + 6)
    if (row > 0) & (row < tl.load(of_table + 5)):
        # The shadow holds what the forward read; the engine's own table may have moved on.
        table = shadow_row(of_table, row)
        window = tl.load(of_group)
        first = tl.where(window > 0, tl.maximum(prefix - window, 0), 0)
        end = tl.minimum(prefix, width)
        rows = tl.load(at).to(tl.pointer_type(tl.int64))
        words = tl.load(at + 3)
        shadow = tl.load(at + 4).to(tl.pointer_type(tl.int64))
        num_slots = tl.minimum(tl.load(at + 2), tl.load(of_group + 2))
        stamps = tl.load(of_group + 3).to(tl.pointer_type(tl.int32))
        known = tl.load(at + 9).to(tl.pointer_type(tl.uint8))
        for start in range(first + split * TILE, end, splits * TILE):
            position = start + tile
            mask = position < end
            slot = tl.load(table + position, mask=mask, other=0).to(tl.int64)
            slot = through_shadow(descriptor, group, slot, mask)
            inside = mask & (slot > 0) & (slot < num_slots)
            cell = tl.where(inside, slot, 0)
            there = rows + _word_of(at, cell)
            differs = tl.zeros_like(cell)
            for word in range(words):
                now = tl.load(there + word, mask=inside, other=0)
                then = tl.load(shadow + cell * words + word, mask=inside, other=0)
                differs = tl.where(now != then, 1, differs)
            changed = inside & (differs != 0)
            if tl.sum(changed.to(tl.int64)) > 0:
                # What this forward wrote is in the frame as written; what nobody wrote yet has no bytes to compare.
                changed = changed & (tl.load(known + cell, mask=changed, other=0) != 0)
                changed = changed & (tl.load(stamps + cell, mask=changed, other=0) != stamp)
                found = tl.sum(changed.to(tl.int64))
                if found > 0:
                    place = tl.atomic_add(counters_of(ticket) + 2, found) + tl.cumsum(changed.to(tl.int64), 0) - 1
                    fits = changed & (place < tl.load(ticket + KV_CAPACITY))
                    out = frame + tl.load(ticket + KV_AT) + place * tl.load(ticket + KV_ENTRY)
                    tl.store(out, tl.zeros_like(place) + stream, mask=fits)
                    tl.store(out + 1, slot, mask=fits)
                    for word in range(words):
                        now = tl.load(there + word, mask=fits, other=0)
                        tl.store(out + 2 + word, now, mask=fits)
                        tl.store(shadow + cell * words + word, now, mask=fits)


@triton.jit
def searched_layers(descriptor, stream):
    """How many layers of a stream's are searched, 0 if it samples none or nobody knows what its bytes are."""
    at = descriptor + STREAMS_AT + stream * STREAM_WORDS
    return tl.where(tl.load(at + 19) > 0, tl.load(at + 10), 0)


@triton.jit
def _row(row, chunks, num_chunks, start):
    """Some pieces of a row, `[ROW_TILE, 2] uint64`, zeros behind its end."""
    i = start + tl.arange(0, ROW_TILE)
    there = i < num_chunks
    place = tl.load(chunks + i, mask=there, other=0)[:, None] + tl.arange(0, 2)[None, :]
    return tl.load(row + place, mask=there[:, None], other=0).to(tl.uint64, bitcast=True)


@triton.jit
def find_values(stream, token, layer, ticket, bs, num_tokens):
    """Look at the row of one token in one layer; say in the frame whether it has a NaN, an infinity, is all zeros, or saturated."""
    descriptor = descriptor_of(ticket)
    at = descriptor + STREAMS_AT + stream * STREAM_WORDS
    slot, inside = written_slots(at, token, token < num_tokens, ticket, bs, num_tokens)
    if inside:
        exponent, lowest = tl.load(at + 15).to(tl.uint64, bitcast=True), tl.load(at + 16).to(tl.uint64, bitcast=True)
        sign, mantissa = tl.load(at + 17).to(tl.uint64, bitcast=True), tl.load(at + 18).to(tl.uint64, bitcast=True)
        shift, largest = (tl.load(at + 19) - 1).to(tl.uint64), tl.load(at + 20).to(tl.uint64, bitcast=True)
        chunks, num_chunks = tl.load(at + 13).to(tl.pointer_type(tl.int64)), tl.load(at + 12)
        begin = tl.load(tl.load(at + 11).to(tl.pointer_type(tl.int64)) + layer)
        row = tl.load(at).to(tl.pointer_type(tl.int64)) + begin + token_word(at, slot)
        plain = tl.zeros([ROW_TILE, 2], tl.uint64)
        wrong = tl.zeros([ROW_TILE, 2], tl.uint64)
        for start in range(0, num_chunks, ROW_TILE):
            words = _row(row, chunks, num_chunks, start)
            size = words & ~sign
            if largest != 0:  # in the sign's place of each value whether it is neither 0 nor the largest
                size = (size + ~sign) & ((size ^ largest) + ~sign) & sign
            plain |= size
            wrong |= ((words & exponent) + lowest) & sign
        ends = tl.max((plain != 0).to(tl.int64)) == 0
        if ends | (tl.max((wrong != 0).to(tl.int64)) != 0):
            held = tl.zeros([ROW_TILE, 2], tl.uint64)
            nans = tl.zeros([ROW_TILE, 2], tl.int64)
            infinite = tl.zeros([ROW_TILE, 2], tl.int64)
            for start in range(0, num_chunks, ROW_TILE):
                words = _row(row, chunks, num_chunks, start)
                held |= words & ~sign
                # In the sign's place of each value whether its exponent is all ones, and whether it has a mantissa.
                special = ((words & exponent) + lowest) & sign
                some = (((words & mantissa) + mantissa) << shift) & sign
                nans |= (special & some != 0).to(tl.int64)
                infinite |= (special & ~some != 0).to(tl.int64)
            tl.atomic_add(counters_of(ticket) + 5, 1)
            each = (tl.load(at + 10) + 63) // 64
            values = frame_of(ticket) + tl.load(ticket + VALUES_AT) + num_tokens * tl.load(at + 21)
            of_layer = values + token * VALUE_KINDS * each + layer // 64
            bit = (layer * 0 + 1) << layer % 64
            if tl.max(nans) != 0:
                tl.atomic_or(of_layer + _NAN * each, bit)
            if tl.max(infinite) != 0:
                tl.atomic_or(of_layer + _INFINITE * each, bit)
            if ends:
                kind = tl.where(tl.max((held != 0).to(tl.int64)) == 0, _ZEROS, _SATURATED)
                tl.atomic_or(of_layer + kind * each, bit)
