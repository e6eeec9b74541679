"""State hash: some bytes of a slot's parts (a convolution's window, a recurrent matrix, ...), as one 64-bit number.

Each part is read as little-endian 64-bit words, the last one filled up with zeros. The hash is the sum of s(word ^ s(place))
over them all, where s is splitmix64 and a word's place its number plus 1, with the part's number in the upper half: a sum, so
that a device may add up the words in any order. 0 stands for "not read"; a sum of 0 becomes 1.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...arrays import ByteArray, Int64Array
from ...dispatch import In8x2, In64, Out64, has_device_form, select
from ..hash.reference import as_i64, as_u64, splitmix64

MAX_PARTS: Final = 4
# A pool as the device's form has it: how many slots and parts, then of each part its address, the bytes from one slot to the
# next, and how many of them are read.
PARTS_AT: Final = 2
PART_WORDS: Final = 3
POOL_WORDS: Final = PARTS_AT + MAX_PARTS * PART_WORDS


def pool_words(parts: Sequence[Any], num_slots: int) -> list[int]:
    """Return the words by which the device finds the parts, `[num_slots, bytes] uint8` tensors with rows of any stride.

    Raises:
        ValueError: more parts than there is room for, or rows whose bytes do not lie side by side.
    """
    if len(parts) > MAX_PARTS or any(part.stride(1) != 1 and part.shape[1] > 1 for part in parts):
        raise ValueError(f"a state of {len(parts)} parts, expected at most {MAX_PARTS}, each slot's bytes side by side")
    words = [num_slots, len(parts)]
    for part in parts:
        words += (part.data_ptr(), part.stride(0), part.shape[1])
    return words + [0] * (POOL_WORDS - len(words))


def _add_part_loops(part: In8x2, number: int, slots: In64, out: Out64) -> None:
    size = part.shape[1]
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0 or slot >= part.shape[0]:
            continue
        total = as_u64(out[i])
        for first in range(0, size, 8):
            word = as_u64(0)
            for b in range(first, min(first + 8, size)):
                word |= as_u64(part[slot, b]) << as_u64(8 * (b - first))
            place = as_u64(first // 8 + 1 + (number << 32))
            total = as_u64(total + splitmix64(word ^ splitmix64(place)))
        out[i] = as_i64(total)


@has_device_form("state_hash.triton")
def state_hashes(*, parts: Sequence[ByteArray], num_slots: int, slots: Int64Array, backend: str = "cpu") -> Int64Array:
    """Return the hash of each of these slots, `[n] int64`: 0 for one that is not there, and for all if there are no parts.

    `parts` `[num_slots, bytes] uint8` each, rows of any stride; `slots` `[n] int64` of any stride.
    """
    out = np.zeros(len(slots), np.int64)
    for number, part in enumerate(parts):
        select(_add_part_loops, backend)(part, number, slots, out)
    there = (slots >= 0) & (slots < num_slots)
    return np.where(there & (out == 0), 1 if len(parts) else 0, out)


def prepare(backend: str) -> None:
    """Compile what there is to compile now."""
    select(_add_part_loops, backend)
