"""The middle of a step: plan and verify of all a forward's buffers in one pass, and beside it the chains of what it writes.

HEAD and TAIL, K and V hold the same token, position and chain hash in every slot, so that each is looked at once; only
the KV hashes are each half's own. Entries never meet memory: an entry is found, judged, and forgotten unless it fails.
"""

import triton
import triton.language as tl

from ..constants import UNKNOWN_TOKEN, VERIFY_CHAIN_HASH, VERIFY_POSITION, VERIFY_TOKEN
from ..ops.hash.triton import CHAIN_SEED, hash_chain, signed, unsigned
from . import step
from .step_prepare import current, request_of, through_lut, words_at

_CHAIN_HASH = tl.constexpr(VERIFY_CHAIN_HASH)
_POSITION = tl.constexpr(VERIFY_POSITION)
_TOKEN = tl.constexpr(VERIFY_TOKEN)
_UNKNOWN_TOKEN = tl.constexpr(UNKNOWN_TOKEN)

_PIECE_STATS = tl.constexpr(step.PIECE_STATS)
_PIECE_LOG = tl.constexpr(step.PIECE_LOG)
_PIECE_LOG_ROWS = tl.constexpr(step.PIECE_LOG_ROWS)
_PIECE_CHAIN = tl.constexpr(step.PIECE_CHAIN)
_PIECE_TOKEN_STRIDE = tl.constexpr(step.PIECE_TOKEN_STRIDE)
_PIECE_SEEDS = tl.constexpr(step.PIECE_SEEDS)
_PIECE_REQUEST_STRIDE = tl.constexpr(step.PIECE_REQUEST_STRIDE)
_RESULT_ROWS = tl.constexpr(step.RESULT_ROWS)
_RESULT_HOST = tl.constexpr(step.RESULT_HOST)
_STAT_UNKNOWN = tl.constexpr(step.STAT_UNKNOWN)
_STAT_WORDS = tl.constexpr(step.STAT_WORDS)
_MAX_GROUPS = tl.constexpr(step.MAX_GROUPS)
_STEP_REQUESTS = tl.constexpr(step.STEP_REQUESTS)
_STEP_ROWS = tl.constexpr(step.STEP_ROWS)
_STEP_PREFIX = tl.constexpr(step.STEP_PREFIX)
_STEP_TRUTH_LENS = tl.constexpr(step.STEP_TRUTH_LENS)
_STEP_INPUT_IDS = tl.constexpr(step.STEP_INPUT_IDS)
_STEP_POSITIONS = tl.constexpr(step.STEP_POSITIONS)
_STEP_OFFSETS = tl.constexpr(step.STEP_OFFSETS)
_STEP_SERIAL = tl.constexpr(step.STEP_SERIAL)
_STEP_UNKNOWN = tl.constexpr(step.STEP_UNKNOWN)
_STEP_SEARCH = tl.constexpr(step.STEP_SEARCH)
_STEP_GROUPS = tl.constexpr(step.STEP_GROUPS)
_STEP_GROUP_WORDS = tl.constexpr(step.STEP_GROUP_WORDS)
_MACHINE_GROUPS = tl.constexpr(step.MACHINE_GROUPS)
_MACHINE_TRUTH = tl.constexpr(step.MACHINE_TRUTH)
_MACHINE_TRUTH_WIDTH = tl.constexpr(step.MACHINE_TRUTH_WIDTH)
_MACHINE_TOKEN_OFFSET = tl.constexpr(step.MACHINE_TOKEN_OFFSET)
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
_POOL_HALVES = tl.constexpr(step.POOL_HALVES)
_POOL_HALF_WORDS = tl.constexpr(step.POOL_HALF_WORDS)
_FOUND_WORDS = tl.constexpr(step.FOUND_WORDS)


@triton.jit
def _half_differs(pool, half, slot, mask):
    """Where a half's bytes are not those that its TAIL record was written with."""
    at = pool + _POOL_HALVES + half * _POOL_HALF_WORDS
    stored_at = tl.load(at)
    differs = slot < 0
    if stored_at != 0:
        stored = tl.load(words_at(stored_at) + slot, mask=mask, other=0)
        differs = mask & (stored != tl.load(words_at(tl.load(at + 1)) + slot, mask=mask, other=0))
    return differs


