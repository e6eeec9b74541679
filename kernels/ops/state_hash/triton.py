"""State hash on the device: a program for each slot, which adds up the words of its parts."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from ..hash.triton import hash_word
from . import reference
from .reference import pool_words

TILE = 512
_PARTS_AT = tl.constexpr(reference.PARTS_AT)
_PART_WORDS = tl.constexpr(reference.PART_WORDS)


@triton.jit
def slot_hash(pool, slot, TILE: tl.constexpr):
    """The hash of a slot, int64, of a pool that `pool_words` describes; 0 if it has no such slot, or no parts."""
    total = tl.zeros([TILE], tl.int64)
    parts = tl.load(pool + 1)
    there = (slot >= 0) & (slot < tl.load(pool)) & (parts > 0)
    if there:
        for number in range(parts):
            part = slot * 0 + number
            at = pool + _PARTS_AT + part * _PART_WORDS
            begin = tl.load(at) + slot * tl.load(at + 1)
            size = tl.load(at + 2)
            for start in range(0, size, 8 * TILE):
                w = start // 8 + tl.arange(0, TILE).to(tl.int64)
                mask = w * 8 < size
                word = tl.zeros([TILE], tl.uint64)
                if (begin | size) % 8 == 0:
                    words = begin.to(tl.pointer_type(tl.int64))
                    word = tl.load(words + w, mask=mask, other=0).to(tl.uint64, bitcast=True)
                else:
                    content = begin.to(tl.pointer_type(tl.uint8))
                    for b in tl.static_range(8):
                        byte = tl.load(content + w * 8 + b, mask=w * 8 + b < size, other=0)
                        word |= byte.to(tl.uint64) << (8 * b)
                place = (w + 1 + (part << 32)).to(tl.uint64, bitcast=True)
                added = hash_word(word ^ hash_word(place)).to(tl.int64, bitcast=True)
                total += tl.where(mask, added, 0)
    found = tl.sum(total)
    return tl.where(there & (found == 0), found + 1, found)


@triton.jit(do_not_specialize=[0, 1, 2, 3, 4], do_not_specialize_on_alignment=[0, 1, 2, 3, 4])
def slots_kernel(pool, slots, out, n, stride, TILE: tl.constexpr):
    """Put the hash of each slot into `out` `[n] int64`."""
    for i in range(tl.program_id(0).to(tl.int64), n, tl.num_programs(0).to(tl.int64)):
        tl.store(out + i, slot_hash(pool, tl.load(slots + i * stride).to(tl.int64), TILE))


def state_hashes(*, parts: Sequence[Any], num_slots: int, slots: Any) -> Any:
    """`reference.state_hashes` on tensors; `slots` `[n]` of any integer type: one launch."""
    import torch

    pool = torch.tensor(pool_words(parts, num_slots), dtype=torch.int64, device=slots.device)
    out = torch.empty(len(slots), dtype=torch.int64, device=slots.device)
    hash_into(pool, slots, out)
    return out


def hash_into(pool: Any, slots: Any, out: Any) -> None:
    """Put the hash of each slot `[n]` of a pool, described by `pool_words` on the device, into `out` `[n] int64`."""
    if len(slots):
        slots_kernel[(len(slots),)](pool, slots, out, len(slots), slots.stride(0), TILE)
