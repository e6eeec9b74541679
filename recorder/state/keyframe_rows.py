"""Rows of a keyframe put where they belong: run by run, since most are long, else row by row."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...kernels.constants import RECORD_KV_HASH
from ..trace.slot_runs import runs_to_slots
from .forward import UnusableEventError

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[Any]

# Shorter runs than this in the mean are put in place by their indices, all at once.
_LONG_RUN: Final = 16
# What is copied to several places goes in pieces of so many rows, which stay in the processor's cache.
_PIECE_ROWS: Final = 2048


class KeyframeRows:
    """The rows that a part of a keyframe names, `counts[r]` from `starts[r]` on, and their bytes one after another.

    Args:
        name: the array's, for messages.
        starts, counts: `[runs] int64`.
        data: `[total * row bytes] uint8`.
        limit: how many rows the array has.
        row_bytes: bytes of a row.

    Raises:
        UnusableEventError: there are no such rows, or the bytes are not theirs.
    """

    def __init__(
        self, name: str, starts: Int64Array, counts: Int64Array, data: ByteArray, *, limit: int, row_bytes: int
    ) -> None:
        # Differences, not sums: hostile numbers wrap around.
        if bool(((starts < 0) | (counts < 0) | (starts > limit) | (counts > limit - starts)).any()):
            raise UnusableEventError(f"rows of {name} that there are not, it has {limit}")
        total = counts.sum(dtype=np.float64)  # of hostile counts, which int64 might not hold
        if total * row_bytes != len(data):
            raise UnusableEventError(f"{len(data)} bytes for {total:.0f} rows of {name} of {row_bytes} bytes each")
        self._starts, self._counts = starts, counts
        self._total = int(total)
        self._data = data.reshape(self._total, row_bytes)

    def put(self, place: AnyArray) -> None:
        """Write them to an array `[limit, ...]` of any type."""
        if place.dtype == np.bool_:
            self._put(place, (self._data != 0).reshape(self._total))
        elif place.flags.c_contiguous and place.flags.aligned:
            self._put(place.reshape(len(place), -1).view(np.uint8), self._data)
        else:
            self._put(place, self.values(place.dtype).reshape(self._total, *place.shape[1:]))

    def put_records(self, whole: Sequence[Int64Array], without_hash: Sequence[Int64Array]) -> None:
        """Write them, canary records, to arrays `[limit, 4] int64`: as they are, and with KV hash 0."""
        words = self.values(np.dtype(np.int64))
        for rows, values in self._pieces(words, _PIECE_ROWS):
            for place in whole:
                place[rows] = values
            values[:, RECORD_KV_HASH] = 0
            for place in without_hash:
                place[rows] = values

    def values(self, dtype: np.dtype[Any]) -> AnyArray:
        """Return the rows' values, `[total, row bytes / item size]`, in memory of their own."""
        return self._data.copy().view(dtype)

    def _put(self, place: AnyArray, values: AnyArray) -> None:
        for rows, mine in self._pieces(values, self._total):
            place[rows] = mine

    def _pieces(self, values: AnyArray, most: int) -> Iterator[tuple[slice | Int64Array, AnyArray]]:
        """Yield which rows come next and their values; where runs are long, run by run and at most `most` rows a time."""
        if self._total < _LONG_RUN * len(self._starts):
            yield runs_to_slots(self._starts, self._counts), values
            return
        at = 0
        for start, count in zip(self._starts.tolist(), self._counts.tolist(), strict=True):
            for row in range(start, start + count, most):
                end = min(row + most, start + count)
                yield slice(row, end), values[at : at + end - row]
                at += end - row