@triton.jit
def _verify_tile(number, piece, result, at, machine, pool, group, request, part, check_unknown, TILE: tl.constexpr):
    """Judge a tile of one request's prefix in one group."""
    row = tl.load(words_at(tl.load(at + _STEP_ROWS)) + request)
    width = tl.load(pool + _POOL_TABLE_WIDTH)
    prefix = tl.minimum(tl.load(words_at(tl.load(at + _STEP_PREFIX)) + request), width)
    window = tl.load(pool + _POOL_WINDOW)
    first = row * 0
    if window > 0:
        first = tl.maximum(prefix - window, 0)
    position = first + part * TILE + tl.arange(0, TILE).to(tl.int64)
    mask = position < prefix
    table = tl.load(pool + _POOL_TABLE).to(tl.pointer_type(tl.int32)) + row * width
    lut_at = tl.load(pool + _POOL_LUT)
    lut_len = tl.load(pool + _POOL_LUT_LEN)
    has_prev = mask & (position > 0)
    slot = tl.load(table + position, mask=mask, other=0).to(tl.int64)
    prev = tl.load(table + position - 1, mask=has_prev, other=-1).to(tl.int64)
    slot = through_lut(slot, mask, lut_at, lut_len)
    prev = through_lut(prev, has_prev, lut_at, lut_len)
    num_slots = tl.load(pool + _POOL_SLOTS)
    strange = mask & ((slot < 0) | (slot >= num_slots) | (prev >= num_slots))
    if tl.sum(strange.to(tl.int32)) > 0:  # for the host to explain
        tl.store(result + _RESULT_HOST, row * 0 + 1)
    slot = tl.where(mask & ~strange, slot, 0)
    prev = tl.where(strange, 0, prev)
    if check_unknown:
        unknown = tl.load(pool + _POOL_UNKNOWN).to(tl.pointer_type(tl.uint8))
        lost = mask & (tl.load(unknown + slot, mask=mask, other=0) != 0)
        before = (prev > 0) & (tl.load(unknown + tl.maximum(prev, 0), mask=prev > 0, other=0) != 0)
        left_out = tl.sum(lost.to(tl.int64))
        if left_out > 0:
            stats = words_at(tl.load(piece + _PIECE_STATS)) + (number * _MAX_GROUPS + group) * _STAT_WORDS
            tl.atomic_add(stats + _STAT_UNKNOWN, left_out)
        slot = tl.where(lost, 0, slot)
        prev = tl.where(before, 0, prev)
    looked = slot != 0
    records = words_at(tl.load(pool + _POOL_RECORDS))
    token = tl.load(records + slot * 4, mask=looked, other=0)
    stored_position = tl.load(records + slot * 4 + 1, mask=looked, other=0)
    prev_hash = tl.load(records + slot * 4 + 2, mask=looked, other=0)
    chained = tl.load(records + tl.maximum(prev, 0) * 4 + 3, mask=looked & (prev > 0), other=0)
    seed = signed(tl.full([TILE], CHAIN_SEED, tl.uint64))
    expected_hash = tl.where(prev > 0, chained, tl.where(prev < 0, seed, prev_hash))
    expected_token = position * 0 + _UNKNOWN_TOKEN
    truth_lens = tl.load(at + _STEP_TRUTH_LENS)
    if truth_lens != 0:
        place = position + tl.load(machine + _MACHINE_TOKEN_OFFSET)
        known = looked & (place < tl.load(words_at(truth_lens) + request))
        truth = tl.load(machine + _MACHINE_TRUTH).to(tl.pointer_type(tl.int32))
        truth += row * tl.load(machine + _MACHINE_TRUTH_WIDTH)
        expected_token = tl.load(truth + place, mask=known, other=_UNKNOWN_TOKEN).to(tl.int64)
        agree = (token == _UNKNOWN_TOKEN) | (token.to(tl.int32).to(tl.int64) == expected_token)
        expected_token = tl.where((expected_token != _UNKNOWN_TOKEN) & agree, token, expected_token)
    reason = tl.where(looked & (prev_hash != expected_hash), _CHAIN_HASH, 0)
    reason |= tl.where(looked & (stored_position != position), _POSITION, 0)
    reason |= tl.where(looked & (expected_token != _UNKNOWN_TOKEN) & (token != expected_token), _TOKEN, 0)
    kv = tl.where(_half_differs(pool, 0, slot, looked), 1, 0) | tl.where(_half_differs(pool, 1, slot, looked), 2, 0)
    failed = (reason | kv) != 0
    count = tl.sum(failed.to(tl.int64))
    if count > 0:
        place = tl.atomic_add(result + _RESULT_ROWS, count) + tl.cumsum(failed.to(tl.int64), 0) - 1
        fits = failed & (place < tl.load(piece + _PIECE_LOG_ROWS))
        out = words_at(tl.load(piece + _PIECE_LOG)) + place * _FOUND_WORDS
        writers = words_at(tl.load(pool + _POOL_WRITERS)) + slot * 3
        zero = position * 0
        tl.store(out, zero + number, mask=fits)
        tl.store(out + 1, zero + group, mask=fits)
        tl.store(out + 2, zero + request, mask=fits)
        tl.store(out + 3, position, mask=fits)
        tl.store(out + 4, slot, mask=fits)
        tl.store(out + 5, token, mask=fits)
        tl.store(out + 6, stored_position, mask=fits)
        tl.store(out + 7, prev_hash, mask=fits)
        tl.store(out + 8, expected_hash, mask=fits)
        tl.store(out + 9, expected_token, mask=fits)
        tl.store(out + 10, reason.to(tl.int64), mask=fits)
        tl.store(out + 11, kv.to(tl.int64), mask=fits)
        for word in range(3):
            tl.store(out + 12 + word, tl.load(writers + word, mask=fits, other=0), mask=fits)


