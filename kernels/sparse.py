"""Zeros of which memory backs only what is touched, page by small page."""

import contextlib
import mmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_SMALL: Final = 1 << 22  # bytes; below, numpy asks for no huge pages


def sparse_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return zeros for a table whose rows are long and hardly used.

    numpy asks for huge pages, so that each row's beginning takes 2 MiB, which the kernel clears first: of a table of
    257 rows of 120,000 entries that is most of it. Raises `MemoryError` where there is no room.
    """
    kind = np.dtype(dtype)
    size = kind.itemsize
    for length in shape:
        size *= length
    if size < _SMALL or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, kind)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise MemoryError(f"no room for zeros of shape {shape} and type {kind}") from None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, kind).reshape(shape)
