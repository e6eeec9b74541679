"""The first kernels of a step: what the event changes, which slots the forward writes, and the bytes that land in them."""

import triton
import triton.language as tl

from ..constants import SLOT_OUT_OF_RANGE
from ..ops.hash.triton import hash_word, signed, unsigned
from . import step

_OUT_OF_RANGE = tl.constexpr(SLOT_OUT_OF_RANGE)

_PIECE_STEPS = tl.constexpr(step.PIECE_STEPS)
_PIECE_RESULT = tl.constexpr(step.PIECE_RESULT)
_PIECE_LOG_ROWS = tl.constexpr(step.PIECE_LOG_ROWS)
_PIECE_WRITE_LOG_ROWS = tl.constexpr(step.PIECE_WRITE_LOG_ROWS)
_PIECE_OWN = tl.constexpr(step.PIECE_OWN)
_PIECE_TOKEN_STRIDE = tl.constexpr(step.PIECE_TOKEN_STRIDE)
_RESULT_ROWS = tl.constexpr(step.RESULT_ROWS)
_RESULT_WRITE_ROWS = tl.constexpr(step.RESULT_WRITE_ROWS)
_RESULT_HOST = tl.constexpr(step.RESULT_HOST)
_RESULT_FULL = tl.constexpr(step.RESULT_FULL)
_STEP_REQUESTS = tl.constexpr(step.STEP_REQUESTS)
_STEP_TOKENS = tl.constexpr(step.STEP_TOKENS)
_STEP_WRITTEN = tl.constexpr(step.STEP_WRITTEN)
_STEP_ROWS = tl.constexpr(step.STEP_ROWS)
_STEP_LOC = tl.constexpr(step.STEP_LOC)
_STEP_KV = tl.constexpr(step.STEP_KV)
_STEP_SERIAL = tl.constexpr(step.STEP_SERIAL)
_STEP_CELLS = tl.constexpr(step.STEP_CELLS)
_STEP_LUT_CELLS = tl.constexpr(step.STEP_LUT_CELLS)
_STEP_KV_CHANGES = tl.constexpr(step.STEP_KV_CHANGES)
_STEP_KV_WORDS = tl.constexpr(step.STEP_KV_WORDS)
_STEP_WORDS = tl.constexpr(step.STEP_WORDS)
_MACHINE_GROUPS = tl.constexpr(step.MACHINE_GROUPS)
_MACHINE_STREAMS = tl.constexpr(step.MACHINE_STREAMS)
_MACHINE_ROW_STAMPS = tl.constexpr(step.MACHINE_ROW_STAMPS)
_MACHINE_NUM_ROW_STAMPS = tl.constexpr(step.MACHINE_NUM_ROW_STAMPS)
_POOLS_AT = tl.constexpr(step.POOLS_AT)
_POOL_WORDS = tl.constexpr(step.POOL_WORDS)
_POOL_TABLE_INDEX = tl.constexpr(step.POOL_TABLE_INDEX)
_POOL_LUT = tl.constexpr(step.POOL_LUT)
_POOL_LUT_LEN = tl.constexpr(step.POOL_LUT_LEN)
_POOL_SLOTS = tl.constexpr(step.POOL_SLOTS)
_POOL_STAMPS = tl.constexpr(step.POOL_STAMPS)
_POOL_ALL_STAMPS = tl.constexpr(step.POOL_ALL_STAMPS)
_POOL_RING = tl.constexpr(step.POOL_RING)
_POOL_HALVES = tl.constexpr(step.POOL_HALVES)
_POOL_HALF_WORDS = tl.constexpr(step.POOL_HALF_WORDS)
_STREAMS_AT = tl.constexpr(step.STREAMS_AT)
_STREAM_WORDS = tl.constexpr(step.STREAM_WORDS)
_STREAM_SLOT_WORDS = tl.constexpr(step.STREAM_SLOT_WORDS)
_STREAM_GROUP = tl.constexpr(step.STREAM_GROUP)
_STREAM_HALF = tl.constexpr(step.STREAM_HALF)
_STREAM_BEFORE = tl.constexpr(step.STREAM_BEFORE)
_STREAM_HASHED = tl.constexpr(step.STREAM_HASHED)


