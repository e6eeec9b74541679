"""The recorder's picture of what a replay knows: state tables, full-to-SWA tables, truth tokens.

A forward's event carries only where the engine disagrees with this picture. The picture moves on with `commit`, which
the recorder calls only once the writer took the event, so that what a dropped event said is said again by the next.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels.capture.changes import RowRuns, cell_changes, row_changes, write_rows
from ..trace.header import TraceHeader
from .forward_input import CopiedForward, RowValues
from .host_arrays import Int64Array, host_table, read_cells, slots_to_runs, wrapped

_NOTHING = np.empty(0, np.int64)


class StateShadow:
    """The state tables as a replay of the accepted events would hold them.

    `tables[t]` `[rows, width] int32`, `luts[l]` `[length] int64`, `truth` `[rows, width] int32` or None; all start
    as zeros, which the system hands out lazily, so a large table costs what is touched of it.
    """

    __slots__ = ("_backend", "_runs", "luts", "tables", "truth")

    def __init__(self, header: TraceHeader, *, backend: str = "cpu") -> None:
        self.tables = [np.zeros((table.rows, table.width), np.int32) for table in header.tables]
        self.luts = [np.zeros(length, np.int64) for length in header.lut_lens]
        truth = header.truth_table
        self.truth = np.zeros((truth.rows, truth.width), np.int32) if truth is not None else None
        self._backend = backend
        self._runs = RowRuns.allocate(1024)

    def changes(self, forward: CopiedForward) -> dict[str, Int64Array]:
        """Return the event columns that bring a replay's tables to what this forward reads."""
        columns: dict[str, Int64Array] = {}
        found = [self._row_changes(read, table) for read, table in zip(forward.reads, self.tables, strict=True)]
        if forward.misplaced:
            found = [_both(run, more) for run, more in zip(found, forward.misplaced, strict=True)]
        columns["table_index"] = np.repeat(np.arange(len(found), dtype=np.int64), [run.rows.size for run in found])
        columns["table_row"] = _joined([run.rows for run in found])
        columns["table_start"] = _joined([run.starts for run in found])
        columns["table_count"] = _joined([run.counts for run in found])
        columns["table_slots"] = _joined([run.values for run in found])
        if self.luts:
            columns |= self._lut_changes(forward)
        if forward.truth is not None and self.truth is not None:
            truth = self._row_changes(forward.truth, self.truth)
            columns["truth_lens"] = forward.truth.counts
            columns["truth_row"] = truth.rows
            columns["truth_start"] = truth.starts
            columns["truth_count"] = truth.counts
            columns["truth_tokens"] = truth.values
        return columns

    def commit(self, forward: CopiedForward, sampled_tokens: Int64Array, sampled_lens: Int64Array) -> None:
        """Take over an accepted event: its changes, the slots it wrote, the tokens it sampled."""
        columns = forward.changes
        for number, table in enumerate(self.tables):
            mine = columns["table_index"] == number
            values = np.repeat(mine, columns["table_count"])
            self._write(
                RowValues(
                    rows=columns["table_row"][mine],
                    starts=columns["table_start"][mine],
                    counts=columns["table_count"][mine],
                    values=columns["table_slots"][values],
                ),
                table,
            )
            written = RowValues(
                rows=forward.rows,
                starts=forward.prefix_lens,
                counts=np.where(forward.rows == 0, 0, forward.extend_lens),
                values=wrapped(forward.out_cache_loc[number]),
            )
            self._write(written, table)
        offset = 0
        for index, start, count in zip(
            columns.get("lut_index", _NOTHING),
            columns.get("lut_start", _NOTHING),
            columns.get("lut_count", _NOTHING),
            strict=True,
        ):
            self.luts[index][start : start + count] = columns["lut_slots"][offset : offset + count]
            offset += count
        if self.truth is not None:
            if "truth_row" in columns:
                changed = RowValues(
                    rows=columns["truth_row"],
                    starts=columns["truth_start"],
                    counts=columns["truth_count"],
                    values=columns["truth_tokens"],
                )
                self._write(changed, self.truth)
            if sampled_lens.size:
                sampled = RowValues(
                    rows=forward.rows,
                    starts=forward.prefix_lens + np.maximum(forward.extend_lens, 0),
                    counts=np.where(forward.rows == 0, 0, sampled_lens),
                    values=wrapped(sampled_tokens),
                )
                self._write(sampled, self.truth)

    def forget(self) -> None:
        """Start anew, as a replay does after a loss that does not say what it may have changed."""
        # Fresh zero pages: `zeros_like` would touch every page of a large table.
        self.tables = [np.zeros(table.shape, np.int32) for table in self.tables]
        self.luts = [np.zeros(lut.size, np.int64) for lut in self.luts]
        if self.truth is not None:
            self.truth.fill(-1)

    def _row_changes(self, told: RowValues, shadow: npt.NDArray[np.int32]) -> RowRuns:
        if self._runs.values.size < told.values.size:
            self._runs = RowRuns.allocate(2 * told.values.size)
        sizes = np.zeros(2, np.int64)
        row_changes(
            rows=told.rows,
            starts=told.starts,
            counts=told.counts,
            values=told.values,
            shadow=shadow,
            runs=self._runs,
            sizes=sizes,
            backend=self._backend,
        )
        return self._runs.cut(int(sizes[0]), int(sizes[1]))

    def _lut_changes(self, forward: CopiedForward) -> dict[str, Int64Array]:
        """Compare the cells of the full-to-SWA tables through which this forward's slots go."""
        touched = np.concatenate([*(read.values for read in forward.reads), *forward.out_cache_loc])
        index, starts, counts, slots = [_NOTHING], [_NOTHING], [_NOTHING], [_NOTHING]
        for number, (told, shadow) in enumerate(zip(forward.luts, self.luts, strict=True)):
            changed, values = self._changed_cells(told, shadow, touched)
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

    def _changed_cells(self, told: Any, shadow: Int64Array, touched: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the touched cells at which a table differs from its shadow, each once, ascending, and what they hold."""
        table = host_table(told)
        if table is not None and table.dtype == np.int64:
            table = table.reshape(-1)
            differ, size = np.empty(touched.size, np.int64), np.zeros(1, np.int64)
            cell_changes(cells=touched, table=table, shadow=shadow, out=differ, size=size, backend=self._backend)
            cells = np.unique(differ[: size[0]])
            return cells, table[cells]
        cells = np.unique(touched)
        cells = cells[(cells >= 0) & (cells < min(shadow.size, int(told.shape[0])))]
        values = read_cells(told.reshape(1, -1), np.zeros(1, np.int64), cells)
        changed = values != shadow[cells]
        return cells[changed], values[changed]

    def _write(self, told: RowValues, shadow: npt.NDArray[np.int32]) -> None:
        write_rows(
            rows=told.rows,
            starts=told.starts,
            counts=told.counts,
            values=told.values,
            shadow=shadow,
            backend=self._backend,
        )


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