@triton.jit
def _chain(piece, result, at, pool, group, request, check_unknown, AHEAD: tl.constexpr):
    """Walk one request's new tokens, strictly in order: the chain hash that each one's record gets."""
    offsets = words_at(tl.load(at + _STEP_OFFSETS)) + request
    base = tl.load(at + _STEP_OFFSETS + 1)
    begin = tl.load(offsets) - base
    end = tl.load(offsets + 1) - base
    if end > begin:
        row = tl.load(words_at(tl.load(at + _STEP_ROWS)) + request)
        prefix = tl.load(words_at(tl.load(at + _STEP_PREFIX)) + request)
        seed = row * 0 - 1
        if prefix > 0:
            table = tl.load(pool + _POOL_TABLE).to(tl.pointer_type(tl.int32))
            seed = tl.load(table + row * tl.load(pool + _POOL_TABLE_WIDTH) + prefix - 1).to(tl.int64)
            lut_at = tl.load(pool + _POOL_LUT)
            lut_len = tl.load(pool + _POOL_LUT_LEN)
            if lut_at != 0:
                if seed >= lut_len:
                    tl.store(result + _RESULT_HOST, row * 0 + 1)
                    seed = row * 0 - 1
                elif seed >= 0:
                    seed = tl.load(words_at(lut_at) + seed)
            if seed >= tl.load(pool + _POOL_SLOTS):
                tl.store(result + _RESULT_HOST, row * 0 + 1)
                seed = row * 0 - 1
            if check_unknown:
                if seed == 0:
                    seed = row * 0 - 1
                elif seed > 0:
                    unknown = tl.load(pool + _POOL_UNKNOWN).to(tl.pointer_type(tl.uint8))
                    if tl.load(unknown + seed) != 0:
                        seed = row * 0 - 1
        last_position = row * 0
        running = tl.full([], CHAIN_SEED, tl.uint64)
        if seed >= 0:
            # A seed that this very forward writes has two values; which one counts is for the host to see.
            stamp = tl.load(words_at(tl.load(pool + _POOL_STAMPS)) + seed)
            if (stamp >> 32) == tl.load(at + _STEP_SERIAL):
                tl.store(result + _RESULT_HOST, row * 0 + 1)
            records = words_at(tl.load(pool + _POOL_RECORDS)) + seed * 4
            last_position = tl.load(records + 1)
            running = unsigned(tl.load(records + 3))
        seeds = words_at(tl.load(piece + _PIECE_SEEDS))
        seeds += 2 * (group * tl.load(piece + _PIECE_REQUEST_STRIDE) + request)
        tl.store(seeds, (seed >= 0).to(tl.int64))
        tl.store(seeds + 1, last_position)
        ids = words_at(tl.load(at + _STEP_INPUT_IDS))
        positions = words_at(tl.load(at + _STEP_POSITIONS))
        out = words_at(tl.load(piece + _PIECE_CHAIN)) + group * tl.load(piece + _PIECE_TOKEN_STRIDE)
        if AHEAD:
            # Four tokens are read while the four before them are hashed.
            t0, p0 = _token(ids, positions, begin, end)
            t1, p1 = _token(ids, positions, begin + 1, end)
            t2, p2 = _token(ids, positions, begin + 2, end)
            t3, p3 = _token(ids, positions, begin + 3, end)
            for i in range(begin, end, 4):
                n0, q0 = _token(ids, positions, i + 4, end)
                n1, q1 = _token(ids, positions, i + 5, end)
                n2, q2 = _token(ids, positions, i + 6, end)
                n3, q3 = _token(ids, positions, i + 7, end)
                tl.store(out + i, signed(running))
                running = hash_chain(running, t0, p0)
                tl.store(out + i + 1, signed(running), mask=i + 1 < end)
                running = hash_chain(running, t1, p1)
                tl.store(out + i + 2, signed(running), mask=i + 2 < end)
                running = hash_chain(running, t2, p2)
                tl.store(out + i + 3, signed(running), mask=i + 3 < end)
                running = hash_chain(running, t3, p3)
                t0, t1, t2, t3 = n0, n1, n2, n3
                p0, p1, p2, p3 = q0, q1, q2, q3
        else:
            for i in range(begin, end):
                tl.store(out + i, signed(running))
                token, position = _token(ids, positions, i, end)
                running = hash_chain(running, token, position)


