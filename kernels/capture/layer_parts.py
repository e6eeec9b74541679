"""What the programs of `end_kernel` do with the layers of a pool: find rows that hold values which no model writes."""

import triton
import triton.language as tl

from .frame_parts import (
    STREAM_WORDS,
    STREAMS_AT,
    VALUE_KINDS,
    VALUES_AT,
    counters_of,
    descriptor_of,
    frame_of,
    token_word,
    written_slots,
)
from .layers import INFINITE, NAN, ZEROS

ROW_TILE = tl.constexpr(64)  # pieces of 16 bytes of a row that are looked at at once
_NAN = tl.constexpr(NAN)
_INFINITE = tl.constexpr(INFINITE)
_ZEROS = tl.constexpr(ZEROS)


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
    """Look at the row of one token in one layer; say in the frame whether it has a NaN, an infinity, or is all zeros."""
    descriptor = descriptor_of(ticket)
    at = descriptor + STREAMS_AT + stream * STREAM_WORDS
    slot, inside = written_slots(at, token, token < num_tokens, ticket, bs, num_tokens)
    if inside:
        exponent, lowest = tl.load(at + 15).to(tl.uint64, bitcast=True), tl.load(at + 16).to(tl.uint64, bitcast=True)
        sign, mantissa = tl.load(at + 17).to(tl.uint64, bitcast=True), tl.load(at + 18).to(tl.uint64, bitcast=True)
        shift = (tl.load(at + 19) - 1).to(tl.uint64)
        chunks, num_chunks = tl.load(at + 13).to(tl.pointer_type(tl.int64)), tl.load(at + 12)
        begin = tl.load(tl.load(at + 11).to(tl.pointer_type(tl.int64)) + layer)
        row = tl.load(at).to(tl.pointer_type(tl.int64)) + begin + token_word(at, slot)
        held = tl.zeros([ROW_TILE, 2], tl.uint64)
        wrong = tl.zeros([ROW_TILE, 2], tl.uint64)
        for start in range(0, num_chunks, ROW_TILE):
            words = _row(row, chunks, num_chunks, start)
            held |= words & ~sign
            wrong |= ((words & exponent) + lowest) & sign
        zeros = tl.max((held != 0).to(tl.int64)) == 0
        if zeros | (tl.max((wrong != 0).to(tl.int64)) != 0):
            nans = tl.zeros([ROW_TILE, 2], tl.int64)
            infinite = tl.zeros([ROW_TILE, 2], tl.int64)
            for start in range(0, num_chunks, ROW_TILE):
                words = _row(row, chunks, num_chunks, start)
                # In the sign's place of each value whether its exponent is all ones, and whether it has a mantissa.
                special = ((words & exponent) + lowest) & sign
                some = (((words & mantissa) + mantissa) << shift) & sign
                nans |= (special & some != 0).to(tl.int64)
                infinite |= (special & ~some != 0).to(tl.int64)
            tl.atomic_add(counters_of(ticket) + 5, 1)
            each = (tl.load(at + 10) + 63) // 64
            values = frame_of(ticket) + tl.load(ticket + VALUES_AT) + num_tokens * tl.load(at + 20)
            of_layer = values + token * VALUE_KINDS * each + layer // 64
            bit = (layer * 0 + 1) << layer % 64
            if tl.max(nans) != 0:
                tl.atomic_or(of_layer + _NAN * each, bit)
            if tl.max(infinite) != 0:
                tl.atomic_or(of_layer + _INFINITE * each, bit)
            if zeros:
                tl.atomic_or(of_layer + _ZEROS * each, bit)