@triton.jit
def words_at(address):
    """What lies at an address, as 64-bit words."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def current(root, ahead):
    """Whether there is a step to take, its number, its piece, what the piece leaves behind, and its descriptor."""
    piece = words_at(tl.load(root))
    result = words_at(tl.load(piece + _PIECE_RESULT))
    number = tl.load(result) + ahead
    there = (tl.load(root + 1) == 0) & (number < tl.load(piece + _PIECE_STEPS))
    return there, number, piece, result, words_at(tl.load(piece)) + number * _STEP_WORDS


@triton.jit
def is_stuck(piece, result):
    """Whether this step cannot be committed; settled once verify has run."""
    full = tl.load(result + _RESULT_ROWS) > tl.load(piece + _PIECE_LOG_ROWS)
    return full | (tl.load(result + _RESULT_HOST) != 0) | (tl.load(result + _RESULT_FULL) != 0)


@triton.jit
def request_of(offsets, base, requests, halvings, wanted):
    """The last request that begins at or before each place; `offsets` are prefix sums over the requests."""
    low = wanted * 0
    high = low + requests
    for _ in range(halvings):
        middle = (low + high) // 2
        begins = tl.load(offsets + tl.minimum(middle, requests)) - base
        right = (middle < requests) & (begins <= wanted)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def through_lut(slots, mask, lut_at, lut_len):
    """Slots in a pool's own numbering; negative ones pass, what the table does not have becomes out of range."""
    found = slots
    if lut_at != 0:
        inside = mask & (slots >= 0) & (slots < lut_len)
        there = tl.load(words_at(lut_at) + tl.where(inside, slots, 0), mask=inside, other=0)
        found = tl.where(inside, there, tl.where(slots >= lut_len, _OUT_OF_RANGE, slots))
    return found


@triton.jit
def _stamp(program, programs, piece, result, at, pool, group, TILE: tl.constexpr):
    """Find the slots of a group that the forward writes; the last token of each slot leaves its mark there."""
    tile = tl.arange(0, TILE).to(tl.int64)
    tokens = tl.load(at + _STEP_TOKENS)
    written = tl.load(at + _STEP_WRITTEN)
    serial = tl.load(at + _STEP_SERIAL) << 32
    loc = words_at(tl.load(at + _STEP_LOC)) + tl.load(pool + _POOL_TABLE_INDEX) * tokens
    own = words_at(tl.load(piece + _PIECE_OWN)) + group * tl.load(piece + _PIECE_TOKEN_STRIDE)
    num_slots = tl.load(pool + _POOL_SLOTS)
    lut_at = tl.load(pool + _POOL_LUT)
    lut_len = tl.load(pool + _POOL_LUT_LEN)
    stamps = words_at(tl.load(pool + _POOL_STAMPS))
    all_stamps = words_at(tl.load(pool + _POOL_ALL_STAMPS))
    for start in range(program * TILE, tokens, programs * TILE):
        i = start + tile
        mask = i < tokens
        slot = through_lut(tl.load(loc + i, mask=mask, other=0), mask, lut_at, lut_len)
        tl.store(own + i, slot, mask=mask)
        inside = mask & (slot >= 0) & (slot < num_slots)
        cell = tl.where(inside, slot, 0)
        tl.atomic_max(stamps + cell, serial | i, mask=inside & (i < written))
        if tokens != written:
            tl.atomic_max(all_stamps + cell, serial | i, mask=inside)
        strange = mask & (i < written) & ~inside
        if tl.sum(strange.to(tl.int32)) > 0:
            tl.store(result + _RESULT_HOST, serial * 0 + 1)


