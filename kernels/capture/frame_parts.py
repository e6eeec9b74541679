"""What the programs of the frame kernels do with a forward's inputs and tables; `frame_kv` has what they do with bytes.

Addresses come from a descriptor in device memory (`frames.RunnerOnDevice.descriptor`) and what changes from forward to
forward from a ticket (`frame_kernels`), so that a launch passes little.
"""

import triton
import triton.language as tl

from ..ops.state_hash.reference import POOL_WORDS as _POOL_WORDS
from . import frames, layers

# Words of a ticket. The first is the forward's stamp, 0 if nothing is to be captured.
AT = tl.constexpr(1)
COUNTERS_ROW = tl.constexpr(2)
NEXT_COUNTERS_ROW = tl.constexpr(3)
WATCH = tl.constexpr(4)
FRAMES = tl.constexpr(5)  # addresses of frames, counters and the runner's descriptor
TABLE_AT = tl.constexpr(8)
TABLE_CAPACITY = tl.constexpr(9)
LUT_AT = tl.constexpr(10)
LUT_CAPACITY = tl.constexpr(11)
KV_AT = tl.constexpr(12)
KV_CAPACITY = tl.constexpr(13)
KV_ENTRY = tl.constexpr(14)
LENS_AT = tl.constexpr(15)
ATTENTION_AT = tl.constexpr(16)
ATTENTION_CAPACITY = tl.constexpr(17)
VALUES_AT = tl.constexpr(18)
PROGRAMS = tl.constexpr(19)  # of all launches together

# What `frames` says of descriptors, counters and entries.
GROUPS_AT = tl.constexpr(frames.GROUPS_AT)
GROUP_WORDS = tl.constexpr(frames.GROUP_WORDS)
_LUTS_AT = tl.constexpr(frames.LUTS_AT)
_LUT_WORDS = tl.constexpr(frames.LUT_WORDS)
TABLES_AT = tl.constexpr(frames.TABLES_AT)
TABLE_WORDS = tl.constexpr(frames.TABLE_WORDS)
STATES_AT = tl.constexpr(frames.STATES_AT)
POOL_WORDS = tl.constexpr(_POOL_WORDS)
STATE_VALUES = tl.constexpr(frames.STATE_VALUES)
STATE_SAID = tl.constexpr(frames.STATE_SAID)
NOT_SAID = tl.constexpr(frames.NOT_SAID)
_TABLE_OF_ENTRY = tl.constexpr(frames.TABLE_OF_ENTRY)
_NOT_READ = tl.constexpr(frames.NOT_READ)
_UNCHANGED = tl.constexpr(frames.UNCHANGED)
NUM_COUNTERS = tl.constexpr(frames.NUM_COUNTERS)
ATTENTION_ENTRY = tl.constexpr(frames.ATTENTION_ENTRY)
VALUE_KINDS = tl.constexpr(layers.VALUE_KINDS)
STREAMS_AT = tl.constexpr(frames.STREAMS_AT)
STREAM_WORDS = tl.constexpr(frames.STREAM_WORDS)


@triton.jit
def _look_up(lut, slots, mask, length):
    """Slots through a full-to-SWA table, -1 if it has no entry."""
    inside = mask & (slots >= 0) & (slots < length)
    return tl.load(lut + tl.where(inside, slots, 0), mask=inside, other=-1).to(tl.int64)


@triton.jit
def _lut_table(at, LUT_INT64: tl.constexpr):
    """The engine's own full-to-SWA table, of a descriptor's entry."""
    if LUT_INT64:
        return tl.load(at).to(tl.pointer_type(tl.int64))
    else:  # noqa: RET505  # Triton compiles one of the two, and each returns another type
        return tl.load(at).to(tl.pointer_type(tl.int32))


@triton.jit
def through_shadow(descriptor, group, slots, mask):
    """Slots in a group's own numbering, as the replay will translate them."""
    lut = tl.load(descriptor + GROUPS_AT + group * GROUP_WORDS + 1)
    if lut >= 0:
        at = descriptor + _LUTS_AT + lut * _LUT_WORDS
        shadow = tl.load(at + 1).to(tl.pointer_type(tl.int64))
        slots = _look_up(shadow, slots, mask, tl.load(at + 2))
    return slots


