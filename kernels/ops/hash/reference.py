"""The canary's hash: splitmix64's finaliser, the chain over canary records, and 64-bit words in both backends.

All arithmetic is unsigned modulo 2^64; hashes are stored as int64 by bit pattern. A loop never mixes the two: it goes
through `as_u64` and `as_i64`. Masks cost nothing in compiled code.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from ...constants import ANCHOR, RECORD_POSITION, RECORD_PREV_HASH, RECORD_TOKEN
from ...dispatch import In64x2, Out64, primitive

MASK64: Final = (1 << 64) - 1
_SIGN64: Final = 1 << 63
_MULTIPLIER_1: Final = 0xBF58476D1CE4E5B9
_MULTIPLIER_2: Final = 0x94D049BB133111EB


# numpy's annotations know these words only as numpy scalars, hence plain ints here.
def _compiled_u64(value: int) -> int:
    return np.uint64(value)  # type: ignore[return-value]


def _compiled_i64(value: int) -> int:
    return np.int64(value)  # type: ignore[return-value]


def _compiled_i32(value: int) -> int:
    return np.int32(value)  # type: ignore[return-value]


@primitive(_compiled_u64)
def as_u64(value: int) -> int:
    """Return the unsigned 64-bit word with the bits of `value`."""
    return int(value) & MASK64


@primitive(_compiled_i64)
def as_i64(value: int) -> int:
    """Return the signed 64-bit word with the bits of `value`."""
    word = int(value) & MASK64
    return word - (1 << 64) if word & _SIGN64 else word


@primitive(_compiled_i32)
def as_i32(value: int) -> int:
    """Return the signed word of the low 32 bits of `value`."""
    word = int(value) & 0xFFFFFFFF
    return word - (1 << 32) if word & 0x80000000 else word


@primitive()
def splitmix64(word: int) -> int:
    """Return s(word), word and result unsigned."""
    x = word ^ (word >> 30)
    x = (x * _MULTIPLIER_1) & MASK64
    x = x ^ (x >> 27)
    x = (x * _MULTIPLIER_2) & MASK64
    return x ^ (x >> 31)


def splitmix64_words(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return s(word) of each word, `[n] uint64`, in numpy."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    return words ^ (words >> np.uint64(31))


@primitive()
def mix3(a: int, b: int, c: int) -> int:
    """Return s(s(s(a) ^ b) ^ c), all unsigned."""
    return splitmix64(splitmix64(splitmix64(a) ^ b) ^ c)


@primitive()
def chain_seed() -> int:
    """Return a chain head's prev_hash, unsigned."""
    return splitmix64(as_u64(ANCHOR))


@primitive()
def slot_hash(records: In64x2, slot: int) -> int:
    """Return the unsigned hash that the successor of `slot` must carry: the chain seed for a negative slot.

    `records` [num_slots, 4] int64; `slot` below num_slots, which the caller has checked.
    """
    if slot < 0:
        return chain_seed()
    return mix3(
        as_u64(records[slot, RECORD_PREV_HASH]),
        as_u64(records[slot, RECORD_TOKEN]),
        as_u64(records[slot, RECORD_POSITION]),
    )


@primitive()
def bump(counter: Out64, amount: int) -> None:
    """Add to a counter `[1] int64`; past the largest value it wraps, as a machine word does."""
    counter[0] = as_i64(as_u64(counter[0]) + as_u64(amount))
