"""Which cells of a host table changed, and what they hold now: what keeps a copy of the table on a device the same."""

import numpy as np
import numpy.typing as npt

from .arrays import Int32Array, Int64Array
from .dispatch import In32x2, In64, Out32, Out64, select


def read_cells_loops(
    rows: In64, starts: In64, counts: In64, table: In32x2, base: int, cells: Out64, values: Out32, filled: Out64
) -> None:
    """Append the cells of runs, numbered from `base` on row by row, and their values; what lies outside is left out."""
    at = filled[0]
    for run in range(rows.shape[0]):
        row = rows[run]
        if row < 0 or row >= table.shape[0]:
            continue
        start = min(max(starts[run], 0), table.shape[1])
        end = start + min(max(counts[run], 0), table.shape[1] - start, cells.shape[0] - at)
        for position in range(start, end):
            cells[at] = base + row * table.shape[1] + position
            values[at] = table[row, position]
            at += 1
    filled[0] = at


def read_cells(
    *,
    rows: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    table: npt.NDArray[np.int32],
    base: int,
    cells: Int64Array,
    values: Int32Array,
    filled: Int64Array,
    backend: str = "cpu",
) -> None:
    """Append what the cells of runs of a table hold.

    Args:
        rows, starts, counts: `[n] int64`: run i is `table[rows[i], starts[i] ...]`, `counts[i]` cells.
        table: `[rows, width] int32`.
        base: the number of the table's first cell.
        cells, values: `[room] int64`, `[room] int32`: where numbers and values go; runs that find no room are cut.
        filled: `[1] int64`: how many are there already, moved on.
        backend: see `dispatch.select`.
    """
    select(read_cells_loops, backend)(rows, starts, counts, table, base, cells, values, filled)
