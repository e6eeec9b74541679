"""The mirrored state tables: block tables, full-to-SWA tables and the truth tokens.

The trace carries only their changes. After each forward both sides, recorder and replay, apply the forward's own
slots and sampled tokens, so what is left in the trace is what the engine did behind the forward's back.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.constants import UNKNOWN_TOKEN
from ...kernels.dispatch import select
from ...kernels.replay_pass.entries import Runs
from ...kernels.replay_pass.state import apply_forward_loops, apply_runs_loops
from ...kernels.sparse import sparse_zeros
from ..capture.host_arrays import ragged_index
from ..trace.header import TraceHeader
from .forward import EventColumns, Forward, UnusableEventError, add_up, columns

if TYPE_CHECKING:
    from ..capture.forward_input import CopiedForward


class StateListener:
    """Is told what is about to change in a state; each method does nothing until somebody overrides it. Runs of a table
    come as the event has them. They may lie outside of the table: the event is refused then, after this call.
    """

    def table_runs(self, tables: "StateTables", index: int, runs: Runs) -> None:
        """Runs of block table `index`: those whose `indices[r]` names it."""

    def truth_runs(self, tables: "StateTables", runs: Runs) -> None:
        """Runs of the truth tokens."""

    def lut_entries(self, tables: "StateTables", *, index: int, places: Int64Array, values: Int64Array) -> None:
        """Entries `places` `[n] int64` of full-to-SWA table `index` become `values`."""

    def slots_changed(self, group: int, slots: Int64Array) -> None:
        """Record, bytes, owner or allocation of slots `[n] int64` of a pool group change outside of a forward's writes."""

    def group_changed(self, group: int) -> None:
        """Any slot of a pool group may change."""

    def all_changed(self) -> None:
        """Everything may change: state was lost, or a keyframe's takes its place."""


