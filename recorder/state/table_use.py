"""How far each row of the state tables was ever filled, so that a keyframe need not look through all of them."""

import numpy as np
import numpy.typing as npt

from ..trace.header import TraceHeader
from ..trace.reader import EventView
from .forward import Forward

Int64Array = npt.NDArray[np.int64]


class TableUse:
    """`ends[t]` and `truth_ends` `[rows] int64`: the end of what was ever written of each row.

    `truth_fill` is what the truth tokens hold behind it: 0, or -1 once everything was taken for unknown.
    """

    def __init__(self, header: TraceHeader) -> None:
        self._widths = [table.width for table in header.tables]
        self._truth_width = 0 if header.truth_table is None else header.truth_table.width
        self.ends = [np.zeros(table.rows, np.int64) for table in header.tables]
        self.truth_ends = np.zeros(0 if header.truth_table is None else header.truth_table.rows, np.int64)
        self.truth_fill = 0

    def forget(self) -> None:
        """Start anew, as the tables do after a gap."""
        for ends in (*self.ends, self.truth_ends):
            ends[:] = 0
        self.truth_fill = -1

    def take_changes(self, view: EventView) -> None:
        """Note the changes that an event carries, which were applied."""
        rows, starts, counts = (view.ints(f"table_{column}") for column in ("row", "start", "count"))
        if len(rows):
            index = view.ints("table_index")
            for number, ends in enumerate(self.ends):
                mine = index == number
                self._reach(ends, rows[mine], (starts + counts)[mine], self._widths[number])
        rows, starts, counts = (view.ints(f"truth_{column}") for column in ("row", "start", "count"))
        if len(rows) and len(self.truth_ends):
            self._reach(self.truth_ends, rows, starts + counts, self._truth_width)

    def take_forward(self, forward: Forward) -> None:
        """Note what a forward wrote itself."""
        rows, end = forward.req_pool_indices, forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        for ends, width in zip(self.ends, self._widths, strict=True):
            self._reach(ends, rows, end, width)
        if len(self.truth_ends) and len(forward.sampled_lens):
            self._reach(self.truth_ends, rows, end + forward.sampled_lens, self._truth_width)

    def _reach(self, ends: Int64Array, rows: Int64Array, to: Int64Array, width: int) -> None:
        inside = (rows >= 0) & (rows < len(ends))
        np.maximum.at(ends, rows[inside], np.minimum(to[inside], width))


def cells(ends: Int64Array, width: int) -> tuple[Int64Array, Int64Array]:
    """Return the used cells as runs `(starts, counts)` of a table seen as one line of cells, `[n] int64` each."""
    rows = np.flatnonzero(ends)
    return rows * width, ends[rows]
