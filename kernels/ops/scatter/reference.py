"""Scatter: lay each request's committed tokens, given one after another, into its row of the truth table."""

import numpy as np

from ...arrays import Int32Array, Int64Array, require
from ...dispatch import In64, Out32x2, Out64, has_device_form, select
from ..hash.reference import as_i32, as_u64, bump


def scatter_loops(flat: In64, offsets: In64, rows: In64, pool: Out32x2, out_of_range: Out64) -> None:
    """Copy request r's tokens `flat[offsets[r] : offsets[r + 1]]` to the start of `pool[rows[r]]`, requests in order."""
    if len(flat) == 0:
        return
    for r in range(len(rows)):
        start = int(offsets[r])
        end = int(offsets[r + 1])
        row = int(rows[r])
        if start < 0 or end < start or end > len(flat):
            bump(out_of_range, 1)
            start = max(0, start)
            end = min(end, len(flat))
        if end <= start:
            continue
        if row < 0 or row >= pool.shape[0]:
            bump(out_of_range, 1)
            continue
        for t in range(min(end - start, pool.shape[1])):
            pool[row, t] = as_i32(as_u64(flat[start + t]))


@has_device_form("scatter.triton")
def scatter(
    *,
    flat: Int64Array,
    offsets: Int64Array,
    rows: Int64Array,
    pool: Int32Array,
    out_of_range: Int64Array | None = None,
    backend: str = "cpu",
) -> None:
    """Put token t of request r at `pool[rows[r], t]` where the row is wide enough; the rest of the pool stays.

    `flat` [total] int64, cut to 32 bits on the way; `offsets` [bs + 1] int64; `rows` [bs] int64, of a row given twice
    the later request's tokens stand; `pool` [num_rows, width] int32. `out_of_range` [1] int64, if given, grows by one
    for each request whose row the pool does not have or whose offsets run backwards or past `flat`; only what lies
    within is copied. Raises `TypeError` and `ValueError` for ranks, dtypes and lengths.
    """
    require("flat", flat, np.int64, 1)
    require("rows", rows, np.int64, 1)
    require("offsets", offsets, np.int64, 1, length=len(rows) + 1)
    require("pool", pool, np.int32, 2, written=True)
    counter = np.zeros(1, np.int64) if out_of_range is None else out_of_range
    require("out_of_range", counter, np.int64, 1, length=1, written=True)
    select(scatter_loops, backend)(flat, offsets, rows, pool, counter)
