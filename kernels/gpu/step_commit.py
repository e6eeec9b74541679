"""The end of a step: records, writers and the forward's own table entries, unless the step needs the host."""

import triton
import triton.language as tl

from ..constants import WRITE_POSITION, WRITE_TOKEN
from ..ops.hash.triton import hash_chain, signed, unsigned
from . import step
from .step_prepare import current, is_stuck, request_of, words_at

_TOKEN = tl.constexpr(WRITE_TOKEN)
_POSITION = tl.constexpr(WRITE_POSITION)

_PIECE_STATS = tl.constexpr(step.PIECE_STATS)
_PIECE_WRITE_LOG = tl.constexpr(step.PIECE_WRITE_LOG)
_PIECE_WRITE_LOG_ROWS = tl.constexpr(step.PIECE_WRITE_LOG_ROWS)
_PIECE_OWN = tl.constexpr(step.PIECE_OWN)
_PIECE_CHAIN = tl.constexpr(step.PIECE_CHAIN)
_PIECE_TOKEN_STRIDE = tl.constexpr(step.PIECE_TOKEN_STRIDE)
_PIECE_SEEDS = tl.constexpr(step.PIECE_SEEDS)
_PIECE_REQUEST_STRIDE = tl.constexpr(step.PIECE_REQUEST_STRIDE)
_RESULT_DONE = tl.constexpr(step.RESULT_DONE)
_RESULT_WRITE_ROWS = tl.constexpr(step.RESULT_WRITE_ROWS)
_STAT_OUT_OF_WINDOW = tl.constexpr(step.STAT_OUT_OF_WINDOW)
_STAT_WORDS = tl.constexpr(step.STAT_WORDS)
_MAX_GROUPS = tl.constexpr(step.MAX_GROUPS)
_STEP_REQUESTS = tl.constexpr(step.STEP_REQUESTS)
_STEP_TOKENS = tl.constexpr(step.STEP_TOKENS)
_STEP_WRITTEN = tl.constexpr(step.STEP_WRITTEN)
_STEP_ROWS = tl.constexpr(step.STEP_ROWS)
_STEP_REQUEST_IDS = tl.constexpr(step.STEP_REQUEST_IDS)
_STEP_PREFIX = tl.constexpr(step.STEP_PREFIX)
_STEP_EXTEND = tl.constexpr(step.STEP_EXTEND)
_STEP_INPUT_IDS = tl.constexpr(step.STEP_INPUT_IDS)
_STEP_POSITIONS = tl.constexpr(step.STEP_POSITIONS)
_STEP_LOC = tl.constexpr(step.STEP_LOC)
_STEP_EXPECTED = tl.constexpr(step.STEP_EXPECTED)
_STEP_OFFSETS = tl.constexpr(step.STEP_OFFSETS)
_STEP_SAMPLED = tl.constexpr(step.STEP_SAMPLED)
_STEP_SAMPLED_OFFSETS = tl.constexpr(step.STEP_SAMPLED_OFFSETS)
_STEP_EVENT = tl.constexpr(step.STEP_EVENT)
_STEP_FORWARD = tl.constexpr(step.STEP_FORWARD)
_STEP_SERIAL = tl.constexpr(step.STEP_SERIAL)
_STEP_UNKNOWN = tl.constexpr(step.STEP_UNKNOWN)
_STEP_SEARCH = tl.constexpr(step.STEP_SEARCH)
_STEP_GROUPS = tl.constexpr(step.STEP_GROUPS)
_STEP_GROUP_WORDS = tl.constexpr(step.STEP_GROUP_WORDS)
_GROUP_DIVERGENCE = tl.constexpr(step.GROUP_DIVERGENCE)
_MACHINE_GROUPS = tl.constexpr(step.MACHINE_GROUPS)
_MACHINE_TABLES = tl.constexpr(step.MACHINE_TABLES)
_MACHINE_TRUTH = tl.constexpr(step.MACHINE_TRUTH)
_MACHINE_TRUTH_ROWS = tl.constexpr(step.MACHINE_TRUTH_ROWS)
_MACHINE_TRUTH_WIDTH = tl.constexpr(step.MACHINE_TRUTH_WIDTH)
_POOLS_AT = tl.constexpr(step.POOLS_AT)
_POOL_WORDS = tl.constexpr(step.POOL_WORDS)
_POOL_TABLE = tl.constexpr(step.POOL_TABLE)
_POOL_TABLE_WIDTH = tl.constexpr(step.POOL_TABLE_WIDTH)
_POOL_WINDOW = tl.constexpr(step.POOL_WINDOW)
_POOL_LUT = tl.constexpr(step.POOL_LUT)
_POOL_LUT_LEN = tl.constexpr(step.POOL_LUT_LEN)
_POOL_SLOTS = tl.constexpr(step.POOL_SLOTS)
_POOL_RECORDS = tl.constexpr(step.POOL_RECORDS)
_POOL_STAMPS = tl.constexpr(step.POOL_STAMPS)
_POOL_WRITERS = tl.constexpr(step.POOL_WRITERS)
_POOL_UNKNOWN = tl.constexpr(step.POOL_UNKNOWN)
_POOL_FULL_STARTS = tl.constexpr(step.POOL_FULL_STARTS)
_POOL_HALVES = tl.constexpr(step.POOL_HALVES)
_POOL_HALF_WORDS = tl.constexpr(step.POOL_HALF_WORDS)
_TABLES_AT = tl.constexpr(step.TABLES_AT)
_TABLE_WORDS = tl.constexpr(step.TABLE_WORDS)
_FOUND_WORDS = tl.constexpr(step.FOUND_WORDS)