@triton.jit
def _token(ids, positions, i, end):
    token = tl.load(ids + i, mask=i < end, other=0)
    return unsigned(token), unsigned(tl.load(positions + i, mask=i < end, other=0))


@triton.jit(do_not_specialize=["ahead"])
def judge_kernel(root, ahead, chain_programs, AHEAD: tl.constexpr, TILE: tl.constexpr):
    """Verify every entry that the forward reads; the first programs walk the chains of what it writes.

    `AHEAD` has them read tokens before they are needed, which the interpreter would only take longer for.
    """
    program = tl.program_id(0).to(tl.int64)
    there, number, piece, result, at = current(root, ahead)
    requests = tl.load(at + _STEP_REQUESTS, mask=there, other=0)
    if there & (requests > 0):
        machine = words_at(tl.load(at))
        unknown_groups = tl.load(at + _STEP_UNKNOWN)
        for group in range(tl.load(machine + _MACHINE_GROUPS)):
            pool = machine + _POOLS_AT + group * _POOL_WORDS
            check_unknown = ((unknown_groups >> group) & 1) != 0
            if program < chain_programs:
                for request in range(program, requests, chain_programs):
                    _chain(piece, result, at, pool, group, request, check_unknown, AHEAD)
            else:
                of_group = at + _STEP_GROUPS + group * _STEP_GROUP_WORDS
                offsets = words_at(tl.load(of_group))
                base = tl.load(of_group + 1)
                tiles = tl.load(of_group + 2)
                halvings = tl.load(at + _STEP_SEARCH)
                programs = tl.num_programs(0).to(tl.int64) - chain_programs
                for part in range(program - chain_programs, tiles, programs):
                    request = request_of(offsets, base, requests, halvings, part)
                    first = tl.load(offsets + request) - base
                    _verify_tile(
                        number, piece, result, at, machine, pool, group, request, part - first, check_unknown, TILE
                    )
