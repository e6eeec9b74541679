"""Gather: what lies at listed places; the bytes of slots, cells of state tables. What does not exist gives zeros or -1."""

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..arrays import ByteArray, Int64Array
from ..dispatch import In8x2, In32x2, In64, In64x2, Out8x2, Out64, primitive, select
from ..ops.hash.kv_source import KvSource


def gather_kv(*, source: KvSource, slots: Int64Array, out: ByteArray, backend: str = "cpu") -> None:
    """Copy the leading bytes of slots `[n] int64` to `out` `[n, capture_bytes] uint8`; zeros for a slot that the source lacks.

    Raises `ValueError` if `out` does not fit `slots`, or is wider than the source's `bytes_per_token`.
    """
    if out.ndim != 2 or out.shape[0] != slots.shape[0] or out.shape[1] > source.bytes_per_token:
        raise ValueError(
            f"out has shape {list(out.shape)}, expected [{slots.shape[0]}, up to {source.bytes_per_token}]: "
            "one row per slot, at most bytes_per_token wide"
        )
    select(_gather_kv_loops, backend)(source.tensor, source.page_size, source.bytes_per_token, slots, out)


def read_runs(
    *,
    table: npt.NDArray[np.int32] | Int64Array,
    rows: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    out: Int64Array,
    backend: str = "cpu",
) -> None:
    """Read `table[rows[r], starts[r] : starts[r] + counts[r]]` for each r, one after another.

    `rows`, `starts`, `counts` are `[n] int64`, a negative count is none; `out` `[sum(max(counts, 0))] int64` gets -1 for a
    cell that the table does not have. Raises `ValueError` if `out` has another length, or the table another type.
    """
    wanted = int(np.maximum(counts, 0).sum())
    if out.shape[0] != wanted:
        raise ValueError(f"out has length {out.shape[0]}, expected sum(counts), {wanted}")
    if table.dtype == np.int32:
        select(_read_runs_32_loops, backend)(cast("npt.NDArray[np.int32]", table), rows, starts, counts, out)
    elif table.dtype == np.int64:
        select(_read_runs_64_loops, backend)(cast("npt.NDArray[np.int64]", table), rows, starts, counts, out)
    else:
        raise ValueError(f"table has dtype {table.dtype}, expected int32 or int64")


def prepare(backend: str) -> None:
    """Compile what there is to compile now, so that no engine waits for it later."""
    for loops in (_gather_kv_loops, _read_runs_32_loops, _read_runs_64_loops):
        select(loops, backend)


def _gather_kv_loops(tensor: In8x2, page_size: int, bytes_per_token: int, slots: In64, out: Out8x2) -> None:
    num_slots = tensor.shape[0] * page_size
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot < 0 or slot >= num_slots:
            for b in range(out.shape[1]):
                out[i, b] = 0
        else:
            row = slot // page_size
            column = (slot % page_size) * bytes_per_token
            for b in range(out.shape[1]):
                out[i, b] = tensor[row, column + b]


@primitive()
def read_run(table: Any, row: int, start: int, count: int, at: int, out: Any) -> None:
    """Write `table[row, start : start + count]` to `out[at :]`, -1 for what the table does not have."""
    # Of the run, the part [first, end) lies in the table. No sum is taken of what may be near an int64's end.
    first = count
    end = count
    if 0 <= row < table.shape[0] and -count < start < table.shape[1]:
        first = max(-start, 0)
        end = min(table.shape[1] - start, count)
    for i in range(first):
        out[at + i] = -1
    for i in range(first, end):
        out[at + i] = table[row, start + i]
    for i in range(end, count):
        out[at + i] = -1


# Compiled code has one signature each: two entries, one body.
def _read_runs_32_loops(table: In32x2, rows: In64, starts: In64, counts: In64, out: Out64) -> None:
    at = 0
    for r in range(rows.shape[0]):
        count = max(counts[r], 0)
        read_run(table, rows[r], starts[r], count, at, out)
        at += count


def _read_runs_64_loops(table: In64x2, rows: In64, starts: In64, counts: In64, out: Out64) -> None:
    at = 0
    for r in range(rows.shape[0]):
        count = max(counts[r], 0)
        read_run(table, rows[r], starts[r], count, at, out)
        at += count
