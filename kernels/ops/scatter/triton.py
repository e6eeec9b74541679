"""Scatter on the device: every token knows whether a later request of the same row covers its place."""

from typing import Any

import triton
import triton.language as tl

from ...arrays import require_tensor
from ..triton_violations import add_where_any

TILE = 1024
PROGRAMS = 4096
_REQUESTS = tl.constexpr(256)


@triton.jit
def _range(offsets, r, mask, total):
    """The tokens of requests, and which of them do not lie within the input."""
    start = tl.load(offsets + r, mask=mask, other=0)
    end = tl.load(offsets + r + 1, mask=mask, other=0)
    bad = (start < 0) | (end < start) | (end > total)
    start = tl.maximum(start, 0)
    return start, tl.maximum(tl.minimum(end, total), start) - start, bad


@triton.jit(do_not_specialize=["total", "bs", "pool_rows", "width", "splits"])
def _scatter_kernel(
    flat, offsets, rows, pool, out_of_range, total, bs, pool_rows, width, stride, splits, T: tl.constexpr
):
    request = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    start, count, bad = _range(offsets, request, True, total)
    row = tl.load(rows + request)
    there = (row >= 0) & (row < pool_rows)
    if split == 0:
        failed = row * 0 + bad.to(tl.int64) + ((count > 0) & (there == 0)).to(tl.int64)
        add_where_any(out_of_range, failed)
    end = tl.minimum(count, width)
    if there & (split * T < end):
        covered = row * 0
        for first in range(request + 1, bs, _REQUESTS):
            r = first + tl.arange(0, _REQUESTS)
            _unused_start, other, _unused_bad = _range(offsets, r, r < bs, total)
            same = tl.load(rows + r, mask=r < bs, other=-1) == row
            covered = tl.maximum(covered, tl.max(tl.where(same, other, 0)))
        lane = tl.arange(0, T)
        for tile in range(split * T, end, splits * T):
            t = tile + lane
            mask = (t >= covered) & (t < end)
            tl.store(pool + row * stride + t, tl.load(flat + start + t, mask=mask, other=0).to(tl.int32), mask=mask)


def scatter(*, flat: Any, offsets: Any, rows: Any, pool: Any, out_of_range: Any | None) -> None:
    """`scatter.scatter` on tensors: one launch."""
    bs = len(rows)
    require_tensor("flat", flat, "int64", 1)
    require_tensor("rows", rows, "int64", 1)
    require_tensor("offsets", offsets, "int64", 1, length=bs + 1)
    require_tensor("pool", pool, "int32", 2)
    counter = flat.new_zeros(1) if out_of_range is None else out_of_range
    require_tensor("out_of_range", counter, "int64", 1, length=1)
    if not len(flat) or not bs:
        return
    splits = max(1, min(PROGRAMS // bs, triton.cdiv(pool.shape[1], TILE)))
    _scatter_kernel[(bs * splits,)](
        flat, offsets, rows, pool, counter, len(flat), bs, *pool.shape, pool.stride(0), splits, T=TILE
    )
