"""In which order the launches of one event leave their rows, told from the rows themselves.

This is the order of docs/reference/replay.md: HEAD of each group and half, verify before write; then TAIL verify of the groups
that read before they write; then TAIL of the others. Rows of one verify launch come request by request, as the batch
has them, and by position; those of a sweep as the sweep lists its slots.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from ....kernels.constants import FailReason, LaunchTag
from ....recorder.trace.header import TraceHeader

Int64Array = npt.NDArray[np.int64]

_WRITES: Final = int(FailReason.WRITE_TOKEN | FailReason.WRITE_POSITION)
_TAGS: Final = [tag.name.split("_") for tag in LaunchTag]
SWEEP_TAGS: Final = np.array([endpoint == "SWEEP" for endpoint, _, _ in _TAGS])


def are_writes(bits: Int64Array) -> npt.NDArray[np.bool_]:
    """Return whether rows are of write launches, by their reason bits."""
    found: npt.NDArray[np.bool_] = (bits & _WRITES) != 0
    return found


def launch_ranks(header: TraceHeader) -> Int64Array:
    """Return a number for each launch of an event, `[groups, tags, 2] int64`, last verify and write: lower comes first."""
    ranks = np.zeros((len(header.groups), len(LaunchTag), 2), np.int64)
    for number, group in enumerate(header.groups):
        for tag, (endpoint, half, _) in enumerate(_TAGS):
            place = group.halves.index(half) if half in group.halves else len(group.halves)
            for is_write in (0, 1):
                early = group.reads_before_write and not is_write
                phase = 0 if endpoint != "TAIL" else 1 if early else 2
                ranks[number, tag, is_write] = ((phase * len(header.groups) + number) * 3 + place) * 2 + is_write
    return ranks


def first_places(keys: Int64Array) -> Int64Array:
    """Return for each of `[n]` or `[n, k]` keys the first place where an equal one stands, `[n] int64`."""
    if not len(keys):
        return np.zeros(0, np.int64)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    found: Int64Array = first[inverse.reshape(-1)]
    return found


def out_of_order(launches: Int64Array, columns: tuple[Int64Array, ...]) -> npt.NDArray[np.bool_]:
    """Return whether a row belongs, by `columns`, most weighty first, before the row ahead of it in its launch."""
    wrong = np.zeros(len(launches), np.bool_)
    tie = launches[1:] == launches[:-1]
    for column in columns:
        wrong[1:] |= tie & (column[1:] < column[:-1])
        tie = tie & (column[1:] == column[:-1])
    return wrong
