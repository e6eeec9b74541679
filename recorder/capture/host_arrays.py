"""Whatever arrays an engine hands over, brought to the host as numpy arrays; and index arithmetic over ragged rows."""

import operator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.capture import changes
from ...kernels.ops.hash.kv_source import KvSource

_INT32 = np.iinfo(np.int32)
_INT64 = np.dtype(np.int64)


def own_int64(values: Any, name: str = "an array") -> Int64Array:
    """Return a flat int64 copy of a numpy array, a torch tensor on any device, or a sequence of ints.

    Always a copy: engines reuse their buffers. A device tensor is brought to the host, which waits for the device. Raises
    `ValueError` for what is not made of integers; `name` says what it is.
    """
    if type(values) is np.ndarray and values.dtype == _INT64 and values.ndim == 1:
        return values.copy()
    found = np.asarray(on_host(values, wait=True))
    if found.dtype.kind not in "iub" and found.size:  # an empty list is of floats
        raise ValueError(f"{name} holds {found.dtype} values, expected integers")
    return np.array(found, dtype=np.int64).reshape(-1)


def whole_number(value: Any, name: str) -> int:
    """Return an integer of any kind as Python's; raise a `ValueError` with its name for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, expected an integer") from None


def saturated(values: Int64Array) -> Int64Array:
    """Return the values cut to int32's range, in which state tables are kept; both ends lie outside any pool."""
    if values.size and (values.max() > _INT32.max or values.min() < _INT32.min):
        return np.clip(values, _INT32.min, _INT32.max)
    return values


def wrapped(values: Int64Array) -> Int64Array:
    """Return the values as an int32 table holds them when they are put there without a look."""
    return values.astype(np.int32).astype(np.int64)


