"""Whatever array an engine hands over, as int64 numpy arrays of our own; and index arithmetic over ragged rows."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels.capture import gather

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

_INT32 = np.iinfo(np.int32)
_INT64 = np.dtype(np.int64)


def own_int64(values: Any) -> Int64Array:
    """Return a flat int64 copy of a numpy array, a torch tensor on any device, or a sequence of ints.

    Always a copy: engines reuse their buffers. A device tensor is brought to the host, which waits for the device.
    """
    if type(values) is np.ndarray and values.dtype == _INT64 and values.ndim == 1:
        return values.copy()
    if hasattr(values, "detach"):  # a torch tensor; torch itself is never imported here
        values = values.detach().cpu().numpy()
    return np.array(values, dtype=np.int64).reshape(-1)


def saturated(values: Int64Array) -> Int64Array:
    """Return the values cut to int32's range, in which state tables are kept; both ends lie outside any pool."""
    if values.size and (values.max() > _INT32.max or values.min() < _INT32.min):
        return np.clip(values, _INT32.min, _INT32.max)
    return values


def wrapped(values: Int64Array) -> Int64Array:
    """Return the values as an int32 table holds them when they are put there without a look."""
    return values.astype(np.int32).astype(np.int64)


def ragged_index(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return `starts[r], starts[r] + 1, ...`, counts[r] of them, for each r, one after another.

    Args:
        starts: `[n] int64`.
        counts: `[n] int64`, none negative.

    Returns:
        `[sum(counts)] int64`.
    """
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(total, dtype=np.int64)


def read_runs(table: Any, rows: Int64Array, starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Read `table[rows[r], starts[r] : starts[r] + counts[r]]` where the table lies, for each r, one after another.

    Args:
        table: `[height, width]` of any integer type, numpy or torch on any device.
        rows: `[n] int64`.
        starts: `[n] int64`.
        counts: `[n] int64`, none negative.

    Returns:
        `[sum(counts)] int64`; -1 for a cell that the table does not have.
    """
    lies_here = host_table(table)
    if lies_here is None:
        return read_cells(table, np.repeat(rows, counts), ragged_index(starts, counts))
    cells = np.empty(int(counts.sum()), np.int64)
    gather.read_runs(table=lies_here, rows=rows, starts=starts, counts=counts, out=cells)
    return cells


def host_table(table: Any) -> npt.NDArray[Any] | None:
    """Return a table that the compiled loops can read as it lies: int32 or int64, numpy or a torch tensor of the host."""
    if hasattr(table, "detach"):
        if table.device.type != "cpu":
            return None
        table = table.detach().numpy()
    if not isinstance(table, np.ndarray) or table.dtype not in (np.int32, np.int64) or not table.flags.aligned:
        return None
    return np.asarray(table)


def read_cells(table: Any, rows: Int64Array, columns: Int64Array) -> Int64Array:
    """Read `table[rows[i], columns[i]]` where the table lies, and bring only those cells to the host.

    Args:
        table: `[height, width]` of any integer type, numpy or torch on any device.
        rows: `[n] int64`, or `[1]` for all cells.
        columns: `[n] int64`.

    Returns:
        `[n] int64`; -1 for a cell that the table does not have.
    """
    height, width = (int(n) for n in table.shape)
    rows = np.broadcast_to(rows, columns.shape)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    cells = np.full(columns.shape, -1, np.int64)
    where = (rows[inside], columns[inside])
    if not hasattr(table, "detach"):
        cells[inside] = np.asarray(table)[where]
    elif table.device.type == "cpu":
        cells[inside] = table.detach().numpy()[where]
    else:
        import torch

        rows_there, columns_there = (torch.from_numpy(part).to(table.device) for part in where)
        cells[inside] = table[rows_there, columns_there].cpu().numpy()
    return cells
