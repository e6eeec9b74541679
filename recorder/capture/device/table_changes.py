"""Changes of block tables and full-to-SWA tables, from what the device found to the columns of an event."""

from collections.abc import Sequence

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.capture.changes import cells_to_runs
from ....kernels.capture.frames import RunnerOnDevice
from ...trace.header import TraceHeader
from ..forward_event import lut_columns, table_columns
from ..host_arrays import ragged_index, wrapped
from .frame_reader import Frame

_NOTHING = np.empty((0, 3), np.int64)


class TableChanges:
    """Keeps what could not be recorded with its own forward, and a copy of the full-to-SWA tables.

    Args:
        header: what the engine is.
        runners: each runner's tables.
    """

    def __init__(self, header: TraceHeader, runners: Sequence[RunnerOnDevice]) -> None:
        self._header = header
        self._runners = runners
        self._luts = [np.zeros(length, np.int64) for length in header.lut_lens]
        self._table_cells: list[list[Int64Array]] = [[] for _ in header.tables]
        self._lut_cells: list[Int64Array] = []

    def columns(self, runner: int, frame: Frame) -> dict[str, Int64Array]:
        """Return the columns of everything that is not yet recorded, this forward's changes included."""
        table = self._runners[runner].table_number
        self._take_luts(runner, frame)
        self._table_cells[table].append(frame.table_changes)
        columns = table_columns([cells_to_runs(*_latest(cells).T) for cells in self._table_cells])
        columns |= lut_columns([cells_to_runs(*_latest(self._lut_cells).T)])
        for cells in self._table_cells:
            cells.clear()
        self._lut_cells.clear()
        return columns

    def keep(self, runner: int, frame: Frame) -> None:
        """Keep the changes of a forward that is not recorded, and what it itself put into the table."""
        table = self._runners[runner].table_number
        self._take_luts(runner, frame)
        forward, slots = frame.forward, frame.slots
        lens = forward.new_lens
        lens = np.minimum(lens, np.maximum(slots.size - (np.cumsum(lens) - lens), 0))
        rows, positions = np.repeat(forward.rows, lens), ragged_index(forward.prefix_lens, lens)
        written = np.stack((rows, positions, wrapped(slots[: rows.size])), axis=1)
        shape = self._header.tables[table]
        inside = (rows > 0) & (rows < shape.rows) & (positions >= 0) & (positions < shape.width)
        self._table_cells[table] += [frame.table_changes, written[inside]]

    def forget(self) -> None:
        """Start anew, as the device does after a reset."""
        for lut in self._luts:
            lut.fill(0)
        for cells in self._table_cells:
            cells.clear()
        self._lut_cells.clear()

    def in_group(self, group: int, slots: Int64Array) -> Int64Array:
        """Return slots in a group's own numbering, -1 if its full-to-SWA table has no entry for one."""
        lut = self._header.groups[group].lut
        if lut < 0:
            return slots
        inside = (slots >= 0) & (slots < self._luts[lut].size)
        return np.where(inside, self._luts[lut][np.where(inside, slots, 0)], -1)

    def _take_luts(self, runner: int, frame: Frame) -> None:
        for place, lut in enumerate(self._runners[runner].luts):
            cells = frame.lut_changes[frame.lut_changes[:, 0] == place]
            cells[:, 0] = lut.number
            self._luts[lut.number][cells[:, 1]] = cells[:, 2]
            self._lut_cells.append(cells)


def _latest(parts: Sequence[Int64Array]) -> Int64Array:
    """Return entries of two keys and a value ordered by their keys, each pair of keys once, with its last value."""
    cells = np.concatenate(parts) if parts else _NOTHING
    cells = cells[np.lexsort((cells[:, 1], cells[:, 0]))]
    last = np.ones(len(cells), np.bool_)
    last[:-1] = (cells[1:, :2] != cells[:-1, :2]).any(axis=1)
    return cells[last]
