"""The kernels that fill frames: two launches a forward, no matter how many requests, tokens, groups and streams.

Addresses come from a descriptor in device memory (`frames.RunnerOnDevice.descriptor`), so that a launch passes what
changes from forward to forward and nothing else. Programs of one launch do two kinds of work, told apart by their
number: the first go along the tokens, the others along the requests' prefixes. The last word of a flight's counters says
how many programs of both kernels have ended, so that nobody has to record an event. `frame_launch` launches them.
"""

import triton
import triton.language as tl

from .frames import NUM_COUNTERS, UNCHANGED

# One form for all values and alignments: a new form is compiled on the engine's thread. Only dtypes make another.
# What changes from forward to forward comes first, then what a layout fixes: `frame_launch` relies on the order.
TAKE_DOWN_ARGUMENTS = [
    "rows_in", "prefix_in", "minus_in", "extend_in", "ids_in", "positions_in", "loc_in",
    "at", "flight", "forward", "num_loc", "num_prefix", "extend_each",
    "frames", "counters", "descriptor", "bs", "num_tokens", "table_at", "table_capacity", "lut_at", "lut_capacity",
    "token_programs", "splits",
]  # fmt: skip
TAKE_BACK_ARGUMENTS = [
    "at", "flight", "next_flight", "forward",
    "frames", "counters", "descriptor", "bs", "num_tokens", "kv_at", "kv_capacity", "kv_entry", "token_programs",
    "watch_programs", "splits",
]  # fmt: skip

# Places in the descriptor, as `frames` lays it out.
_GROUPS_AT = tl.constexpr(16)
_GROUP_WORDS = tl.constexpr(8)
_LUTS_AT = tl.constexpr(48)
_LUT_WORDS = tl.constexpr(4)
_STREAMS_AT = tl.constexpr(64)
_STREAM_WORDS = tl.constexpr(8)
_UNCHANGED = tl.constexpr(UNCHANGED)
_NUM_COUNTERS = tl.constexpr(NUM_COUNTERS)


@triton.jit
def _look_up(lut, slots, mask, length):
    """Slots through a full-to-SWA table, -1 where it has no entry."""
    inside = mask & (slots >= 0) & (slots < length)
    return tl.load(lut + tl.where(inside, slots, 0), mask=inside, other=-1).to(tl.int64)


@triton.jit
def _through_shadow(descriptor, group, slots, mask):
    """Slots in a group's own numbering, as the replay will translate them."""
    lut = tl.load(descriptor + _GROUPS_AT + group * _GROUP_WORDS + 1)
    if lut >= 0:
        at = descriptor + _LUTS_AT + lut * _LUT_WORDS
        shadow = tl.load(at + 1).to(tl.pointer_type(tl.int64))
        slots = _look_up(shadow, slots, mask, tl.load(at + 2))
    return slots


@triton.jit
def _lut_changes(descriptor, slots, mask, out, counters, capacity, LUT_INT64: tl.constexpr):
    """Find which entries that these slots go through differ from the shadow; take them down."""
    for number in range(tl.load(descriptor + 7)):
        at = descriptor + _LUTS_AT + number * _LUT_WORDS
        if LUT_INT64:
            table = tl.load(at).to(tl.pointer_type(tl.int64))
        else:
            table = tl.load(at).to(tl.pointer_type(tl.int32))
        shadow = tl.load(at + 1).to(tl.pointer_type(tl.int64))
        length = tl.load(at + 2)
        inside = mask & (slots >= 0) & (slots < length)
        cell = tl.where(inside, slots, 0)
        now = tl.load(table + cell, mask=inside, other=0).to(tl.int64)
        changed = inside & (now != tl.load(shadow + cell, mask=inside, other=0))
        found = tl.sum(changed.to(tl.int64))
        if found > 0:
            place = tl.atomic_add(counters + 1, found) + tl.cumsum(changed.to(tl.int64), 0) - 1
            fits = changed & (place < capacity)
            tl.store(out + place * 3, tl.zeros_like(cell) + number, mask=fits)
            tl.store(out + place * 3 + 1, cell, mask=fits)
            tl.store(out + place * 3 + 2, now, mask=fits)
            tl.store(shadow + cell, now, mask=fits)


