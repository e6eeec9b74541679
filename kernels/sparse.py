"""Zeros of which memory backs only what is touched, page by small page."""

import contextlib
import mmap
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_SMALL: Final = 1 << 22  # bytes; below, numpy asks for no huge pages
MANY_SLOTS: Final = 1 << 20  # what an event that names fewer takes is not worth a look at the machine
NAMED_SLOT_BYTES: Final = 128  # at most, while an event is judged that names the slot for the first time


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


def free_memory_bytes() -> int | None:
    """Return how much memory this machine can still give, None if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def require_memory_for(num_slots: int) -> None:
    """Raise `MemoryError` if an event names so many slots that judging them may end the process.

    Memory that is asked for and never touched costs nothing, so a kernel grants any amount, and ends somebody's process
    when it is used. An event of a few bytes can touch all of a pool.
    """
    if num_slots < MANY_SLOTS:
        return
    need, free = num_slots * NAMED_SLOT_BYTES, free_memory_bytes()
    if free is not None and need > free:
        raise MemoryError(
            f"an event names {num_slots} slots, for which {need / 2**30:.1f} GiB are needed; {free / 2**30:.1f} are free"
        )
