"""Which blocks of recurrent state an engine's kernels are about to copy, of which the device alone knows."""

from typing import Any

import triton
import triton.language as tl

from ...capture.model_forward import launches_on

TILE = 256


@triton.jit(do_not_specialize=[6, 7], do_not_specialize_on_alignment=[6, 7])
def block_moves_kernel(rows, to, of, bias, table, out, n, stride, TILE: tl.constexpr):
    """Fill `out` `[3 * n] int64`, as `moved_blocks` says."""
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        mask = i < n
        row = tl.load(rows + i, mask=mask, other=-1).to(tl.int64)
        known = mask & (row >= 0)
        column = tl.load(to + row, mask=known, other=-1).to(tl.int64)
        source = tl.load(of + row, mask=known, other=-1).to(tl.int64)
        moves = (column >= 0) & (source >= 0) & (source != column)
        block = tl.load(table + row * stride + column, mask=known & moves, other=0).to(tl.int64)
        begun = tl.load(table + row * stride + source, mask=known & moves, other=0).to(tl.int64)
        shifted = tl.load(bias + row, mask=known & moves, other=0) != 0
        tl.store(out + i, tl.where(shifted, -1, block), mask=mask)
        tl.store(out + n + i, begun, mask=mask)
        tl.store(out + 2 * n + i, 0 * row, mask=mask)


def moved_blocks(*, rows: Any, to: Any, of: Any, bias: Any, table: Any) -> Any:
    """Return the blocks that requests' states are copied to, from, and zeros, `[3 * n] int64`: one launch, nobody waits.

    A request's row is one of `rows` `[n]`. `to`, `of` and `bias` `[any]` have of each row the column of `table`
    `[any, columns]` it is copied to, the one it is copied from (below 0: nothing is), and by how many tokens it is shifted: what
    is copied with a shift has block -1. Who is not copied has twice the same. All are integers of one device.
    """
    import torch

    n = rows.numel()
    out = torch.empty(3 * n, dtype=torch.int64, device=rows.device)
    arguments = rows, to, of, bias, table, out, n, table.stride(0)
    launches_on(out).launch(block_moves_kernel, 1, arguments, (TILE,))
    return out
