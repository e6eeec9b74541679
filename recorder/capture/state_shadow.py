"""The recorder's picture of what a replay knows: state tables, full-to-SWA tables, truth tokens.

A forward's event carries only where the engine disagrees with this picture. The picture moves on with `commit`, which
the recorder calls only once the writer took the event, so that what a dropped event said is said again by the next.
"""

from typing import Any

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.capture.changes import RowRuns, cell_changes, cells_to_runs, joined, row_changes
from ..state.forward import UnusableEventError
from ..state.tables import StateTables
from ..trace.header import TraceHeader
from .forward_event import lut_columns, table_columns, truth_columns
from .forward_input import CopiedForward, translate
from .host_arrays import on_host


class StateShadow:
    """The state tables as a replay of the accepted events would hold them."""

    __slots__ = ("_backend", "tables")

    def __init__(self, header: TraceHeader, *, backend: str = "cpu") -> None:
        self.tables = StateTables(header, backend=backend)
        self._backend = backend

    def changes(self, forward: CopiedForward) -> dict[str, Int64Array]:
        """Return the event columns that bring a replay's tables to what this forward reads."""
        tables, truth = self.tables.req_to_token, self.tables.truth
        found = [row_changes(*one, backend=self._backend) for one in zip(forward.reads, tables, strict=True)]
        if forward.misplaced:
            found = [joined(both) for both in zip(found, forward.misplaced, strict=True)]
        columns = table_columns(found)
        if self.tables.luts:
            used = np.concatenate([*(read.values for read in forward.reads), *forward.out_cache_loc])
            columns |= lut_columns([self._lut_changes(n, table, used) for n, table in enumerate(forward.luts)])
        if forward.truth is not None and truth is not None:
            columns |= truth_columns(forward.truth.counts, row_changes(forward.truth, truth, backend=self._backend))
        return columns

    def commit(self, forward: CopiedForward) -> None:
        """Take over an accepted event: its changes, the slots it wrote, the tokens it sampled."""
        try:
            self.tables.apply_changes(forward)
        except UnusableEventError:  # a replay leaves the event out, and takes all that came before for unknown
            self.tables.forget()
            return
        self.tables.apply_writes(
            forward.rows,
            forward.prefix_lens,
            forward.extend_lens,
            forward.out_cache_loc,
            forward.sampled_lens,
            forward.sampled_tokens,
        )

    def forget(self) -> None:
        """Start anew, as a replay does after a loss that does not say what it may have changed."""
        self.tables.forget()

    def _lut_changes(self, number: int, table: Any, used: Int64Array) -> RowRuns:
        """Return the used cells at which a full-to-SWA table differs from its shadow, and what they hold."""
        shadow, held = self.tables.luts[number], on_host(table)
        if isinstance(held, np.ndarray) and held.dtype == np.int64:
            held = held.reshape(-1)
            cells = cell_changes(used, held, shadow, backend=self._backend)
            values = held[cells]
        else:
            cells = np.unique(used)
            cells = cells[(cells >= 0) & (cells < min(shadow.size, int(table.shape[0])))]
            values = translate(table, cells)
            differs = values != shadow[cells]
            cells, values = cells[differs], values[differs]
        return cells_to_runs(np.full(cells.size, number, np.int64), cells, values)
