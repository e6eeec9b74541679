"""What an op demands of the arrays it is given, checked by shape and dtype only, never element by element."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from .constants import RECORD_BYTES

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Int16Array = npt.NDArray[np.int16]
ByteArray = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]


def require(
    name: str, array: Any, dtype: npt.DTypeLike, ndim: int, *, length: int | None = None, written: bool = False
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


def is_tensor(array: Any) -> bool:
    """Tell a torch tensor from a numpy array, without torch."""
    return not isinstance(array, np.ndarray) and hasattr(array, "data_ptr")


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return np.dtype(dtype).name


@functools.cache
def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def require_tensor(name: str, array: Any, dtype: str, ndim: int, *, length: int | None = None) -> None:
    """Raise `TypeError` or `ValueError` unless `array` is a tensor that device kernels may walk without looking.

    `dtype` is numpy's name; the last axis must be packed; a tensor of one axis is contiguous thereby.
    """
    if not is_tensor(array):
        raise TypeError(
            f"{name} is a {type(array).__name__}, expected a torch tensor of {dtype}, as for backend='triton'"
        )
    wanted = _torch_dtype(dtype)
    if array.dtype is wanted and array.dim() == ndim and array.is_contiguous() and length in (None, array.shape[0]):
        return  # launches are asked for by the thousand
    if array.dtype != wanted:
        raise TypeError(f"{name} has dtype {array.dtype}, expected {dtype}; convert it with .to")
    if array.dim() != ndim:
        raise ValueError(f"{name} has shape {list(array.shape)}, expected {ndim} axes")
    if length is not None and array.shape[0] != length:
        raise ValueError(f"{name} has length {array.shape[0]}, expected {length}")
    if array.numel() and array.shape[-1] > 1 and array.stride(-1) != 1:
        raise ValueError(f"{name} has strides {list(array.stride())}, expected packed rows; pass .contiguous()")


def require_either(
    name: str, array: Any, dtype: Any, ndim: int, *, length: int | None = None, written: bool = False
) -> None:
    """`require` for a numpy array, `require_tensor` for a torch tensor: for what travels to any backend."""
    if is_tensor(array):
        require_tensor(name, array, _dtype_name(dtype), ndim, length=length)
    else:
        require(name, array, dtype, ndim, length=length, written=written)


def filled(shape: int | tuple[int, ...], dtype: Any, value: int, device: Any) -> Any:
    """Return an array full of `value`: numpy's where `device` is None, else a torch tensor there."""
    if device is None:
        # Zeros that nobody has touched take no memory yet, and a large log is seldom filled.
        return np.full(shape, value, dtype) if value else np.zeros(shape, dtype)
    import torch

    return torch.full(
        (shape,) if isinstance(shape, int) else shape, value, dtype=getattr(torch, np.dtype(dtype).name), device=device
    )


def record_stride(canary: Any) -> int:
    """Return how many words lie from record to record of a canary tensor, checked as `record_words` checks an array."""
    require_tensor("canary", canary, "uint8", 2)
    _require_records(canary.shape[1], list(canary.stride()), canary.data_ptr() % 8)
    return int(canary.stride(0)) // 8


def record_words(canary: Any, *, written: bool) -> Int64Array:
    """View a canary buffer `[num_slots, stride] uint8` as its records, `[num_slots, 4] int64`, without a copy.

    Raises `ValueError` where stride < 32, or it or the distance between slots is not a multiple of 8, or a slot's
    bytes are not contiguous.
    """
    require("canary", canary, np.uint8, 2, written=written)
    _require_records(
        canary.shape[1], list(canary.strides), canary.__array_interface__["data"][0] % 8 if canary.size else 0
    )
    words: Int64Array = canary[:, :RECORD_BYTES].view(np.int64)
    return words


def _require_records(width: int, strides: list[int], offset: int) -> None:
    if width < RECORD_BYTES or width % 8:
        raise ValueError(f"canary has slots of {width} bytes, expected a multiple of 8, at least 32")
    if strides[1] != 1 or strides[0] % 8:
        raise ValueError(f"canary has strides {strides}, expected contiguous slots at a distance that 8 divides")
    if offset:
        raise ValueError("canary does not start at a multiple of 8 bytes; allocate it as int64 and view it as uint8")
