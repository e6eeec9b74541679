"""Token rows on the device: one pass over the captured bytes, beside the table's row of each token."""

from typing import Any

import torch
import triton
import triton.language as tl

from ...arrays import require_tensor
from .encoding import ITEM_BYTES, NUMBERS
from .reference import ALIGNED, NEAR_LARGEST, Encoding, TokenTable, Turns

_TILE = 1024  # columns that are looked at together
_VALUES = 4096  # of a program at once
# Of rows of so few columns a program takes fewer values: of many rows each thread keeps much else in registers.
_NARROW = 256
_NARROW_VALUES = 1024
_PAIRS = 1024
_MOST_HALF = 256
_FLAGS = tl.constexpr(2)
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_numbers: dict[tuple[str, Any], Any] = {}


@triton.jit
def _decoded(codes, numbers, DTYPE: tl.constexpr):
    if DTYPE == "bfloat16":
        found = (codes.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "float16":
        found = codes.to(tl.float16, bitcast=True).to(tl.float32)
    elif DTYPE == "float32":
        found = codes.to(tl.float32, bitcast=True)
    else:
        found = tl.load(numbers + codes.to(tl.int32))
    return found


@triton.jit
def _wide(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(values):
    bits = values.to(tl.int32, bitcast=True)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _token_rows_kernel(
    captured, table, turns, numbers, flags, count, tolerances, DTYPE: tl.constexpr, SHAPE: tl.constexpr,
    LOW: tl.constexpr, QUANTISED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Set `flags` `[count] uint8`.

    - `captured`: `data` as items of the stored size; `begins`, `rows`, `positions` `[count] int32`.
    - `table`: `values` `[tokens, columns] float32`, `allowed` `[tokens] float32`, `partners` `[width] int32`, `low` `[tokens,
      columns] int16`.
    - `turns`: `cosines`, `sines` `[places, period] float32`; with `LOW` `low_cosines`, `low_sines` `[places, period] int16`.
    - `numbers` `[256] float32`: what each code of one byte is.
    - `tolerances`: floats, of which Triton makes no constants, in a tuple either.
    """
    items: tl.constexpr = SHAPE[0]  # in 16 bytes
    width: tl.constexpr = SHAPE[1]  # columns that are compared
    columns: tl.constexpr = SHAPE[2]  # of the table
    period: tl.constexpr = SHAPE[3]  # columns after which the angles begin again; 0: nothing turns
    shift: tl.constexpr = SHAPE[4]  # columns from a value to its partner, if all have as many; else 0
    each: tl.constexpr = TILE[0]  # rows of a program
    tile: tl.constexpr = TILE[1]  # columns that are looked at together
    data, begins, rows, positions = captured
    values, allowed, partners, low = table
    cosines, sines, low_cosines, low_sines = turns
    noise, scale, relative, absolute, largest = tolerances
    n = tl.program_id(0) * each + tl.arange(0, each)
    there = n < count
    begin = tl.load(begins + n, mask=there, other=0).to(tl.int64) * items
    row = tl.load(rows + n, mask=there, other=-1).to(tl.int64)
    known = there & (row >= 0)
    row = tl.where(known, row, 0)
    limit = tl.load(allowed + row, mask=known, other=0.0)
    row = row * columns
    place = tl.load(positions + n, mask=there, other=0).to(tl.int64) * period
    any_byte = tl.zeros([each], tl.int32)
    bad = tl.zeros([each], tl.int32)
    most_off = tl.full([each], float("-inf"), tl.float32)
    most_noise = tl.zeros([each], tl.float32)
    for first in range(0, width, tile):
        column = first + tl.arange(0, tile)
        inside = column < width
        mask = there[:, None] & inside[None, :]
        mine = mask & known[:, None]
        codes = tl.load(data + begin[:, None] + column[None, :], mask=mask, other=0)
        any_byte |= tl.max((codes != 0).to(tl.int32), axis=1)
        got = _decoded(codes, numbers, DTYPE)
        at = row[:, None] + column[None, :]
        own = tl.load(values + at, mask=mine, other=0.0)
        if period > 0:
            if shift > 0:  # then values that lie beside one another are read together
                there_partner = at + shift
            else:
                there_partner = row[:, None] + tl.load(partners + column, mask=inside, other=0)[None, :]
            turn = place[:, None] + (column % period)[None, :]
            cosine = tl.load(cosines + turn, mask=mine, other=1.0)
            sine = tl.load(sines + turn, mask=mine, other=0.0)
            own = own * cosine + tl.load(values + there_partner, mask=mine, other=0.0) * sine
            if LOW:
                cosine = _wide(tl.load(low_cosines + turn, mask=mine, other=0))
                sine = _wide(tl.load(low_sines + turn, mask=mine, other=0))
                turned = _rounded(_wide(tl.load(low + at, mask=mine, other=0)) * cosine)
                turned = _rounded(turned + _rounded(_wide(tl.load(low + there_partner, mask=mine, other=0)) * sine))
                differs = tl.abs(own - turned)
                most_noise = tl.maximum(
                    most_noise, tl.max(tl.where(mine & (differs < float("inf")), differs, 0.0), axis=1)
                )
        off = tl.abs(got - own)
        if QUANTISED:
            much = tl.abs(own)
            off = tl.abs(got * scale - own) - (much * relative + absolute)
            off = tl.where((largest > 0) & (much >= largest), 0.0, off)
        fine = off < float("inf")
        bad |= tl.max((mine & (fine == 0)).to(tl.int32), axis=1)
        most_off = tl.maximum(most_off, tl.max(tl.where(mine & fine, off, float("-inf")), axis=1))
    if LOW:
        limit = limit + noise * most_noise
    off = (bad != 0) | ((most_off <= limit) == 0)
    fits = known & (off == 0)
    tl.store(flags + n, (any_byte + fits.to(tl.int32) * _FLAGS).to(tl.uint8), mask=there)


@triton.jit(do_not_specialize=["count", "noise"])
def _heads_kernel(
    captured, table, turns, flags, count, noise, DTYPE: tl.constexpr, ITEMS: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, LOW: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The same for whole heads whose halves turn: a value and its partner are read once, and the angles once for all heads.

    `table` is without `partners`, its rows and those of `turns` have `2 * HALF` columns, those of `table` for each of the `HEADS`.
    """
    data, begins, rows, positions = captured
    values, allowed, low = table
    cosines, sines, low_cosines, low_sines = turns
    n = tl.program_id(0) * R + tl.arange(0, R)
    there = n < count
    row = tl.load(rows + n, mask=there, other=-1).to(tl.int64)
    known = there & (row >= 0)
    row = tl.where(known, row, 0)
    limit = tl.load(allowed + row, mask=known, other=0.0)
    column = tl.arange(0, HALF)[None, :]
    mask = there[:, None] & (column >= 0)
    mine = known[:, None] & (column >= 0)
    begin = (tl.load(begins + n, mask=there, other=0).to(tl.int64) * ITEMS)[:, None] + column
    at = (row * (2 * HALF * HEADS))[:, None] + column
    turn = (tl.load(positions + n, mask=there, other=0).to(tl.int64) * (2 * HALF))[:, None] + column
    cosine = tl.load(cosines + turn, mask=mine, other=1.0)
    sine = tl.load(sines + turn, mask=mine, other=0.0)
    cosine_2 = tl.load(cosines + turn + HALF, mask=mine, other=1.0)
    sine_2 = tl.load(sines + turn + HALF, mask=mine, other=0.0)
    if LOW:
        low_cosine = tl.load(low_cosines + turn, mask=mine, other=0)
        low_sine = tl.load(low_sines + turn, mask=mine, other=0)
        low_cosine_2 = tl.load(low_cosines + turn + HALF, mask=mine, other=0)
        low_sine_2 = tl.load(low_sines + turn + HALF, mask=mine, other=0)
    any_byte = tl.zeros([R, HALF], tl.int32)
    bad = tl.zeros([R, HALF], tl.int32)
    most_off = tl.full([R, HALF], float("-inf"), tl.float32)
    most_noise = tl.zeros([R, HALF], tl.float32)
    for head in range(HEADS):
        codes = tl.load(data + begin + 2 * HALF * head, mask=mask, other=0)
        codes_2 = tl.load(data + begin + (2 * HALF * head + HALF), mask=mask, other=0)
        first = tl.load(values + at + 2 * HALF * head, mask=mine, other=0.0)
        second = tl.load(values + at + (2 * HALF * head + HALF), mask=mine, other=0.0)
        any_byte |= (codes != 0).to(tl.int32) | (codes_2 != 0).to(tl.int32)
        own = first * cosine + second * sine
        own_2 = second * cosine_2 + first * sine_2
        if LOW:
            first = _wide(tl.load(low + at + 2 * HALF * head, mask=mine, other=0))
            second = _wide(tl.load(low + at + (2 * HALF * head + HALF), mask=mine, other=0))
            turned = _rounded(_rounded(first * _wide(low_cosine)) + _rounded(second * _wide(low_sine)))
            differs = tl.abs(own - turned)
            most_noise = tl.maximum(most_noise, tl.where(differs < float("inf"), differs, 0.0))
            turned = _rounded(_rounded(second * _wide(low_cosine_2)) + _rounded(first * _wide(low_sine_2)))
            differs = tl.abs(own_2 - turned)
            most_noise = tl.maximum(most_noise, tl.where(differs < float("inf"), differs, 0.0))
        off = tl.abs(_decoded(codes, values, DTYPE) - own)
        off_2 = tl.abs(_decoded(codes_2, values, DTYPE) - own_2)
        bad |= ((off < float("inf")) == 0).to(tl.int32) | ((off_2 < float("inf")) == 0).to(tl.int32)
        most_off = tl.maximum(most_off, tl.where(off < float("inf"), off, float("-inf")))
        most_off = tl.maximum(most_off, tl.where(off_2 < float("inf"), off_2, float("-inf")))
    if LOW:
        limit = limit + noise * tl.max(most_noise, axis=1)
    fits = known & (tl.max(bad, axis=1) == 0) & (tl.max(most_off, axis=1) <= limit)
    tl.store(flags + n, (tl.max(any_byte, axis=1) + fits.to(tl.int32) * _FLAGS).to(tl.uint8), mask=there)


def token_rows(
    *,
    data: Any,
    begins: Any,
    rows: Any,
    positions: Any,
    table: TokenTable,
    turns: Turns | None,
    encoding: Encoding,
    flags: Any,
) -> None:
    """`token_rows.token_rows` on tensors: one launch."""
    count = len(flags)
    require_tensor("data", data, "uint8", 1)
    for name, one in (("begins", begins), ("rows", rows), ("positions", positions)):
        require_tensor(name, one, "int32", 1, length=count)
    require_tensor("flags", flags, "uint8", 1)
    if not count:
        return
    item = ITEM_BYTES[encoding.dtype]
    width = len(table.partners)
    tile = min(_TILE, triton.next_power_of_2(width))
    angles = (table.values, table.values, None, None, 0.0) if turns is None else turns
    cosines, sines, low_cosines, low_sines, noise = angles
    has_low = low_cosines is not None
    turned_by = cosines, sines, low_cosines if has_low else table.low, low_sines if has_low else table.low
    captured = data[: len(data) // item * item].view(_WORDS[item]), begins, rows, positions
    half = table.halves
    floats = item > 1 and not encoding.quantised  # codes of one byte are looked up, which the kernel of heads does not
    if half and turns is not None and floats and half & (half - 1) == 0 and 8 <= half <= _MOST_HALF:
        each = max(1, _PAIRS // half)
        _heads_kernel[(triton.cdiv(count, each),)](
            captured,
            (table.values, table.allowed, table.low),
            turned_by,
            flags,
            count,
            noise,
            DTYPE=encoding.dtype,
            ITEMS=ALIGNED // item,
            HEADS=width // (2 * half),
            HALF=half,
            LOW=has_low,
            R=each,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return
    each = max(1, (_NARROW_VALUES if tile <= _NARROW else _VALUES) // tile)
    period = 0 if turns is None else turns.cosines.shape[1]
    _token_rows_kernel[(triton.cdiv(count, each),)](
        captured,
        (table.values, table.allowed, table.partners, table.low),
        turned_by,
        _numbers_of(encoding.dtype, data.device),
        flags,
        count,
        (noise, encoding.scale, encoding.relative, encoding.absolute, NEAR_LARGEST * encoding.largest),
        DTYPE=encoding.dtype,
        SHAPE=(ALIGNED // item, width, table.values.shape[1], period, table.shift),
        LOW=has_low,
        QUANTISED=encoding.quantised,
        TILE=(each, tile),
        num_warps=8 if tile == _TILE else 4,
        enable_fp_fusion=False,
    )


def _numbers_of(dtype: str, device: Any) -> Any:
    key = dtype, device
    if key not in _numbers:
        _numbers[key] = torch.from_numpy(NUMBERS.get(dtype, NUMBERS["int8"])).to(device)
    return _numbers[key]