@triton.jit
def _log_writes(
    failed, number, piece, result, group, request, i, slot, position, token, expected, running, aux, REASON: tl.constexpr,
    ORDER: tl.constexpr,
):  # fmt: skip
    count = tl.sum(failed.to(tl.int64))
    if count > 0:
        place = tl.atomic_add(result + _RESULT_WRITE_ROWS, count) + tl.cumsum(failed.to(tl.int64), 0) - 1
        fits = failed & (place < tl.load(piece + _PIECE_WRITE_LOG_ROWS))  # room was seen to before the forward began
        out = words_at(tl.load(piece + _PIECE_WRITE_LOG)) + place * _FOUND_WORDS
        tl.store(out, i * 0 + number, mask=fits)
        tl.store(out + 1, i * 0 + group, mask=fits)
        tl.store(out + 2, request, mask=fits)
        tl.store(out + 3, i, mask=fits)
        tl.store(out + 4, slot, mask=fits)
        tl.store(out + 5, position, mask=fits)
        tl.store(out + 6, token, mask=fits)
        tl.store(out + 7, expected, mask=fits)
        tl.store(out + 8, running, mask=fits)
        tl.store(out + 9, aux, mask=fits)
        tl.store(out + 10, i * 0 + REASON, mask=fits)
        tl.store(out + 11, i * 0 + ORDER, mask=fits)


@triton.jit
def _write_tile(number, piece, result, at, pool, group, request, i, mask, learn):
    """Write the records of a tile of tokens in one group, and note what is wrong with them."""
    written = mask & (i < tl.load(at + _STEP_WRITTEN))
    stride = tl.load(piece + _PIECE_TOKEN_STRIDE)
    own = words_at(tl.load(piece + _PIECE_OWN)) + group * stride
    chain = words_at(tl.load(piece + _PIECE_CHAIN)) + group * stride
    slot = tl.load(own + i, mask=mask, other=-1)
    inside = mask & (slot >= 0) & (slot < tl.load(pool + _POOL_SLOTS))
    cell = tl.where(inside, slot, 0)
    written = written & inside
    position = tl.load(words_at(tl.load(at + _STEP_POSITIONS)) + i, mask=written, other=0)
    token = tl.load(words_at(tl.load(at + _STEP_INPUT_IDS)) + i, mask=written, other=0)
    running = tl.load(chain + i, mask=written, other=0)
    expected_at = tl.load(at + _STEP_EXPECTED)
    if expected_at != 0:
        expected = tl.load(words_at(expected_at) + i, mask=written, other=0)
        _log_writes(
            written & (token != expected), number, piece, result, group, request, i, slot, position, token, expected,
            running, position, _TOKEN, 0,
        )  # fmt: skip
    offsets = words_at(tl.load(at + _STEP_OFFSETS)) + request
    is_first = written & (tl.load(offsets, mask=written, other=0) - tl.load(at + _STEP_OFFSETS + 1) == i)
    seeds = words_at(tl.load(piece + _PIECE_SEEDS))
    seeds += 2 * (group * tl.load(piece + _PIECE_REQUEST_STRIDE) + request)
    seeded = tl.load(seeds, mask=written, other=0) != 0
    seed_position = tl.load(seeds + 1, mask=is_first, other=0)
    before = tl.load(words_at(tl.load(at + _STEP_POSITIONS)) + i - 1, mask=written & (i > 0), other=0)
    follows = tl.where(is_first, seed_position, before) + 1
    _log_writes(
        written & seeded & (position != follows), number, piece, result, group, request, i, slot, position, token, token,
        running, follows, _POSITION, 1,
    )  # fmt: skip
    stamps = words_at(tl.load(pool + _POOL_STAMPS))
    serial = tl.load(at + _STEP_SERIAL) << 32
    last = written & (tl.load(stamps + cell, mask=written, other=0) == (serial | i))
    record = words_at(tl.load(pool + _POOL_RECORDS)) + cell * 4
    tl.store(record, token, mask=last)
    tl.store(record + 1, position, mask=last)
    tl.store(record + 2, running, mask=last)
    carried = hash_chain(unsigned(running), unsigned(token), unsigned(position))
    tl.store(record + 3, signed(carried), mask=last)
    for half in range(2):
        half_at = pool + _POOL_HALVES + half * _POOL_HALF_WORDS
        stored_at = tl.load(half_at)
        if stored_at != 0:
            now = tl.load(words_at(tl.load(half_at + 1)) + cell, mask=last, other=0)
            tl.store(words_at(stored_at) + cell, now, mask=last)
    writers = words_at(tl.load(pool + _POOL_WRITERS)) + cell * 3
    tl.store(writers, i * 0 + tl.load(at + _STEP_EVENT), mask=last)
    tl.store(writers + 1, i * 0 + tl.load(at + _STEP_FORWARD), mask=last)
    ids = words_at(tl.load(at + _STEP_REQUEST_IDS))
    tl.store(writers + 2, tl.load(ids + request, mask=last, other=0), mask=last)
    if learn:
        unknown = tl.load(pool + _POOL_UNKNOWN).to(tl.pointer_type(tl.uint8))
        tl.store(unknown + cell, (i * 0).to(tl.uint8), mask=inside & (slot > 0))