def ragged_index(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return `starts[r], starts[r] + 1, ...`, counts[r] of them (none negative), for each r, one after another."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def read_runs(table: Any, rows: Int64Array, starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Read `table[rows[r], starts[r] : starts[r] + counts[r]]` where the table lies, for each r, one after another.

    The table is `[height, width]` of any integer type, numpy or torch on any device; only those cells are brought over, -1
    for one that it does not have. `rows`, `starts`, `counts` are `[n] int64`, no count is negative.
    """
    table = on_host(table)
    if isinstance(table, np.ndarray) and table.dtype in (np.int32, np.int64) and table.flags.aligned:
        cells = np.empty(int(counts.sum()), np.int64)
        changes.read_runs(table=table, rows=rows, starts=starts, counts=counts, out=cells)
        return cells
    rows, columns = np.repeat(rows, counts), ragged_index(starts, counts)
    cells = np.full(rows.size, -1, np.int64)
    inside = (rows >= 0) & (rows < int(table.shape[0])) & (columns >= 0) & (columns < int(table.shape[1]))
    cells[inside] = np.asarray(on_host(picked(table, rows[inside], columns[inside]), wait=True))
    return cells


def picked(array: Any, *index: Any) -> Any:
    """Return `array[index]`, numpy's or torch's, where it lies; the index is numpy's, or lies there too."""
    if not hasattr(array, "detach"):
        return np.asarray(array)[index]
    import torch

    return array[tuple(part if hasattr(part, "detach") else torch.from_numpy(part).to(array.device) for part in index)]


def read_blocks(blocks: Any, block_size: int, rows: Int64Array, starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return the slots of positions as `read_runs` does, of a table of blocks: `[height, max_blocks]` of any integer type.

    Position p lies in slot `blocks[row, p // block_size] * block_size + p % block_size`; -1 without a block, or a negative one.
    """
    first = starts // block_size
    num_blocks = np.where(counts > 0, (starts + counts - 1) // block_size - first + 1, 0)
    found = read_runs(blocks, rows, first, num_blocks)[:, None]
    whole = found * block_size + np.arange(block_size)
    whole[found[:, 0] < 0] = -1
    return (
        changes.RowRuns(rows, first * block_size, num_blocks * block_size, whole.reshape(-1))
        .part(starts, counts)
        .values
    )


def on_host(array: Any, *, wait: bool = False) -> Any:
    """Return a torch tensor of the host's memory as a numpy view; what is numpy's as it is, and what lies elsewhere too.

    With `wait` that is copied to the host, which waits for the device.
    """
    if not hasattr(array, "detach") or (array.device.type != "cpu" and not wait):
        return array
    return array.detach().cpu().numpy()


def shares(values: Int64Array, counts: Int64Array, chosen: Int64Array) -> Int64Array:
    """Return of values that belong to rows, `counts[r]` to row r one after another, those of the chosen rows."""
    return values[ragged_index((np.cumsum(counts) - counts)[chosen], counts[chosen])]


def ordered_runs(slots: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return `(starts, counts)` of the runs whose slots, one after another, are `slots` in the same order."""
    runs = changes.cells_to_runs(np.zeros_like(slots), slots, slots)
    return runs.starts, runs.counts


def mask_to_runs(mask: npt.NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
    """Return the runs of slots whose mask is set."""
    return ordered_runs(np.flatnonzero(mask))


def fewer_runs(starts: Int64Array, counts: Int64Array, most: int) -> tuple[Int64Array, Int64Array]:
    """Return at most `most` (1 or more) runs that hold the slots of ascending ones, with the smallest gaps filled."""
    if starts.size <= most:
        return starts, counts
    ends = starts + counts
    gaps = starts[1:] - ends[:-1]
    wide = np.sort(np.argpartition(gaps, gaps.size - most)[gaps.size - most + 1 :])
    starts = starts[np.concatenate(([0], wide + 1))]
    return starts, ends[np.concatenate((wide, [ends.size - 1]))] - starts


def runs_to_slots(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return the slots of runs, in their order; a negative count is none."""
    return ragged_index(starts, np.maximum(counts, 0))


def on_device(source: KvSource) -> bool:
    """Say whether the source's memory is a torch tensor that numpy cannot look at."""
    return hasattr(source.tensor, "detach") and source.tensor.device.type != "cpu"


def gather_kv(source: KvSource, slots: Int64Array, capture_bytes: int) -> ByteArray:
    """Return the leading bytes of each slot, `[n, capture_bytes] uint8`; zeros for a slot outside the source."""
    page_size, size = source.page_size, source.bytes_per_token
    tokens = source.tensor[:, : page_size * size].reshape(-1, page_size, size)[:, :, :capture_bytes]
    out = np.zeros((slots.size, capture_bytes), np.uint8)
    inside = (slots >= 0) & (slots < source.num_slots)
    out[inside] = on_host(picked(tokens, *np.divmod(slots[inside], page_size)), wait=True)
    return out


def as_rows(value: Any) -> ByteArray:
    """Return an array, numpy's or torch's, as `[T, bytes of a token] uint8` on the host."""
    value = value.detach().contiguous() if hasattr(value, "detach") else np.ascontiguousarray(value)
    shape = value.shape[0], int(np.prod(value.shape[1:], dtype=np.int64)) * value.itemsize
    if isinstance(value, np.ndarray):
        return value.reshape(-1).view(np.uint8).reshape(shape)
    import torch

    return np.asarray(value.reshape(-1).view(torch.uint8).cpu().numpy()).reshape(shape)


def one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise `ValueError` if `value` is none of those that `what` may be."""
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}, expected {', '.join(repr(name) for name in allowed)}")


class CopyEnds(NamedTuple):
    """What lay at both ends of the runs of a copy, `[n] int64` each, as `end_hashes` says; 0 if it was not read.

    `before` is what lay at the destination when the copy was asked for, `landed` the first slot of the page of the pool that
    got the bytes in the destination's stead, -1 if none did; the destination itself if that is not its request's.
    """

    src: Int64Array
    dst: Int64Array
    before: Int64Array
    landed: Int64Array
