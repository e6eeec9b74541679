"""The mirrored state tables: block tables, full-to-SWA tables and the truth tokens.

The trace carries only their changes. After each forward both sides, recorder and replay, apply the forward's own
slots and sampled tokens, so what is left in the trace is what the engine did behind the forward's back.
"""

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array
from ...kernels.constants import UNKNOWN_TOKEN
from ...kernels.replay_pass.state import apply_forward, apply_runs
from ...kernels.sparse import sparse_zeros
from ..trace.header import TraceHeader
from ..trace.reader import EventView
from .forward import Forward, UnusableEventError


class StateTables:
    """`req_to_token` `[rows, width] int32` per table, `luts` `[full slots] int64`, `truth` `[rows, width] int32`.

    Untouched rows stay unbacked by memory: `sparse_zeros` hands out zero pages, and small ones.
    """

    def __init__(self, header: TraceHeader, *, backend: str) -> None:
        self._backend = backend
        self.req_to_token = [sparse_zeros((t.rows, t.width), np.int32) for t in header.tables]
        self.luts = [np.zeros(length, dtype=np.int64) for length in header.lut_lens]
        truth = header.truth_table
        self.truth: npt.NDArray[np.int32] | None = (
            None if truth is None else sparse_zeros((truth.rows, truth.width), np.int32)
        )

    def apply_changes(self, view: EventView) -> None:
        """Apply the changes that an event carries; raise `UnusableEventError` when runs and values do not fit."""
        for index, table in enumerate(self.req_to_token):
            self._apply(view, "table", index, "table_slots", table)
        if self.luts:
            self._apply_luts(view)
        if self.truth is not None:
            self._apply(view, "truth", 0, "truth_tokens", self.truth)

    def _apply(self, view: EventView, prefix: str, index: int, values: str, table: npt.NDArray[np.int32]) -> None:
        rows, starts, counts = (view.ints(f"{prefix}_{column}") for column in ("row", "start", "count"))
        indices = np.zeros_like(starts) if prefix == "truth" else view.ints(f"{prefix}_index")
        if not len(indices) == len(rows) == len(starts) == len(counts):
            raise UnusableEventError(f"the {prefix}_* columns of runs differ in length")
        if not len(starts):
            return
        if prefix == "table" and not 0 <= indices.min() <= indices.max() < len(self.req_to_token):
            raise UnusableEventError("table_index names a table that the header does not have")
        outside = apply_runs(
            index=index,
            indices=indices,
            rows=rows,
            starts=starts,
            counts=counts,
            values=view.ints(values),
            table=table,
            backend=self._backend,
        )
        if outside < 0:
            raise UnusableEventError(f"the runs in {prefix}_count do not add up to the values in {values}")
        if outside:
            raise UnusableEventError(f"{outside} values in {values} lie outside their table, or are no 32-bit numbers")

    def _apply_luts(self, view: EventView) -> None:
        indices, starts, counts = (view.ints(f"lut_{column}") for column in ("index", "start", "count"))
        slots = view.ints("lut_slots")
        if not len(indices) == len(starts) == len(counts):
            raise UnusableEventError("the lut_* columns of runs differ in length")
        if bool((counts < 0).any()) or bool((counts > len(slots)).any()) or int(counts.sum()) != len(slots):
            raise UnusableEventError("the runs in lut_count do not add up to the values in lut_slots")
        if not len(slots):
            return
        at = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(len(slots))
        of_value = np.repeat(indices, counts)
        applied = 0
        for index, lut in enumerate(self.luts):
            chosen = (of_value == index) & (at >= 0) & (at < len(lut))
            self._set_lut(index, at[chosen], slots[chosen])
            applied += int(chosen.sum())
        if applied != len(slots):
            raise UnusableEventError(f"{len(slots) - applied} values in lut_slots lie outside their table")

    def _set_lut(self, index: int, places: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
        self.luts[index][places] = values

    def apply_forward(self, forward: Forward) -> None:
        """Apply a forward's own slots and sampled tokens, as the recorder did."""
        for slots, table in zip(forward.out_cache_loc, self.req_to_token, strict=True):
            apply_forward(
                rows=forward.req_pool_indices,
                prefix_lens=forward.prefix_lens,
                lens=forward.extend_lens,
                values=slots,
                table=table,
                backend=self._backend,
            )
        if self.truth is not None and len(forward.sampled_lens):
            apply_forward(
                rows=forward.req_pool_indices,
                prefix_lens=forward.prefix_lens + np.maximum(forward.extend_lens, 0),
                lens=forward.sampled_lens,
                values=forward.sampled_tokens,
                table=self.truth,
                backend=self._backend,
            )

    def forget(self) -> None:
        """After a gap in the trace: every entry is unknown, so none may be judged.

        Slot 0 is never verified and token -1 is never compared, so those are what unknown entries become; what the
        trace says later fills them again.
        """
        # Fresh zero pages: `zeros_like` would touch every page of a large table.
        self.req_to_token = [sparse_zeros(table.shape, np.int32) for table in self.req_to_token]
        self.luts = [np.zeros(len(lut), dtype=np.int64) for lut in self.luts]
        if self.truth is not None:
            self.truth.fill(UNKNOWN_TOKEN)


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
