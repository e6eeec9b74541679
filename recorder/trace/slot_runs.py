"""Slots as runs of neighbours, the form in which events name them, and back."""

import numpy as np
import numpy.typing as npt

from ..capture.host_arrays import Int64Array, ragged_index


def slots_to_runs(slots: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return `(starts, counts)`, `[n] int64` each, of the runs that hold each slot of `slots` once, ascending."""
    return ordered_runs(np.unique(slots))


def ordered_runs(slots: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return `(starts, counts)` of the runs whose slots, one after another, are `slots` in the same order."""
    if not slots.size:
        return slots.copy(), slots.copy()
    first = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    return slots[first], np.diff(first, append=slots.size).astype(np.int64)


def mask_to_runs(mask: npt.NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
    """Return the runs of slots whose mask is set."""
    return slots_to_runs(np.flatnonzero(mask).astype(np.int64))


def fewer_runs(starts: Int64Array, counts: Int64Array, most: int) -> tuple[Int64Array, Int64Array]:
    """Return at most `most` (1 or more) runs that hold the slots of ascending ones, with the smallest gaps filled."""
    if starts.size <= most:
        return starts, counts
    ends = starts + counts
    gaps = starts[1:] - ends[:-1]
    wide = np.sort(np.argpartition(gaps, gaps.size - most)[gaps.size - most + 1 :])
    starts = starts[np.concatenate(([0], wide + 1))]
    return starts, ends[np.concatenate((wide, [ends.size - 1]))] - starts


def runs_to_slots(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return the slots of runs, in their order; a negative count is none."""
    return ragged_index(starts, np.maximum(counts, 0))