@triton.jit
def _fill_tables(at, machine, request, i, mask):
    """Put a tile of the forward's own slots into every block table."""
    tokens = tl.load(at + _STEP_TOKENS)
    loc = words_at(tl.load(at + _STEP_LOC))
    row = tl.load(words_at(tl.load(at + _STEP_ROWS)) + request, mask=mask, other=0)
    begins = tl.load(words_at(tl.load(at + _STEP_OFFSETS)) + request, mask=mask, other=0)
    prefix = tl.load(words_at(tl.load(at + _STEP_PREFIX)) + request, mask=mask, other=0)
    position = prefix + i - (begins - tl.load(at + _STEP_OFFSETS + 1))
    for number in range(tl.load(machine + _MACHINE_TABLES)):
        table = machine + _TABLES_AT + number * _TABLE_WORDS
        width = tl.load(table + 2)
        inside = mask & (row > 0) & (row < tl.load(table + 1)) & (position >= 0) & (position < width)
        cell = tl.load(table).to(tl.pointer_type(tl.int32)) + tl.where(inside, row * width + position, 0)
        tl.store(cell, tl.load(loc + number * tokens + i, mask=inside, other=0).to(tl.int32), mask=inside)


@triton.jit
def _fill_truth(at, machine, requests, r):
    """Put what a tile of requests sampled into the truth tokens."""
    sampled_at = tl.load(at + _STEP_SAMPLED)
    truth_at = tl.load(machine + _MACHINE_TRUTH)
    if (sampled_at != 0) & (truth_at != 0):
        mask = r < requests
        offsets = words_at(tl.load(at + _STEP_SAMPLED_OFFSETS))
        base = tl.load(at + _STEP_SAMPLED_OFFSETS + 1)
        begin = tl.load(offsets + r, mask=mask, other=0) - base
        count = tl.load(offsets + r + 1, mask=mask, other=0) - base - begin
        row = tl.load(words_at(tl.load(at + _STEP_ROWS)) + r, mask=mask, other=0)
        first = tl.load(words_at(tl.load(at + _STEP_PREFIX)) + r, mask=mask, other=0)
        first += tl.maximum(tl.load(words_at(tl.load(at + _STEP_EXTEND)) + r, mask=mask, other=0), 0)
        width = tl.load(machine + _MACHINE_TRUTH_WIDTH)
        row_there = mask & (row > 0) & (row < tl.load(machine + _MACHINE_TRUTH_ROWS))
        truth = truth_at.to(tl.pointer_type(tl.int32))
        for j in range(tl.max(tl.where(mask, count, 0))):
            position = first + j
            inside = row_there & (j < count) & (position >= 0) & (position < width)
            token = tl.load(words_at(sampled_at) + begin + j, mask=inside, other=0)
            tl.store(truth + tl.where(inside, row * width + position, 0), token.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["ahead"])