class StateTables:
    """`req_to_token` `[rows, width] int32` per table, `luts` `[full slots] int64`, `truth` `[rows, width] int32`.
    Untouched rows stay unbacked by memory: `sparse_zeros` hands out zero pages, and small ones. `listener` is told of
    every change before it is made.
    """

    def __init__(self, header: TraceHeader, *, backend: str, listener: StateListener | None = None) -> None:
        self._backend = backend
        self._listener = listener or StateListener()
        self.req_to_token = [sparse_zeros((t.rows, t.width), np.int32) for t in header.tables]
        self.luts = [np.zeros(length, dtype=np.int64) for length in header.lut_lens]
        self.truth: npt.NDArray[np.int32] | None = None
        if header.truth_table is not None:
            self.truth = sparse_zeros((header.truth_table.rows, header.truth_table.width), np.int32)

    def apply_changes(self, event: EventColumns) -> None:
        """Apply the changes that an event carries; raise `UnusableEventError` when runs and values do not fit."""
        indices, rows, starts, counts = columns(event, "table", ("index", "row", "start", "count"))
        if len(indices) and self.req_to_token:
            if not 0 <= indices.min() <= indices.max() < len(self.req_to_token):
                raise UnusableEventError("table_index names a table that the header does not have")
            for index, table in enumerate(self.req_to_token):
                self._apply_runs(index, table, Runs(indices, rows, starts, counts, event.ints("table_slots")))
        if self.luts:
            self._apply_luts(event)
        if self.truth is not None:
            rows, starts, counts = columns(event, "truth", ("row", "start", "count"))
            if len(rows):
                runs = Runs(np.full(len(rows), -1, np.int64), rows, starts, counts, event.ints("truth_tokens"))
                self._apply_runs(-1, self.truth, runs)

    def _announce(self, index: int, runs: Runs) -> None:
        """Tell the listener of runs of block table `index`, or of the truth tokens, -1."""
        if index >= 0:
            self._listener.table_runs(self, index, runs)
        else:
            self._listener.truth_runs(self, runs)

    def _apply_runs(self, index: int, table: npt.NDArray[np.int32], runs: Runs) -> None:
        self._announce(index, runs)
        counted = np.zeros(1, np.int64)
        select(apply_runs_loops, self._backend)(index, runs, table, counted)
        outside = int(counted[0])
        what = "table_slots" if index >= 0 else "truth_tokens"
        if outside < 0:
            raise UnusableEventError(f"the runs in {what.split('_')[0]}_count do not add up to the values in {what}")
        if outside:
            raise UnusableEventError(f"{outside} values in {what} lie outside their table, or are no 32-bit numbers")

    def _apply_luts(self, event: EventColumns) -> None:
        indices, starts, counts = columns(event, "lut", ("index", "start", "count"))
        slots = event.ints("lut_slots")
        if not add_up(counts, len(slots)):
            raise UnusableEventError("the runs in lut_count do not add up to the values in lut_slots")
        if not len(slots):
            return
        at, of_value = ragged_index(starts, counts), np.repeat(indices, counts)
        applied = 0
        for index, lut in enumerate(self.luts):
            chosen = (of_value == index) & (at >= 0) & (at < len(lut))
            places, values = at[chosen], slots[chosen]
            self._listener.lut_entries(self, index=index, places=places, values=values)
            lut[places] = values
            applied += len(places)
        if applied != len(slots):
            raise UnusableEventError(f"{len(slots) - applied} values in lut_slots lie outside their table")

    def apply_forward(self, forward: "Forward | CopiedForward") -> None:
        """Apply a forward's own slots and sampled tokens: a replay as the recorder."""
        rows, prefix_lens, extends = forward.req_pool_indices, forward.prefix_lens, np.maximum(forward.extend_lens, 0)
        lens = np.where(rows == 0, 0, extends)
        for index, (slots, table) in enumerate(zip(forward.out_cache_loc, self.req_to_token, strict=True)):
            self._write(index, table, Runs(np.full(len(rows), index, np.int64), rows, prefix_lens, lens, slots))
        if self.truth is not None and len(forward.sampled_lens):
            lens = np.where(rows == 0, 0, forward.sampled_lens)
            self._write(-1, self.truth, Runs(rows, rows, prefix_lens + extends, lens, forward.sampled_tokens))

    def _write(self, index: int, table: npt.NDArray[np.int32], runs: Runs) -> None:
        self._announce(index, runs)
        select(apply_forward_loops, self._backend)(runs.rows, runs.starts, runs.lens, runs.values, table)

    def forget(self) -> None:
        """After a gap in the trace: every entry is unknown, so none may be judged, until the trace says it again. Slot
        0 is never verified and token -1 is never compared, so those are what unknown entries become.
        """
        # Fresh zero pages: `zeros_like` would touch every page of a large table.
        self.req_to_token = [sparse_zeros(table.shape, np.int32) for table in self.req_to_token]
        self.luts = [np.zeros(len(lut), dtype=np.int64) for lut in self.luts]
        if self.truth is not None:
            self.truth.fill(UNKNOWN_TOKEN)


class TableUse(StateListener):
    """How far each row of the tables was ever filled, so that a keyframe need not look through all of them. `ends[t]`
    and `truth_ends` `[rows] int64` are the end of what was ever written of each row; `truth_fill` is what the truth
    tokens hold behind it: 0, or -1 once everything was taken for unknown.
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
        self.truth_fill = UNKNOWN_TOKEN

    def table_runs(self, tables: StateTables, index: int, runs: Runs) -> None:
        """Note runs of a block table."""
        del tables
        mine = runs.indices == index
        _reach(self.ends[index], runs.rows[mine], (runs.starts + runs.lens)[mine], self._widths[index])

    def truth_runs(self, tables: StateTables, runs: Runs) -> None:
        """Note runs of the truth tokens."""
        del tables
        _reach(self.truth_ends, runs.rows, runs.starts + runs.lens, self._truth_width)


def look_up(table: npt.NDArray[np.int32], rows: Int64Array, positions: Int64Array) -> tuple[Int64Array, BoolArray]:
    """Return what stands at `rows` and `positions` `[n] int64` of a table, 0 where it has none, and whether it has one."""
    inside = (rows > 0) & (rows < table.shape[0]) & (positions >= 0) & (positions < table.shape[1])
    found = np.zeros(len(rows), np.int64)
    found[inside] = table[rows[inside], positions[inside]]
    return found, inside


def _reach(ends: Int64Array, rows: Int64Array, to: Int64Array, width: int) -> None:
    inside = (rows >= 0) & (rows < len(ends))
    np.maximum.at(ends, rows[inside], np.minimum(to[inside], width))