@triton.jit(do_not_specialize=["ahead"])
def change_kernel(root, ahead, TILE: tl.constexpr):
    """Put the event's changes into the tables, and stamp the slots written of groups without a full-to-SWA table."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    there, _, piece, result, at = current(root, ahead)
    if there:
        tile = tl.arange(0, TILE).to(tl.int64)
        cells = words_at(tl.load(at + _STEP_CELLS))
        count = tl.load(at + _STEP_CELLS + 1)
        for start in range(program * TILE, count, programs * TILE):
            i = start + tile
            mask = i < count
            cell = tl.load(cells + 2 * i, mask=mask, other=0).to(tl.pointer_type(tl.int32))
            tl.store(cell, tl.load(cells + 2 * i + 1, mask=mask, other=0).to(tl.int32), mask=mask)
        cells = words_at(tl.load(at + _STEP_LUT_CELLS))
        count = tl.load(at + _STEP_LUT_CELLS + 1)
        for start in range(program * TILE, count, programs * TILE):
            i = start + tile
            mask = i < count
            entry = tl.load(cells + 2 * i, mask=mask, other=0).to(tl.pointer_type(tl.int64))
            tl.store(entry, tl.load(cells + 2 * i + 1, mask=mask, other=0), mask=mask)
        requests = tl.load(at + _STEP_REQUESTS)
        if requests > 0:
            machine = words_at(tl.load(at))
            rows = words_at(tl.load(at + _STEP_ROWS))
            row_stamps = words_at(tl.load(machine + _MACHINE_ROW_STAMPS))
            num_rows = tl.load(machine + _MACHINE_NUM_ROW_STAMPS)
            serial = tl.load(at + _STEP_SERIAL) << 32
            for start in range(program * TILE, requests, programs * TILE):
                r = start + tile
                row = tl.load(rows + r, mask=r < requests, other=0)
                inside = (row > 0) & (row < num_rows)
                before = tl.atomic_max(row_stamps + tl.where(inside, row, 0), serial | r, mask=inside)
                if tl.sum((inside & (before >= serial)).to(tl.int32)) > 0:  # two requests on one row
                    tl.store(result + _RESULT_HOST, serial * 0 + 1)
            for group in range(tl.load(machine + _MACHINE_GROUPS)):
                pool = machine + _POOLS_AT + group * _POOL_WORDS
                if tl.load(pool + _POOL_LUT) == 0:
                    _stamp(program, programs, piece, result, at, pool, group, TILE)


@triton.jit(do_not_specialize=["ahead"])
def translate_kernel(root, ahead, TILE: tl.constexpr):
    """Stamp the slots written of groups with a full-to-SWA table, whose changes have landed."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    there, _, piece, result, at = current(root, ahead)
    requests = tl.load(at + _STEP_REQUESTS, mask=there, other=0)
    if there & (requests > 0):
        machine = words_at(tl.load(at))
        for group in range(tl.load(machine + _MACHINE_GROUPS)):
            pool = machine + _POOLS_AT + group * _POOL_WORDS
            if tl.load(pool + _POOL_LUT) != 0:
                _stamp(program, programs, piece, result, at, pool, group, TILE)


@triton.jit
def _store_bytes(i, mask, at, machine, pool, group, half, slot, tokens):
    """Put the bytes of a tile of tokens into the streams of one half; what the half's bytes then hash to."""
    kv = words_at(tl.load(at + _STEP_KV))
    total = unsigned(slot * 0)
    for number in range(tl.load(machine + _MACHINE_STREAMS)):
        stream = machine + _STREAMS_AT + number * _STREAM_WORDS
        if (tl.load(stream + _STREAM_GROUP) == group) & (tl.load(stream + _STREAM_HALF) == half):
            words = tl.load(stream + _STREAM_SLOT_WORDS)
            here = words_at(tl.load(stream)) + slot * words
            data = kv + tl.load(stream + _STREAM_BEFORE) * tokens + i * words
            read = tl.load(stream + _STREAM_HASHED)
            acc = unsigned(slot * 0)
            for word in range(words):
                content = tl.load(data + word, mask=mask, other=0)
                tl.store(here + word, content, mask=mask)
                if word < read:
                    acc = hash_word(acc ^ unsigned(content))
            total = hash_word(total ^ acc)
    now_at = tl.load(pool + _POOL_HALVES + half * _POOL_HALF_WORDS + 1)
    if now_at != 0:
        tl.store(words_at(now_at) + slot, signed(total), mask=mask)


