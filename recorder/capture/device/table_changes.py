"""Changes of block tables and full-to-SWA tables, from what the device found to the columns of an event."""

from collections.abc import Sequence

import numpy as np

from ....kernels.arrays import Int64Array
from ...trace.header import TraceHeader
from ..host_arrays import ordered_runs, ragged_index, wrapped
from .frame_reader import Frame

_NOTHING = np.empty((0, 3), np.int64)


class TableChanges:
    """Keeps what could not be recorded with its own forward, and a copy of the full-to-SWA tables.

    Args:
        header: what the engine is.
        runners: each runner's table, and its full-to-SWA tables, as the header numbers them.
    """

    def __init__(self, header: TraceHeader, runners: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        self._header = header
        self._runners = runners
        self._luts = [np.zeros(length, np.int64) for length in header.lut_lens]
        self._table_cells: list[list[Int64Array]] = [[] for _ in header.tables]
        self._lut_cells: list[Int64Array] = []

    def columns(self, runner: int, frame: Frame) -> dict[str, Int64Array]:
        """Return the columns of everything that is not yet recorded, this forward's changes included."""
        table, _ = self._runners[runner]
        self._take_luts(runner, frame)
        self._table_cells[table].append(frame.table_changes)
        columns = _table_columns(self._table_cells) | _lut_columns(self._lut_cells)
        for cells in self._table_cells:
            cells.clear()
        self._lut_cells.clear()
        return columns

    def keep(self, runner: int, frame: Frame) -> None:
        """Keep the changes of a forward that is not recorded, and what it itself put into the table."""
        table, _ = self._runners[runner]
        self._take_luts(runner, frame)
        counts = np.where(frame.rows == 0, 0, np.maximum(frame.extend_lens, 0))
        counts = np.minimum(counts, np.maximum(frame.out_cache_loc.size - (np.cumsum(counts) - counts), 0))
        written = np.empty((int(counts.sum()), 3), np.int64)
        written[:, 0] = np.repeat(frame.rows, counts)
        written[:, 1] = ragged_index(frame.prefix_lens, counts)
        written[:, 2] = wrapped(frame.out_cache_loc[: len(written)])
        shape = self._header.tables[table]
        inside = (
            (written[:, 0] > 0) & (written[:, 0] < shape.rows) & (written[:, 1] >= 0) & (written[:, 1] < shape.width)
        )
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
        _, luts = self._runners[runner]
        for place, number in enumerate(luts):
            mine = frame.lut_changes[frame.lut_changes[:, 0] == place]
            self._luts[number][mine[:, 1]] = mine[:, 2]
            cells = mine.copy()
            cells[:, 0] = number
            self._lut_cells.append(cells)


def _latest(parts: Sequence[Int64Array]) -> Int64Array:
    """Return entries of two keys and a value ordered by their keys, each pair of keys once, with its last value."""
    cells = np.concatenate(parts) if parts else _NOTHING
    cells = cells[np.lexsort((cells[:, 1], cells[:, 0]))]
    last = np.ones(len(cells), np.bool_)
    last[:-1] = (cells[1:, :2] != cells[:-1, :2]).any(axis=1)
    return cells[last]


def _table_columns(cells: Sequence[Sequence[Int64Array]]) -> dict[str, Int64Array]:
    index, rows, starts, counts, slots = [], [], [], [], []
    for table, parts in enumerate(cells):
        found = _latest(parts)
        first = np.ones(len(found), np.bool_)
        first[1:] = (found[1:, 0] != found[:-1, 0]) | (found[1:, 1] != found[:-1, 1] + 1)
        at = np.flatnonzero(first)
        index.append(np.full(at.size, table, np.int64))
        rows.append(found[at, 0])
        starts.append(found[at, 1])
        counts.append(np.diff(at, append=len(found)).astype(np.int64))
        slots.append(found[:, 2])
    return {
        "table_index": np.concatenate(index),
        "table_row": np.concatenate(rows),
        "table_start": np.concatenate(starts),
        "table_count": np.concatenate(counts),
        "table_slots": np.concatenate(slots),
    }


def _lut_columns(parts: Sequence[Int64Array]) -> dict[str, Int64Array]:
    found = _latest(parts)
    index, starts, counts = [], [], []
    for number in np.unique(found[:, 0]).tolist():
        run_starts, run_counts = ordered_runs(found[found[:, 0] == number, 1])
        index.append(np.full(run_starts.size, number, np.int64))
        starts.append(run_starts)
        counts.append(run_counts)
    if not index:
        return {}
    return {
        "lut_index": np.concatenate(index),
        "lut_start": np.concatenate(starts),
        "lut_count": np.concatenate(counts),
        "lut_slots": found[:, 2].copy(),
    }
