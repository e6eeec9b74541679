"""Token rows: which captured rows are what a table of tokens says, turned by their position, within what the table allows.

Floats, so not plain loops but whole arrays, each number rounded by itself: no backend may fuse a product and a sum, and then all
give the same.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import ByteArray, Int32Array, require
from ...dispatch import has_device_form
from .encoding import ITEM_BYTES, FloatArray, float_values

Int16Array = npt.NDArray[np.int16]
FILLED, FITS = 1, 2  # bits of a flag
ALIGNED: Final = 16  # bytes: rows begin at multiples of it
NEAR_LARGEST: Final = 0.875
_AT_ONCE: Final = 1 << 18  # values


class TokenTable(NamedTuple):
    """What a token's row must hold where it stands at position 0: `values` `[rows, columns] float32`, of which the first
    `width` are compared, and how far each may be off, `allowed` `[rows] float32`.

    `partners` `[width] int32` is the column with which each turns; if `halves` is not 0, these are whole heads in which the first so many
    turn with the others, one by one; if `shift` is not 0, each stands so many columns behind. `low` `[rows, columns] int16`, if there are angles for it, is the
    same as bfloat16 computes it, as bits.
    """

    values: FloatArray
    allowed: FloatArray
    partners: Int32Array
    low: Int16Array
    halves: int = 0
    shift: int = 0


class Turns(NamedTuple):
    """How positions turn a row: value `i` is `own * cosines[p, i % period] + partner * sines[p, i % period]`, `[p, period] float32`.

    With `low_cosines` and `low_sines` `[p, period] int16`, bits of bfloat16, `low` is turned, too, each product and the sum rounded, and a
    row may be off by `noise` times more than the table allows: times the most by which the two differ in it.
    """

    cosines: FloatArray
    sines: FloatArray
    low_cosines: Int16Array | None = None
    low_sines: Int16Array | None = None
    noise: float = 0.0


class Encoding(NamedTuple):
    """What the captured bytes are: numbers of `dtype` times `scale`; what storing them so may change is `relative` of the value,
    and `absolute`. Values near `largest` and beyond, if it is not 0, are stored as who knows what, and fit.
    """

    dtype: str
    scale: float = 1.0
    relative: float = 0.0
    absolute: float = 0.0
    largest: float = 0.0

    @property
    def quantised(self) -> bool:
        """Whether storing changes values by more than the table allows for."""
        return self[1:] != (1.0, 0.0, 0.0, 0.0)


# By dtype how far a value may be from what was stored, as a part of it and in steps of the scale, and the largest: a code's distance
# to the next, since not every engine rounds to the nearest.
_STORED: Final = {
    "float8_e4m3fn": (2.0**-3, 2.0**-9, 448.0),
    "float8_e5m2": (2.0**-2, 2.0**-16, 57344.0),
    "int8": (0.0, 1.0, 127.0),
}


def encoding_of(dtype: str, scale: float) -> Encoding | None:
    """Return what the bytes of a stream are, None if nobody can say: of 8-bit values by what they are scaled, which is not 0."""
    if dtype not in _STORED:
        return Encoding(dtype) if dtype in ITEM_BYTES else None
    relative, absolute, largest = _STORED[dtype]
    return Encoding(dtype, scale, relative, absolute * scale, largest * scale) if 0 < scale < np.inf else None


@has_device_form("token_rows.triton")
def token_rows(
    *,
    data: ByteArray,
    begins: Int32Array,
    rows: Int32Array,
    positions: Int32Array,
    table: TokenTable,
    turns: Turns | None,
    encoding: Encoding,
    flags: ByteArray,
    backend: str = "reference",
) -> None:
    """Set flag `n` to `FILLED` if any of the row's bytes is not 0, and to `FITS` too if each of its values is what
    `table` has in row `rows[n]`, turned to `positions[n]`.

    `data` `[bytes] uint8`, in which row n begins at byte `16 * begins[n]`; all four `[n]`: `begins`, `rows`, `positions` int32,
    `flags` uint8. A row below 0 fits nothing, nor does one in which the table or the turns hold NaN.
    """
    require("data", data, np.uint8, 1)
    for name, one in (("begins", begins), ("rows", rows), ("positions", positions)):
        require(name, one, np.int32, 1, length=len(flags))
    require("flags", flags, np.uint8, 1, written=True)
    del backend  # there is one way on the CPU
    width = len(table.partners)
    size = width * ITEM_BYTES[encoding.dtype]
    period = 0 if turns is None else turns.cosines.shape[1]
    columns = np.arange(width) % max(1, period)
    step = max(1, _AT_ONCE // width)
    for at in range(0, len(flags), step):
        some = slice(at, at + step)
        raw = _bytes(data, begins[some].astype(np.int64), size)
        with np.errstate(invalid="ignore", over="ignore"):
            got = stored_values(raw, encoding)
            mine = np.maximum(rows[some], 0)
            expected = table.values[mine]
            own, limit = expected[:, :width], table.allowed[mine]
            if turns is not None:
                place = positions[some][:, None], columns
                own = own * turns.cosines[place] + expected[:, table.partners] * turns.sines[place]
                if turns.low_cosines is not None and turns.low_sines is not None:
                    low = _wide(table.low[mine])
                    turned = _rounded(low[:, :width] * _wide(turns.low_cosines[place]))
                    turned = _rounded(turned + _rounded(low[:, table.partners] * _wide(turns.low_sines[place])))
                    differs = np.abs(own - turned)
                    differs = np.where(differs < np.inf, differs, np.float32(0))
                    limit = limit + np.float32(turns.noise) * differs.max(axis=1, initial=0)
            off = too_far(got, own, encoding)
            near = (off <= limit[:, None]) & (off < np.inf)
        fits = near.all(axis=1) & (rows[some] >= 0)
        flags[some] = raw.any(axis=1) * FILLED + fits * FITS


def stored_values(rows: ByteArray, encoding: Encoding) -> FloatArray:
    """Return the values `[n, items]` that rows of bytes `[n, width]` stand for."""
    got = float_values(rows, encoding.dtype)
    return got * np.float32(encoding.scale) if encoding.quantised else got


def too_far(got: FloatArray, right: FloatArray, encoding: Encoding) -> FloatArray:
    """Return by how much values are off, beyond what storing them may have changed; below 0 if by less."""
    off: FloatArray = np.abs(got - right)
    if encoding.quantised:
        much = np.abs(right)
        off = off - (much * np.float32(encoding.relative) + np.float32(encoding.absolute))
        beyond = (encoding.largest > 0) & (much >= np.float32(NEAR_LARGEST * encoding.largest))
        off = np.where(beyond, np.float32(0), off)
    return off


def _wide(bits: Int16Array) -> FloatArray:
    """Return bits of bfloat16 as float32."""
    return (bits.astype(np.int32) << 16).view(np.float32)


def _rounded(values: FloatArray) -> FloatArray:
    """Return finite float32 as bfloat16 rounds them, to the nearest, ties to even."""
    bits = values.view(np.int32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) & -0x10000).view(np.float32)


def _bytes(data: ByteArray, begins: Any, size: int) -> ByteArray:
    """Return the `size` bytes from each begin on, `[n, size]`; by words of eight if they end so."""
    if size % 8:
        return data[begins[:, None] * ALIGNED + np.arange(size)]
    words = data[: len(data) // 8 * 8].view(np.uint64)
    return words[begins[:, None] * (ALIGNED // 8) + np.arange(size // 8)].view(np.uint8)
