"""How far the sliding-window pool has diverged from the full one, over what a batch's requests have cached."""

import numpy as np
import numpy.typing as npt

from .dispatch import In32x2, In64, Out64, select

Int64Array = npt.NDArray[np.int64]


def swa_divergence_loops(rows: In64, starts: In64, ends: In64, req_to_token: In32x2, lut: In64, counts: Out64) -> None:
    """Count, over positions starts .. ends - 1, slots without a sliding-window half and slots with another index."""
    for r in range(rows.shape[0]):
        row = rows[r]
        if row <= 0 or row >= req_to_token.shape[0]:
            continue
        for position in range(max(starts[r], 0), min(ends[r], req_to_token.shape[1])):
            slot = req_to_token[row, position]
            if slot < 0 or slot >= lut.shape[0]:
                continue
            swa = lut[slot]
            if swa == 0:
                counts[0] += 1
            elif swa != slot:
                counts[1] += 1


def swa_divergence(
    *,
    rows: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
    req_to_token: npt.NDArray[np.int32],
    lut: Int64Array,
    backend: str = "cpu",
) -> tuple[int, int]:
    """Return how many cached positions have no sliding-window slot, and how many have one of another index.

    `rows`, `starts`, `ends` `[bs] int64`: positions starts .. ends - 1 of each row (row 0 is padding); `req_to_token`
    `[rows, width] int32`; `lut` `[full slots] int64`. Slots that the table does not have are passed over.
    """
    counts = np.zeros(2, np.int64)
    select(swa_divergence_loops, backend)(rows, starts, ends, req_to_token, lut, counts)
    return int(counts[0]), int(counts[1])