def commit_kernel(root, ahead, TILE: tl.constexpr):
    """Carry the forward out, or halt before it."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    there, number, piece, result, at = current(root, ahead)
    if there:
        if is_stuck(piece, result):
            if program == 0:
                tl.store(root + 1, program + 1)
        else:
            requests = tl.load(at + _STEP_REQUESTS)
            tile = tl.arange(0, TILE).to(tl.int64)
            if requests > 0:
                machine = words_at(tl.load(at))
                tokens = tl.load(at + _STEP_TOKENS)
                written = tl.load(at + _STEP_WRITTEN)
                unknown_groups = tl.load(at + _STEP_UNKNOWN)
                offsets = words_at(tl.load(at + _STEP_OFFSETS))
                base = tl.load(at + _STEP_OFFSETS + 1)
                halvings = tl.load(at + _STEP_SEARCH)
                for start in range(program * TILE, tokens, programs * TILE):
                    i = start + tile
                    mask = i < tokens
                    request = request_of(offsets, base, requests, halvings, i)
                    request = tl.where(i < written, request, 0)
                    for group in range(tl.load(machine + _MACHINE_GROUPS)):
                        pool = machine + _POOLS_AT + group * _POOL_WORDS
                        learn = ((unknown_groups >> group) & 1) != 0
                        _write_tile(number, piece, result, at, pool, group, request, i, mask, learn)
                    _fill_tables(at, machine, request, i, mask & (i < written))
                for start in range(program * TILE, requests, programs * TILE):
                    _fill_truth(at, machine, requests, start + tile)
            if program == 0:
                tl.store(result + _RESULT_DONE, number + 1)


@triton.jit(do_not_specialize=["ahead"])
def divergence_kernel(root, ahead, TILE: tl.constexpr):
    """Count, in groups with a full-to-SWA table, cached positions without a slot there, and those of another index."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    there, number, piece, _, at = current(root, ahead)
    requests = tl.load(at + _STEP_REQUESTS, mask=there, other=0)
    if there & (requests > 0):
        machine = words_at(tl.load(at))
        halvings = tl.load(at + _STEP_SEARCH)
        for group in range(tl.load(machine + _MACHINE_GROUPS)):
            of_group = at + _STEP_GROUPS + group * _STEP_GROUP_WORDS + _GROUP_DIVERGENCE
            tiles = tl.load(of_group + 2)
            if tiles > 0:
                pool = machine + _POOLS_AT + group * _POOL_WORDS
                offsets = words_at(tl.load(of_group))
                base = tl.load(of_group + 1)
                width = tl.load(pool + _POOL_TABLE_WIDTH)
                lut = words_at(tl.load(pool + _POOL_LUT))
                lut_len = tl.load(pool + _POOL_LUT_LEN)
                none = tiles * 0
                other = tiles * 0
                for part in range(program, tiles, programs):
                    request = request_of(offsets, base, requests, halvings, part)
                    row = tl.load(words_at(tl.load(at + _STEP_ROWS)) + request)
                    prefix = tl.load(words_at(tl.load(at + _STEP_PREFIX)) + request)
                    extend = tl.maximum(tl.load(words_at(tl.load(at + _STEP_EXTEND)) + request), 0)
                    first = tl.maximum(prefix - tl.load(pool + _POOL_WINDOW) - 1, 0)
                    if tl.load(pool + _POOL_FULL_STARTS) != 0:
                        first = row * 0
                    part_of_request = part - (tl.load(offsets + request) - base)
                    position = first + part_of_request * TILE + tl.arange(0, TILE).to(tl.int64)
                    mask = position < tl.minimum(prefix + extend, width)
                    table = tl.load(pool + _POOL_TABLE).to(tl.pointer_type(tl.int32)) + row * width
                    slot = tl.load(table + position, mask=mask, other=-1).to(tl.int64)
                    mask = mask & (slot >= 0) & (slot < lut_len)
                    sliding = tl.load(lut + tl.where(mask, slot, 0), mask=mask, other=0)
                    none += tl.sum((mask & (sliding == 0)).to(tl.int64))
                    other += tl.sum((mask & (sliding != 0) & (sliding != slot)).to(tl.int64))
                stats = words_at(tl.load(piece + _PIECE_STATS)) + (number * _MAX_GROUPS + group) * _STAT_WORDS
                if none > 0:
                    tl.atomic_add(stats + _STAT_OUT_OF_WINDOW, none)
                if other > 0:
                    tl.atomic_add(stats + _STAT_OUT_OF_WINDOW + 1, other)
