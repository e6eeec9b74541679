"""The recorder's picture of what a replay knows: state tables, full-to-SWA tables, truth tokens.

A forward's event carries only where the engine disagrees with this picture. The picture moves on with `commit`, which
the recorder calls only once the writer took the event, so that what a dropped event said is said again by the next.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels.capture.changes import RowRuns, cell_changes, row_changes
from ..state.forward import UnusableEventError
from ..state.tables import StateTables
from ..trace.header import TraceHeader
from .forward_input import CopiedForward, RowValues
from .host_arrays import Int64Array, host_table, read_cells, slots_to_runs

_NOTHING = np.empty(0, np.int64)


class StateShadow:
    """The state tables as a replay of the accepted events would hold them."""

    __slots__ = ("_backend", "_runs", "tables")

    def __init__(self, header: TraceHeader, *, backend: str = "cpu") -> None:
        self.tables = StateTables(header, backend=backend)
        self._backend = backend
        self._runs = RowRuns.allocate(1024)

    def changes(self, forward: CopiedForward) -> dict[str, Int64Array]:
        """Return the event columns that bring a replay's tables to what this forward reads."""
        columns: dict[str, Int64Array] = {}
        found = [
            self._row_changes(read, table) for read, table in zip(forward.reads, self.tables.req_to_token, strict=True)
        ]
        if forward.misplaced:
            found = [_both(run, more) for run, more in zip(found, forward.misplaced, strict=True)]
        columns["table_index"] = np.repeat(np.arange(len(found), dtype=np.int64), [run.rows.size for run in found])
        columns["table_row"] = _joined([run.rows for run in found])
        columns["table_start"] = _joined([run.starts for run in found])
        columns["table_count"] = _joined([run.counts for run in found])
        columns["table_slots"] = _joined([run.values for run in found])
        if self.tables.luts:
            columns |= self._lut_changes(forward)
        if forward.truth is not None and self.tables.truth is not None:
            truth = self._row_changes(forward.truth, self.tables.truth)
            columns["truth_lens"] = forward.truth.counts
            columns["truth_row"] = truth.rows
            columns["truth_start"] = truth.starts
            columns["truth_count"] = truth.counts
            columns["truth_tokens"] = truth.values
        return columns

    def commit(self, forward: CopiedForward, sampled_tokens: Int64Array, sampled_lens: Int64Array) -> None:
        """Take over an accepted event: its changes, the slots it wrote, the tokens it sampled."""
        try:
            self.tables.apply_changes(_Changes(forward.changes))
        except UnusableEventError:  # a replay leaves the event out, and takes all that came before for unknown
            self.tables.forget()
            return
        self.tables.apply_writes(
            forward.rows,
            forward.prefix_lens,
            forward.extend_lens,
            forward.out_cache_loc,
            sampled_lens,
            sampled_tokens,
        )

    def forget(self) -> None:
        """Start anew, as a replay does after a loss that does not say what it may have changed."""
        self.tables.forget()

    def _row_changes(self, read: RowValues, shadow: npt.NDArray[np.int32]) -> RowRuns:
        if self._runs.values.size < read.values.size:
            self._runs = RowRuns.allocate(2 * read.values.size)
        sizes = np.zeros(2, np.int64)
        row_changes(
            rows=read.rows,
            starts=read.starts,
            counts=read.counts,
            values=read.values,
            shadow=shadow,
            runs=self._runs,
            sizes=sizes,
            backend=self._backend,
        )
        return self._runs.cut(int(sizes[0]), int(sizes[1]))

    def _lut_changes(self, forward: CopiedForward) -> dict[str, Int64Array]:
        """Compare the cells of the full-to-SWA tables through which this forward's slots go."""
        used = np.concatenate([*(read.values for read in forward.reads), *forward.out_cache_loc])
        index, starts, counts, slots = [_NOTHING], [_NOTHING], [_NOTHING], [_NOTHING]
        for number, (table, shadow) in enumerate(zip(forward.luts, self.tables.luts, strict=True)):
            changed, values = self._changed_cells(table, shadow, used)
            run_starts, run_counts = slots_to_runs(changed)
            index.append(np.full(run_starts.size, number, np.int64))
            starts.append(run_starts)
            counts.append(run_counts)
            slots.append(values)
        return {
            "lut_index": _joined(index),
            "lut_start": _joined(starts),
            "lut_count": _joined(counts),
            "lut_slots": _joined(slots),
        }

    def _changed_cells(self, given: Any, shadow: Int64Array, used: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the used cells at which a table differs from its shadow, each once, ascending, and what they hold."""
        table = host_table(given)
        if table is not None and table.dtype == np.int64:
            table = table.reshape(-1)
            differ, size = np.empty(used.size, np.int64), np.zeros(1, np.int64)
            cell_changes(cells=used, table=table, shadow=shadow, out=differ, size=size, backend=self._backend)
            cells = np.unique(differ[: size[0]])
            return cells, table[cells]
        cells = np.unique(used)
        cells = cells[(cells >= 0) & (cells < min(shadow.size, int(given.shape[0])))]
        values = read_cells(given.reshape(1, -1), np.zeros(1, np.int64), cells)
        changed = values != shadow[cells]
        return cells[changed], values[changed]


class _Changes:
    """An event's columns before it is an event."""

    __slots__ = ("_columns",)

    def __init__(self, columns: dict[str, Int64Array]) -> None:
        self._columns = columns

    def ints(self, name: str) -> Int64Array:
        """Return a column's values, none where it is not filled."""
        return self._columns.get(name, _NOTHING)


def _both(runs: RowRuns, more: RowValues) -> RowRuns:
    """Return runs with others behind them."""
    if not more.rows.size:
        return runs
    return RowRuns(
        rows=np.concatenate((runs.rows, more.rows)),
        starts=np.concatenate((runs.starts, more.starts)),
        counts=np.concatenate((runs.counts, more.counts)),
        values=np.concatenate((runs.values, more.values)),
    )


def _joined(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts) if parts else _NOTHING