@triton.jit
def pointer(ticket, word):
    """The address in a word of a ticket."""
    return tl.load(ticket + word).to(tl.pointer_type(tl.int64))


@triton.jit
def frame_of(ticket):
    """The forward's frame."""
    return pointer(ticket, FRAMES) + tl.load(ticket + AT)


@triton.jit
def counters_of(ticket):
    """The forward's row of counters."""
    return pointer(ticket, FRAMES + 1) + tl.load(ticket + COUNTERS_ROW) * NUM_COUNTERS


@triton.jit
def descriptor_of(ticket):
    """The runner's descriptor."""
    return pointer(ticket, FRAMES + 2)


@triton.jit
def table_of(descriptor, group):
    """The words of a group's block table."""
    return descriptor + TABLES_AT + tl.load(descriptor + GROUPS_AT + group * GROUP_WORDS + 4) * TABLE_WORDS


@triton.jit
def shadow_row(of_table, row):
    """A row of a block table's shadow."""
    return tl.load(of_table + 4).to(tl.pointer_type(tl.int32)) + row * tl.load(of_table + 6)


@triton.jit
def _lut_changes(descriptor, ticket, slots, mask, LUT_INT64: tl.constexpr):
    """Find which entries that these slots go through differ from the shadow; put them into the frame."""
    for number in range(tl.load(descriptor + 7)):
        at = descriptor + _LUTS_AT + number * _LUT_WORDS
        table = _lut_table(at, LUT_INT64)
        shadow = tl.load(at + 1).to(tl.pointer_type(tl.int64))
        length = tl.load(at + 2)
        inside = mask & (slots >= 0) & (slots < length)
        cell = tl.where(inside, slots, 0)
        now = tl.load(table + cell, mask=inside, other=0).to(tl.int64)
        changed = inside & (now != tl.load(shadow + cell, mask=inside, other=0))
        found = tl.sum(changed.to(tl.int64))
        if found > 0:
            place = tl.atomic_add(counters_of(ticket) + 1, found) + tl.cumsum(changed.to(tl.int64), 0) - 1
            fits = changed & (place < tl.load(ticket + LUT_CAPACITY))
            out = frame_of(ticket) + tl.load(ticket + LUT_AT) + place * 3
            tl.store(out, tl.zeros_like(cell) + number, mask=fits)
            tl.store(out + 1, cell, mask=fits)
            tl.store(out + 2, now, mask=fits)
            tl.store(shadow + cell, now, mask=fits)


@triton.jit
def lens_of(
    request, mask, prefix_in, minus_in, extend_in, num_prefix, extend_each, HAS_MINUS: tl.constexpr,
    HAS_EXTEND: tl.constexpr,
):  # fmt: skip
    """How many tokens of requests are in the cache, and how many the forward adds; of one request or of a tile."""
    prefix = tl.load(prefix_in + request, mask=mask & (request < num_prefix), other=0).to(tl.int64)
    if HAS_MINUS:
        prefix -= tl.load(minus_in + request, mask=mask, other=0).to(tl.int64)
    extend = request * 0 + extend_each
    if HAS_EXTEND:
        extend = tl.load(extend_in + request, mask=mask, other=0).to(tl.int64)
    return prefix, extend


@triton.jit
def copy_requests(program, rows_in, prefix, extend, ticket, bs, TILE: tl.constexpr):
    """Copy a tile of requests into the frame."""
    i = program * TILE + tl.arange(0, TILE).to(tl.int64)
    is_request = i < bs
    row = tl.load(rows_in + i, mask=is_request, other=0).to(tl.int64)
    frame = frame_of(ticket)
    tl.store(frame + i, row, mask=is_request)
    tl.store(frame + bs + i, prefix, mask=is_request)
    tl.store(frame + 2 * bs + i, extend, mask=is_request)


@triton.jit
def copy_lens(program, seq_lens_in, starts_in, ticket, bs, TILE: tl.constexpr):
    """Copy the lengths that attention gets of a tile of requests into the frame."""
    i = program * TILE + tl.arange(0, TILE).to(tl.int64)
    mask = i < bs
    starts = tl.load(starts_in + i, mask=mask, other=0).to(tl.int64)
    ends = tl.load(starts_in + i + 1, mask=mask, other=0).to(tl.int64)
    lens = frame_of(ticket) + tl.load(ticket + LENS_AT)
    tl.store(lens + i, tl.load(seq_lens_in + i, mask=mask, other=0).to(tl.int64), mask=mask)
    tl.store(lens + bs + i, ends - starts, mask=mask)


