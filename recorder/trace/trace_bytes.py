"""A trace's bytes, read into memory of our own: what was checked is what is used, whatever becomes of the file.

A mapped file shows what somebody writes into it after it was checked, and ends the process if it was cut short.
"""

import errno
import os
from typing import Final, Self

import pyarrow as pa

from ..remote import RemoteFile
from .schema import MAX_BATCH_RATIO, MAX_FREE_BATCH_BYTES

ALIGNMENT: Final = 64
_FETCHED_AHEAD: Final = 4  # chunks of an object


class TornError(Exception):
    """The file ends before the bytes that were asked for; it was cut short."""


class TraceBytes:
    """An open file; takes the descriptor over. Any number of threads may read."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor  # -1 once it is closed

    def size(self) -> int:
        """Return the file's size at this moment; raise `OSError` once it is closed."""
        return os.fstat(self.descriptor).st_size

    def held_bytes(self) -> int:
        """Return what the file takes on its disk, at most its size: a hole is as long as whoever made it likes."""
        found = os.fstat(self.descriptor)
        return min(found.st_size, 512 * found.st_blocks)

    def data_from(self, start: int) -> int | None:
        """Return where there is something else than a hole from `start` on, None if there is nothing."""
        try:
            return os.lseek(self.descriptor, start, os.SEEK_DATA)
        except (OSError, AttributeError) as error:
            return None if getattr(error, "errno", 0) == errno.ENXIO else start

    def is_mostly_hole(self, num_bytes: int) -> bool:
        """Whether so many bytes are many times what the file holds: no memory is to be taken for them."""
        return num_bytes > MAX_FREE_BATCH_BYTES and num_bytes > MAX_BATCH_RATIO * self.held_bytes()

    def again(self) -> Self:
        """Return the same file with a descriptor of its own, for one who may outlive this one."""
        return type(self)(os.dup(self.descriptor))

    def close(self) -> None:
        """Close the file."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read(self, start: int, end: int) -> memoryview:
        """Return bytes `start` to `end`, all of them; raise `TornError` and `OSError`."""
        if self.is_mostly_hole(end - start):
            raise TornError("is a hole in the file")
        data = memoryview(pa.allocate_buffer(end - start)).cast("B")
        self.fill(data, start)
        return data

    def read_some(self, start: int, end: int) -> memoryview:
        """Return what there is of bytes `start` to `end`; raise `OSError`."""
        data = memoryview(pa.allocate_buffer(end - start)).cast("B")
        return data[: self._read(data, start)]

    def fill(self, data: memoryview, start: int) -> None:
        """Read so many bytes as `data` has; raise `TornError` and `OSError`."""
        if self._read(data, start) < len(data):
            raise TornError("was cut off while it was read")

    def _read(self, data: memoryview, start: int) -> int:
        done = 0
        while done < len(data) and (came := os.preadv(self.descriptor, [data[done:]], start + done)):
            done += came
        return done


class RemoteBytes(TraceBytes):
    """An object of a store, which is whole and stays as it is; takes it over. `again` gives one that fetches ahead."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__(-1)
        self._file = file

    def size(self) -> int:
        """Return the object's size."""
        return self._file.size

    held_bytes = size

    def data_from(self, start: int) -> int | None:
        """Return `start`: a store has no holes."""
        return start if start < self._file.size else None

    def again(self) -> Self:
        """Return the same object opened anew, for who reads it from end to end."""
        return type(self)(self._file.again(ahead=_FETCHED_AHEAD))

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def _read(self, data: memoryview, start: int) -> int:
        return self._file.read_into(data, start)


def aligned(size: int, before: int) -> tuple[pa.Buffer, memoryview]:
    """Return memory of `size` bytes whose byte `before` is aligned as Arrow wants it, and a view to fill it by."""
    data, skip = pa.allocate_buffer(size + ALIGNMENT), -before % ALIGNMENT
    return data.slice(skip, size), memoryview(data).cast("B")[skip : skip + size]
