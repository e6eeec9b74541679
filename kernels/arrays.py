"""What an op demands of the arrays it is given, checked by shape and dtype only, never element by element."""

from typing import Any

import numpy as np
import numpy.typing as npt

from .constants import RECORD_BYTES


def require(
    name: str,
    array: Any,
    dtype: npt.DTypeLike,
    ndim: int,
    *,
    length: int | None = None,
    written: bool = False,
) -> None:
    """Raise `TypeError` or `ValueError` unless `array` is what compiled code may walk without looking.

    `length` is the first axis's; `written` asks for a writable array. Any stride will do.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a {type(array).__name__}, expected a numpy array of {np.dtype(dtype)}")
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}, expected {np.dtype(dtype)}; convert it with .astype")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {list(array.shape)}, expected {ndim} axes")
    if length is not None and array.shape[0] != length:
        raise ValueError(f"{name} has length {array.shape[0]}, expected {length}")
    if written and not array.flags.writeable:
        raise ValueError(f"{name} is read-only, but results go there; pass a writable array")
    if not array.flags.aligned:
        raise ValueError(f"{name} does not start at a multiple of its item size; pass a copy")


def record_words(canary: Any, *, written: bool) -> npt.NDArray[np.int64]:
    """View a canary buffer `[num_slots, stride] uint8` as its records, `[num_slots, 4] int64`, without a copy.

    Raises `ValueError` where stride < 32, or it or the distance between slots is not a multiple of 8, or a slot's
    bytes are not contiguous.
    """
    require("canary", canary, np.uint8, 2, written=written)
    if canary.shape[1] < RECORD_BYTES or canary.shape[1] % 8:
        raise ValueError(f"canary has slots of {canary.shape[1]} bytes, expected a multiple of 8, at least 32")
    if canary.strides[1] != 1 or canary.strides[0] % 8:
        raise ValueError(
            f"canary has strides {list(canary.strides)}, expected contiguous slots at a distance that 8 divides"
        )
    words: npt.NDArray[np.int64] = canary[:, :RECORD_BYTES].view(np.int64)
    if not words.flags.aligned:
        raise ValueError("canary does not start at a multiple of 8 bytes; allocate it as int64 and view it as uint8")
    return words
