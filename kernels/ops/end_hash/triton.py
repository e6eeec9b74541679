"""End hash on the device, which reads pinned memory of the host as well: two sums for each part of each page, in one launch."""

from typing import Any

import triton
import triton.language as tl

from ...capture.model_forward import launches_on
from . import reference

PROGRAMS = 512
TILE = reference.MOST_WORDS
_PIECE = tl.constexpr(reference.PIECE_WORDS)
_FIELDS = tl.constexpr(reference.PART_FIELDS)
_MULTIPLIER = tl.constexpr(reference.MULTIPLIER)
_SHIFT = tl.constexpr(reference.SHIFT)


@triton.jit(do_not_specialize=[0, 1, 2, 3, 4], do_not_specialize_on_alignment=[0, 1, 2, 3, 4])
def end_sums_kernel(parts, pages, out, n, num_parts, TILE: tl.constexpr):
    """Put the sums of the words of each page's parts into `out` `[2, n, num_parts] int64`: with their factors, and without."""
    k = tl.arange(0, TILE).to(tl.int64)
    for i in range(tl.program_id(0).to(tl.int64), n * num_parts, tl.num_programs(0).to(tl.int64)):
        page = i // num_parts
        part = parts + (i % num_parts) * _FIELDS
        row = tl.load(part) + tl.load(pages + page) * tl.load(part + 1)
        begin = (row + tl.load(pages + n + page) * tl.load(part + 2)).to(tl.pointer_type(tl.int32))
        mask = k < tl.load(part + 3)
        at = (k // _PIECE) * tl.load(part + 4) + k % _PIECE
        word = tl.load(begin + at, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        word = (word + 1) * _MULTIPLIER
        word = tl.where(mask, (word ^ (word >> _SHIFT)).to(tl.int64, bitcast=True), 0)
        tl.store(out + i, tl.sum(word * (tl.load(part + 5) + 2 * k)))
        tl.store(out + n.to(tl.int64) * num_parts + i, tl.sum(word))


def end_sums(parts: Any, pages: Any) -> Any:
    """Return the two sums of each page's parts, `[2, n, parts] int64`, which `reference.mixed` makes hashes of; nobody waits for them.

    `parts` `[any] int64` is `reference.part_words` on the device, `pages` `[2, n] int64` are the rows and the places in these, of
    each part the same.
    """
    import torch

    n, num_parts = pages.shape[1], parts.numel() // reference.PART_FIELDS
    out = torch.empty((2, n, num_parts), dtype=torch.int64, device=pages.device)
    launches_on(out).launch(end_sums_kernel, PROGRAMS, (parts, pages, out, n, num_parts), (TILE,))
    return out