@triton.jit(do_not_specialize=["ahead"])
def store_kernel(root, ahead, RING: tl.constexpr, TILE: tl.constexpr):
    """Put the forward's bytes into its slots and hash them; with `RING` into ring buffers, which were read before."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    there, _, piece, result, at = current(root, ahead)
    if there:
        tile = tl.arange(0, TILE).to(tl.int64)
        machine = words_at(tl.load(at))
        tokens = tl.load(at + _STEP_TOKENS)
        written = tl.load(at + _STEP_WRITTEN)
        serial = tl.load(at + _STEP_SERIAL) << 32
        groups = tl.load(machine + _MACHINE_GROUPS)
        if RING:
            if is_stuck(piece, result):
                groups = groups * 0
        elif program == 0:
            rows = tl.load(result + _RESULT_WRITE_ROWS) + 2 * written * groups
            if rows > tl.load(piece + _PIECE_WRITE_LOG_ROWS):
                tl.store(result + _RESULT_FULL, serial * 0 + 1)
        for start in range(program * TILE, tokens, programs * TILE):
            i = start + tile
            mask = i < tokens
            for group in range(groups):
                pool = machine + _POOLS_AT + group * _POOL_WORDS
                if (tl.load(pool + _POOL_RING) != 0) == RING:
                    own = words_at(tl.load(piece + _PIECE_OWN)) + group * tl.load(piece + _PIECE_TOKEN_STRIDE)
                    slot = tl.load(own + i, mask=mask, other=-1)
                    inside = (slot >= 0) & (slot < tl.load(pool + _POOL_SLOTS))
                    stamps = tl.load(pool + _POOL_STAMPS)
                    if tokens != written:
                        stamps = tl.load(pool + _POOL_ALL_STAMPS)
                    slot = tl.where(inside, slot, 0)
                    last = tl.load(words_at(stamps) + slot, mask=inside, other=0)
                    last_of_slot = inside & (last == (serial | i))
                    for half in range(2):
                        _store_bytes(i, last_of_slot, at, machine, pool, group, half, slot, tokens)


@triton.jit(do_not_specialize=["ahead"])
def kv_change_kernel(root, ahead, PHASE: tl.constexpr, TILE: tl.constexpr):
    """Put bytes that were seen to change before (0) or after (1) the forward into the pools."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    there, _, _, _, at = current(root, ahead)
    if there:
        tile = tl.arange(0, TILE).to(tl.int64)
        machine = words_at(tl.load(at))
        changes = words_at(tl.load(at + _STEP_KV_CHANGES + PHASE * _STEP_KV_WORDS))
        count = tl.load(at + _STEP_KV_CHANGES + PHASE * _STEP_KV_WORDS + 1)
        for start in range(program * TILE, count, programs * TILE):
            i = start + tile
            mask = i < count
            stream = machine + _STREAMS_AT + tl.load(changes + 3 * i, mask=mask, other=0) * _STREAM_WORDS
            slot = tl.load(changes + 3 * i + 1, mask=mask, other=0)
            data = tl.load(changes + 3 * i + 2, mask=mask, other=0).to(tl.pointer_type(tl.int64))
            words = tl.load(stream + _STREAM_SLOT_WORDS, mask=mask, other=0)
            here = tl.load(stream, mask=mask, other=0).to(tl.pointer_type(tl.int64)) + slot * words
            for word in range(tl.max(words)):
                part = mask & (word < words)
                tl.store(here + word, tl.load(data + word, mask=part, other=0), mask=part)


@triton.jit(do_not_specialize=["ahead"])
def kv_fold_kernel(root, ahead, PHASE: tl.constexpr, TILE: tl.constexpr):
    """Hash the slots anew whose bytes changed."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    there, _, _, _, at = current(root, ahead)
    if there:
        tile = tl.arange(0, TILE).to(tl.int64)
        machine = words_at(tl.load(at))
        changed = words_at(tl.load(at + _STEP_KV_CHANGES + PHASE * _STEP_KV_WORDS + 2))
        count = tl.load(at + _STEP_KV_CHANGES + PHASE * _STEP_KV_WORDS + 3)
        for start in range(program * TILE, count, programs * TILE):
            i = start + tile
            mask = i < count
            of_group = tl.load(changed + 2 * i, mask=mask, other=-1)
            slot = tl.load(changed + 2 * i + 1, mask=mask, other=0)
            for group in range(tl.load(machine + _MACHINE_GROUPS)):
                mine = of_group == group
                for half in range(2):
                    total = unsigned(slot * 0)
                    for number in range(tl.load(machine + _MACHINE_STREAMS)):
                        stream = machine + _STREAMS_AT + number * _STREAM_WORDS
                        if (tl.load(stream + _STREAM_GROUP) == group) & (tl.load(stream + _STREAM_HALF) == half):
                            here = words_at(tl.load(stream)) + slot * tl.load(stream + _STREAM_SLOT_WORDS)
                            acc = unsigned(slot * 0)
                            for word in range(tl.load(stream + _STREAM_HASHED)):
                                acc = hash_word(acc ^ unsigned(tl.load(here + word, mask=mine, other=0)))
                            total = hash_word(total ^ acc)
                    half_at = machine + _POOLS_AT + group * _POOL_WORDS + _POOL_HALVES + half * _POOL_HALF_WORDS
                    now_at = tl.load(half_at + 1)
                    if now_at != 0:
                        tl.store(words_at(now_at) + slot, signed(total), mask=mine)


@triton.jit(do_not_specialize=["steps"])
def move_on_kernel(root, steps):
    """Count the steps of a captured run as taken."""
    result = words_at(tl.load(words_at(tl.load(root)) + _PIECE_RESULT))
    tl.store(result, tl.load(result) + steps)