@triton.jit
def _take_inputs(
    program, rows_in, prefix_in, minus_in, extend_in, ids_in, positions_in, loc_in, frame, counters, descriptor,
    bs, num_tokens, num_loc, num_prefix, extend_each, forward, lut_at, lut_capacity,
    HAS_MINUS: tl.constexpr, HAS_EXTEND: tl.constexpr, LUT_INT64: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy a tile of requests and tokens; stamp the slots that the tokens are written to."""
    tile = tl.arange(0, TILE).to(tl.int64)
    i = program * TILE + tile
    is_request = i < bs
    row = tl.load(rows_in + i, mask=is_request, other=0).to(tl.int64)
    prefix = tl.load(prefix_in + i, mask=is_request & (i < num_prefix), other=0).to(tl.int64)
    extend = tl.zeros_like(i) + extend_each
    if HAS_EXTEND:
        extend = tl.load(extend_in + i, mask=is_request, other=0).to(tl.int64)
    if HAS_MINUS:
        prefix -= tl.load(minus_in + i, mask=is_request, other=0).to(tl.int64)
    tl.store(frame + i, row, mask=is_request)
    tl.store(frame + bs + i, prefix, mask=is_request)
    tl.store(frame + 2 * bs + i, extend, mask=is_request)
    is_token = i < num_tokens
    tokens = frame + 3 * bs
    loc = tl.load(loc_in + i, mask=is_token & (i < num_loc), other=-1).to(tl.int64)
    ids = tl.load(ids_in + i, mask=is_token, other=0).to(tl.int64)
    positions = tl.load(positions_in + i, mask=is_token, other=0).to(tl.int64)
    tl.store(tokens + i, ids, mask=is_token)
    tl.store(tokens + num_tokens + i, positions, mask=is_token)
    tl.store(tokens + 2 * num_tokens + i, loc, mask=is_token)
    _lut_changes(descriptor, loc, is_token, frame + lut_at, counters, lut_capacity, LUT_INT64)
    for group in range(tl.load(descriptor + 6)):
        # Through the engine's own table: another program may not have moved the shadow on yet.
        at = descriptor + _GROUPS_AT + group * _GROUP_WORDS
        lut = tl.load(at + 1)
        slot = loc
        if lut >= 0:
            place = descriptor + _LUTS_AT + lut * _LUT_WORDS
            if LUT_INT64:
                table = tl.load(place).to(tl.pointer_type(tl.int64))
                slot = _look_up(table, loc, is_token, tl.load(place + 2))
            else:
                table32 = tl.load(place).to(tl.pointer_type(tl.int32))
                slot = _look_up(table32, loc, is_token, tl.load(place + 2))
        inside = is_token & (slot >= 0) & (slot < tl.load(at + 2))
        stamps = tl.load(at + 3).to(tl.pointer_type(tl.int32))
        tl.store(stamps + tl.where(inside, slot, 0), tl.zeros_like(slot).to(tl.int32) + forward, mask=inside)


@triton.jit
def _take_table_changes(
    program, rows_in, prefix_in, minus_in, extend_in, loc_in, frame, counters, descriptor,
    num_tokens, num_loc, num_prefix, extend_each, table_at, table_capacity, lut_at, lut_capacity, splits,
    HAS_MINUS: tl.constexpr, HAS_EXTEND: tl.constexpr, LUT_INT64: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compare a share of one request's prefix with the shadow, and move the shadow on by its share of what it writes."""
    tile = tl.arange(0, TILE).to(tl.int64)
    request = program // splits
    split = program % splits
    row = tl.load(rows_in + request).to(tl.int64)
    prefix = row * 0
    if request < num_prefix:
        prefix += tl.load(prefix_in + request).to(tl.int64)
    if HAS_MINUS:
        prefix -= tl.load(minus_in + request).to(tl.int64)
    extend = row * 0 + extend_each
    if HAS_EXTEND:
        extend = tl.load(extend_in + request).to(tl.int64)
    width = tl.load(descriptor + 2)
    # Row 0 is padding, and a row that the table does not have has no cells.
    if (row > 0) & (row < tl.load(descriptor + 1)):
        table = tl.load(descriptor).to(tl.pointer_type(tl.int32)) + row * tl.load(descriptor + 3)
        shadow = tl.load(descriptor + 4).to(tl.pointer_type(tl.int32)) + row * width
        window = tl.load(descriptor + 5)
        first = row * 0
        if window > 0:
            first = tl.maximum(prefix - window, 0)
        end = tl.minimum(prefix, width)
        for start in range(first + split * TILE, end, splits * TILE):
            position = start + tile
            mask = position < end
            slot = tl.load(table + position, mask=mask, other=0)
            changed = mask & (slot != tl.load(shadow + position, mask=mask, other=0))
            if tl.sum(changed.to(tl.int64)) > 0:
                place = tl.atomic_add(counters, 1)
                if place < table_capacity:
                    out = frame + table_at + place * (2 + TILE)
                    tl.store(out, row)
                    tl.store(out + 1, row * 0 + start)
                    tl.store(out + 2 + tile, tl.where(changed, slot.to(tl.int64), _UNCHANGED))
                    tl.store(shadow + position, slot, mask=changed)
            _lut_changes(descriptor, slot.to(tl.int64), mask, frame + lut_at, counters, lut_capacity, LUT_INT64)
        # The replay puts a forward's own slots into its table by itself.
        before = row * 0
        for start in range(0, request, TILE):
            other = start + tile
            is_before = other < request
            rows = tl.load(rows_in + other, mask=is_before, other=0)
            lens = tl.zeros_like(other) + extend_each
            if HAS_EXTEND:
                lens = tl.load(extend_in + other, mask=is_before, other=0).to(tl.int64)
            before += tl.sum(tl.where(is_before & (rows != 0), tl.maximum(lens, 0), 0))
        for start in range(split * TILE, extend, splits * TILE):
            i = start + tile
            position = prefix + i
            token = before + i
            mask = (i < extend) & (token < num_tokens) & (position >= 0) & (position < width)
            loc = tl.load(loc_in + token, mask=mask & (token < num_loc), other=-1)
            tl.store(shadow + position, loc.to(tl.int32), mask=mask)


@triton.jit
def _count_as_done(counters):
    """Count this program, once all that it has stored can be seen by whoever sees the count."""
    tl.debug_barrier()
    tl.atomic_add(counters + 3, 1, sem="release")


@triton.jit(do_not_specialize=TAKE_DOWN_ARGUMENTS, do_not_specialize_on_alignment=TAKE_DOWN_ARGUMENTS)
def take_down_kernel(
    rows_in, prefix_in, minus_in, extend_in, ids_in, positions_in, loc_in,
    at, flight, forward, num_loc, num_prefix, extend_each,
    frames, counters, descriptor, bs, num_tokens, table_at, table_capacity, lut_at, lut_capacity, token_programs, splits,
    HAS_MINUS: tl.constexpr, HAS_EXTEND: tl.constexpr, LUT_INT64: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Take down what a forward reads and writes, before it runs, and which table entries the trace does not know."""
    program = tl.program_id(0).to(tl.int64)
    frame = frames + at
    counters += flight * _NUM_COUNTERS
    if program < token_programs:
        _take_inputs(
            program, rows_in, prefix_in, minus_in, extend_in, ids_in, positions_in, loc_in, frame, counters, descriptor,
            bs, num_tokens, num_loc, num_prefix, extend_each, forward, lut_at, lut_capacity,
            HAS_MINUS, HAS_EXTEND, LUT_INT64, TILE,
        )  # fmt: skip
    else:
        _take_table_changes(
            program - token_programs, rows_in, prefix_in, minus_in, extend_in, loc_in, frame, counters, descriptor,
            num_tokens, num_loc, num_prefix, extend_each, table_at, table_capacity, lut_at, lut_capacity, splits,
            HAS_MINUS, HAS_EXTEND, LUT_INT64, TILE,
        )  # fmt: skip
    _count_as_done(counters)


@triton.jit
def _take_written(program, frame, descriptor, bs, num_tokens, token_programs, TILE: tl.constexpr):
    """Take down the bytes of a tile of written tokens, of one stream."""
    tile = tl.arange(0, TILE).to(tl.int64)
    stream = program // token_programs
    at = descriptor + _STREAMS_AT + stream * _STREAM_WORDS
    i = (program % token_programs) * TILE + tile
    is_token = i < num_tokens
    loc = tl.load(frame + 3 * bs + 2 * num_tokens + i, mask=is_token, other=-1)
    group = tl.load(at + 5)
    slot = _through_shadow(descriptor, group, loc, is_token)
    words = tl.load(at + 3)
    rows = tl.load(at).to(tl.pointer_type(tl.int64))
    row_words = tl.load(at + 1)
    shadow = tl.load(at + 4).to(tl.pointer_type(tl.int64))
    inside = is_token & (slot >= 0) & (slot < tl.load(at + 2))
    cell = tl.where(inside, slot, 0)
    out = frame + 3 * bs + 3 * num_tokens + num_tokens * tl.load(at + 6) + i * words
    for word in range(words):
        content = tl.load(rows + cell * row_words + word, mask=inside, other=0)
        tl.store(out + word, content, mask=is_token)
        tl.store(shadow + cell * words + word, content, mask=inside)
    known = tl.load(descriptor + _GROUPS_AT + group * _GROUP_WORDS + 4).to(tl.pointer_type(tl.uint8))
    tl.store(known + cell, tl.full([TILE], 1, tl.uint8), mask=inside)


@triton.jit
def _take_kv_changes(
    program, frame, counters, descriptor, bs, forward, kv_at, kv_capacity, kv_entry, splits, TILE: tl.constexpr
):
    """Compare the bytes of a share of one request's prefix with the shadow, of one stream."""
    tile = tl.arange(0, TILE).to(tl.int64)
    stream = program // (bs * splits)
    request = (program // splits) % bs
    split = program % splits
    at = descriptor + _STREAMS_AT + stream * _STREAM_WORDS
    group = tl.load(at + 5)
    of_group = descriptor + _GROUPS_AT + group * _GROUP_WORDS
    row = tl.load(frame + request)
    prefix = tl.load(frame + bs + request)
    width = tl.load(descriptor + 2)
    if (row > 0) & (row < tl.load(descriptor + 1)):
        # The shadow holds what the forward read; the engine's own table may have moved on.
        table = tl.load(descriptor + 4).to(tl.pointer_type(tl.int32)) + row * width
        window = tl.load(of_group)
        first = row * 0
        if window > 0:
            first = tl.maximum(prefix - window, 0)
        end = tl.minimum(prefix, width)
        rows = tl.load(at).to(tl.pointer_type(tl.int64))
        row_words = tl.load(at + 1)
        words = tl.load(at + 3)
        shadow = tl.load(at + 4).to(tl.pointer_type(tl.int64))
        num_slots = tl.minimum(tl.load(at + 2), tl.load(of_group + 2))
        stamps = tl.load(of_group + 3).to(tl.pointer_type(tl.int32))
        known = tl.load(of_group + 4).to(tl.pointer_type(tl.uint8))
        for start in range(first + split * TILE, end, splits * TILE):
            position = start + tile
            mask = position < end
            slot = tl.load(table + position, mask=mask, other=0).to(tl.int64)
            slot = _through_shadow(descriptor, group, slot, mask)
            inside = mask & (slot > 0) & (slot < num_slots)
            cell = tl.where(inside, slot, 0)
            differs = tl.zeros_like(cell)
            for word in range(words):
                now = tl.load(rows + cell * row_words + word, mask=inside, other=0)
                then = tl.load(shadow + cell * words + word, mask=inside, other=0)
                differs = tl.where(now != then, 1, differs)
            changed = inside & (differs != 0)
            if tl.sum(changed.to(tl.int64)) > 0:
                # What this forward wrote is taken down as written; what nobody wrote yet has no bytes to compare.
                changed = changed & (tl.load(known + cell, mask=changed, other=0) != 0)
                changed = changed & (tl.load(stamps + cell, mask=changed, other=0) != forward)
                found = tl.sum(changed.to(tl.int64))
                if found > 0:
                    place = tl.atomic_add(counters + 2, found) + tl.cumsum(changed.to(tl.int64), 0) - 1
                    fits = changed & (place < kv_capacity)
                    out = frame + kv_at + place * kv_entry
                    tl.store(out, tl.zeros_like(place) + stream, mask=fits)
                    tl.store(out + 1, slot, mask=fits)
                    for word in range(words):
                        now = tl.load(rows + cell * row_words + word, mask=fits, other=0)
                        tl.store(out + 2 + word, now, mask=fits)
                        tl.store(shadow + cell * words + word, now, mask=fits)


@triton.jit(do_not_specialize=TAKE_BACK_ARGUMENTS, do_not_specialize_on_alignment=TAKE_BACK_ARGUMENTS)
def take_back_kernel(
    at, flight, next_flight, forward,
    frames, counters, descriptor, bs, num_tokens, kv_at, kv_capacity, kv_entry, token_programs, watch_programs, splits,
    TILE: tl.constexpr,
):  # fmt: skip
    """Take down the bytes that a forward wrote and, with `watch_programs`, its prefix's that changed without a write."""
    program = tl.program_id(0).to(tl.int64)
    frame = frames + at
    streams = tl.load(descriptor + 8)
    if program == 0:
        for number in range(_NUM_COUNTERS):
            tl.store(counters + next_flight * _NUM_COUNTERS + number, tl.zeros_like(streams))
    counters += flight * _NUM_COUNTERS
    if program < token_programs * streams:
        _take_written(program, frame, descriptor, bs, num_tokens, token_programs, TILE)
    elif program < token_programs * streams + watch_programs:
        _take_kv_changes(
            program - token_programs * streams, frame, counters, descriptor, bs, forward, kv_at, kv_capacity, kv_entry,
            splits, TILE,
        )  # fmt: skip
    _count_as_done(counters)
