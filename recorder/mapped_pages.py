"""Giving a mapped file's pages back: memory must not grow with the length of a trace that is read through once."""

import ctypes
import mmap
import sys
from typing import Final

import pyarrow as pa

# At once: a system call for every small batch would cost more than the pages.
_AT_LEAST_BYTES: Final = 8 << 20


class MappedPages:
    """The pages behind a mapped buffer, given back to the system up to where reading has come.

    What still looks at them reads them anew from the file; nothing becomes wrong. Where the system cannot do it,
    nothing happens.
    """

    def __init__(self, data: pa.Buffer) -> None:
        self._address = int(data.address)
        self._done = 0
        self._advice = getattr(mmap, "MADV_DONTNEED", None)
        self._library = ctypes.CDLL(None) if sys.platform == "linux" else None

    def release(self, end: int) -> None:
        """Give back what lies before byte `end` of the buffer."""
        end -= end % mmap.PAGESIZE
        aligned = self._address % mmap.PAGESIZE == 0
        if self._library is None or self._advice is None or not aligned or end - self._done < _AT_LEAST_BYTES:
            return
        begin = ctypes.c_void_p(self._address + self._done)
        self._library.madvise(begin, ctypes.c_size_t(end - self._done), ctypes.c_int(self._advice))
        self._done = end