@triton.jit
def copy_tokens(
    program, ids_in, positions_in, loc_in, num_loc, loc_stride, ticket, bs, num_tokens, LUT_INT64: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Copy a tile of tokens into the frame, where nothing is said of their values yet; stamp the slots that they are written to."""
    i = program * TILE + tl.arange(0, TILE).to(tl.int64)
    is_token = i < num_tokens
    tokens = frame_of(ticket) + 3 * bs
    ids = tl.load(ids_in + i, mask=is_token, other=0).to(tl.int64)
    positions = tl.load(positions_in + i, mask=is_token, other=0).to(tl.int64)
    tl.store(tokens + i, ids, mask=is_token)
    tl.store(tokens + num_tokens + i, positions, mask=is_token)
    descriptor = descriptor_of(ticket)
    for table in range(tl.load(descriptor + 9)):
        loc = tl.load(loc_in + table * loc_stride + i, mask=is_token & (i < num_loc), other=-1).to(tl.int64)
        tl.store(tokens + (2 + table) * num_tokens + i, loc, mask=is_token)
        _lut_changes(descriptor, ticket, loc, is_token, LUT_INT64)
    values = frame_of(ticket) + tl.load(ticket + VALUES_AT)
    for word in range(tl.load(descriptor + 10)):
        tl.store(values + word * num_tokens + i, tl.zeros_like(ids), mask=is_token)
    for group in range(tl.load(descriptor + 6)):
        # Through the engine's own table: another program may not have moved the shadow on yet.
        at = descriptor + GROUPS_AT + group * GROUP_WORDS
        lut = tl.load(at + 1)
        own = loc_in + tl.load(at + 4) * loc_stride
        loc = tl.load(own + i, mask=is_token & (i < num_loc), other=-1).to(tl.int64)
        slot = loc
        if lut >= 0:
            place = descriptor + _LUTS_AT + lut * _LUT_WORDS
            slot = _look_up(_lut_table(place, LUT_INT64), loc, is_token, tl.load(place + 2))
        inside = is_token & (slot >= 0) & (slot < tl.load(at + 2))
        stamps = tl.load(at + 3).to(tl.pointer_type(tl.int32))
        stamp = tl.zeros_like(slot).to(tl.int32) + tl.load(ticket).to(tl.int32)
        tl.store(stamps + tl.where(inside, slot, 0), stamp, mask=inside)


@triton.jit
def slot_in(table, position, page, mask):
    """The slots that a row of a table names for positions, -1 for a block that is none."""
    slot = tl.load(table + position // page, mask=mask, other=0)
    if page > 1:
        whole = (slot.to(tl.int64) * page + position % page).to(tl.int32)
        slot = tl.where(slot < 0, -1, whole)
    return slot


@triton.jit
def put_cells(row, number, start, slot, changed, ticket, TILE: tl.constexpr):
    """Put a tile of a row's cells from `start` on into the frame, those that are `changed`; return whether there was room."""
    place = tl.atomic_add(counters_of(ticket), 1)
    fits = place < tl.load(ticket + TABLE_CAPACITY)
    if fits:
        out = frame_of(ticket) + tl.load(ticket + TABLE_AT) + place * (2 + TILE)
        tl.store(out, row + number * _TABLE_OF_ENTRY)
        tl.store(out + 1, row * 0 + start)
        tl.store(out + 2 + tl.arange(0, TILE), tl.where(changed, slot.to(tl.int64), _UNCHANGED))
    return fits


@triton.jit
def compare_table(number, request, row, prefix, split, splits, ticket, LUT_INT64: tl.constexpr, TILE: tl.constexpr):
    """Compare a share of one request's prefix in one table with the shadow; put the cells that differ into the frame.

    Row 0 is padding, and a row that the table does not have has no cells. Of a table by place the slot before a window is
    not read by the engine: nothing is known of it if its block may have been given away.
    """
    tile = tl.arange(0, TILE).to(tl.int64)
    descriptor = descriptor_of(ticket)
    of_table = descriptor + TABLES_AT + number * TABLE_WORDS
    by_place = tl.load(of_table + 10) != 0
    page = tl.load(of_table + 8)
    place_in_table = tl.where(by_place, request, row)
    if (row > 0) & (row < tl.load(of_table + 5)) & (place_in_table < tl.load(of_table + 1)):
        table = tl.load(of_table).to(tl.pointer_type(tl.int32)) + place_in_table * tl.load(of_table + 3)
        shadow = shadow_row(of_table, row)
        window = tl.load(of_table + 7)
        first = tl.where(window > 0, tl.maximum(prefix - window, 0), 0)
        end = tl.minimum(prefix, tl.minimum(tl.load(of_table + 6), tl.load(of_table + 2) * page))
        end = tl.where(window == _NOT_READ, 0, end)
        # The position before the window that is not read, -1 for none.
        unread = tl.where(by_place & (window > 0) & (prefix >= window), prefix - window, -1)
        allocated = tl.maximum(tl.load(of_table + 9), 1)
        for start in range(first + split * TILE, end, splits * TILE):
            position = start + tile
            mask = position < end
            slot = slot_in(table, position, page, mask)
            gone = ((position + 1) % allocated == 0) | ((slot >= 0) & (slot < page))
            slot = tl.where((position == unread) & gone, 0, slot)
            changed = mask & (slot != tl.load(shadow + position, mask=mask, other=0))
            if tl.sum(changed.to(tl.int64)) > 0:
                if put_cells(row, number, start, slot, changed, ticket, TILE):
                    tl.store(shadow + position, slot, mask=changed)
            _lut_changes(descriptor, ticket, slot.to(tl.int64), mask, LUT_INT64)


@triton.jit
def tokens_before(request, rows_in, extend_in, extend_each, HAS_EXTEND: tl.constexpr, TILE: tl.constexpr):
    """How many tokens the requests before this one add; padding adds none."""
    before = request * 0
    for start in range(0, request, TILE):
        other = start + tl.arange(0, TILE).to(tl.int64)
        is_before = other < request
        rows = tl.load(rows_in + other, mask=is_before, other=0)
        lens = tl.zeros_like(other) + extend_each
        if HAS_EXTEND:
            lens = tl.load(extend_in + other, mask=is_before, other=0).to(tl.int64)
        before += tl.sum(tl.where(is_before & (rows != 0), tl.maximum(lens, 0), 0))
    return before


@triton.jit
def write_shadow(
    number, request, row, prefix, extend, before, split, splits, loc_in, num_loc, num_tokens, ticket, TILE: tl.constexpr
):  # fmt: skip
    """Put a share of what one request writes into a table's shadow: the replay puts it into its table by itself.

    A table by place names these slots already: cells that name others are put into the frame.
    """
    of_table = descriptor_of(ticket) + TABLES_AT + number * TABLE_WORDS
    width, page = tl.load(of_table + 6), tl.load(of_table + 8)
    named = (tl.load(of_table + 10) != 0) & (tl.load(of_table + 7) != _NOT_READ) & (request < tl.load(of_table + 1))
    cells = tl.where(named, tl.load(of_table + 2) * page, 0)
    table = tl.load(of_table).to(tl.pointer_type(tl.int32)) + tl.where(named, request, 0) * tl.load(of_table + 3)
    tile = tl.arange(0, TILE).to(tl.int64)
    if (row > 0) & (row < tl.load(of_table + 5)):
        shadow = shadow_row(of_table, row)
        for start in range(split * TILE, extend, splits * TILE):
            i = start + tile
            position = prefix + i
            token = before + i
            mask = (i < extend) & (token < num_tokens) & (position >= 0) & (position < width)
            loc = tl.load(loc_in + token, mask=mask & (token < num_loc), other=-1)
            tl.store(shadow + position, loc.to(tl.int32), mask=mask)
            compared = mask & (loc >= 0) & (position < cells)
            slot = slot_in(table, position, page, compared)
            differs = compared & (slot != loc.to(tl.int32))
            if tl.sum(differs.to(tl.int64)) > 0:
                put_cells(row, number, prefix + start, slot, differs, ticket, TILE)
