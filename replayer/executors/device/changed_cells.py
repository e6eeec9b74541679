"""Runs of table changes as single cells: the address of each, and what goes there."""

import numpy as np
import numpy.typing as npt

from ....recorder.capture.host_arrays import ragged_index
from ....recorder.trace.batch import TraceBatch
from .screening import gathered
from .state import DeviceState

Int64Array = npt.NDArray[np.int64]


def changed_cells(batch: TraceBatch, state: DeviceState, events: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the cells of block tables and truth tokens that events change.

    Returns:
        `(cells, offsets)`: `[n, 2] int64`, address of an int32 and value, each cell once an event, and `[events + 1]
        int64`: event i's are `offsets[i] .. offsets[i + 1]`.
    """
    parts = []
    if state.tables:
        bases = np.array([table.data_ptr() for table in state.tables], np.int64)
        widths = np.array([table.shape[1] for table in state.tables], np.int64)
        indices, rows, starts = (gathered(batch, f"table_{c}", events) for c in ("index", "row", "start"))
        parts.append(
            _expanded(batch, "table", "table_slots", events, bases[indices], rows * widths[indices] + starts, 4)
        )
    if state.truth is not None:
        rows, starts = (gathered(batch, f"truth_{c}", events) for c in ("row", "start"))
        base = np.full(len(rows), state.truth.data_ptr(), np.int64)
        parts.append(_expanded(batch, "truth", "truth_tokens", events, base, rows * state.truth.shape[1] + starts, 4))
    return _joined(parts, len(events))


def changed_luts(batch: TraceBatch, state: DeviceState, events: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the same of full-to-SWA tables, whose cells are int64."""
    if not state.luts:
        return _joined([], len(events))
    bases = np.array([lut.data_ptr() for lut in state.luts], np.int64)
    indices, starts = (gathered(batch, f"lut_{c}", events) for c in ("index", "start"))
    return _joined([_expanded(batch, "lut", "lut_slots", events, bases[indices], starts, 8)], len(events))


def _expanded(
    batch: TraceBatch, prefix: str, values: str, events: Int64Array, bases: Int64Array, firsts: Int64Array, size: int
) -> tuple[Int64Array, Int64Array]:
    """Return `(cells [n, 2], event of each [n])` of one kind of runs, an event's last value for a cell alone."""
    counts = gathered(batch, f"{prefix}_count", events)
    runs = np.diff(batch.offsets(f"{prefix}_count"))[events]
    of_run = np.repeat(np.arange(len(events)), runs)
    addresses = ragged_index(bases // size + firsts, counts) * size
    cells = np.stack([addresses, gathered(batch, values, events)], axis=1)
    of_cell = np.repeat(of_run, counts)
    order = np.lexsort((bases // size + firsts, of_run))
    begins, ends = (bases // size + firsts)[order], (bases // size + firsts + counts)[order]
    if not bool(((begins[1:] < ends[:-1]) & (of_run[order][1:] == of_run[order][:-1])).any()):
        return cells, of_cell
    # Runs that overlap: on the device nobody could say which comes last.
    backwards = np.arange(len(cells))[::-1]
    _, last = np.unique(np.stack([of_cell[backwards], addresses[backwards]], axis=1), axis=0, return_index=True)
    keep = np.sort(backwards[last])
    return cells[keep], of_cell[keep]


def _joined(parts: list[tuple[Int64Array, Int64Array]], count: int) -> tuple[Int64Array, Int64Array]:
    cells = np.concatenate([np.zeros((0, 2), np.int64), *(part[0] for part in parts)])
    events = np.concatenate([np.zeros(0, np.int64), *(part[1] for part in parts)])
    if len(parts) > 1:
        order = np.argsort(events, kind="stable")
        cells, events = cells[order], events[order]
    offsets = np.zeros(count + 1, np.int64)
    offsets[1:] = np.cumsum(np.bincount(events, minlength=count))
    return cells, offsets
