"""End hash: the words of a page's parts, layers say, as one 64-bit number, of which no sum depends on the order of adding.

Each part is read as little-endian words of 4 bytes, of 1 if its bytes are no multiple of 4. Of word w at place k of all,
m = (w + 1) * M, m ^ (m >> 29). The lower half of the hash is the sum of these, the upper half, folded, the sum of each times
2 * k + 1: pages of one lower half and two upper ones hold the same words in another order. Never 0, which stands for bytes
that were not read.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...arrays import Int64Array

MULTIPLIER: Final = 0x9E3779B97F4A7C15
SHIFT: Final = 29
# A device looks at no more than so many words of a part, in pieces that lie evenly apart.
MOST_WORDS: Final = 1024
PIECE_WORDS: Final = 16
# Of each part a device is told where it begins, the bytes from one row to the next and of a page, the words that are looked at
# of it, those between two pieces, and the factor of its first word.
PART_FIELDS: Final = 6


def end_sums(parts: Sequence[npt.NDArray[Any]]) -> Int64Array:
    """Return the two sums of each part of each page, `[2, n, parts]`: of each part `[n, bytes] uint8` row i belongs to page i."""
    found, first = np.zeros((2, len(parts[0]), len(parts)), np.uint64), 1
    for number, part in enumerate(parts):
        width = 4 if part.shape[1] % 4 == 0 else 1
        words = np.ascontiguousarray(part).view(f"<u{width}").astype(np.uint64) + np.uint64(1)
        words *= np.uint64(MULTIPLIER)
        words ^= words >> np.uint64(SHIFT)
        found[1, :, number] = words.sum(axis=1, dtype=np.uint64)
        words *= np.arange(first, first + 2 * words.shape[1], 2, dtype=np.uint64)
        found[0, :, number] = words.sum(axis=1, dtype=np.uint64)
        first += 2 * words.shape[1]
    return found.view(np.int64)


def end_hashes(parts: Sequence[npt.NDArray[Any]]) -> Int64Array:
    """Return the hash of each page, `[n]`: of each part `[n, bytes] uint8` row i belongs to page i."""
    return mixed(*end_sums(parts).sum(axis=2))


def mixed(ordered: Int64Array, plain: Int64Array) -> Int64Array:
    """Return hashes made of two sums each, of pages or of their parts."""
    up, half = ordered.view(np.uint64), np.uint64(32)
    both = ((up ^ (up >> half)) << half) | (plain.view(np.uint64) & np.uint64(0xFFFFFFFF))
    return np.where(both == 0, np.uint64(1), both).view(np.int64)


def looked_at(words: int, most: int = MOST_WORDS) -> Int64Array:
    """Return the places of the words that a device looks at of a part of so many, ascending; `most` as of `part_words`."""
    if words <= most:
        return np.arange(words)
    starts = np.arange(most // PIECE_WORDS) * (words // (most // PIECE_WORDS))
    return (starts[:, None] + np.arange(PIECE_WORDS)).reshape(-1)


def part_words(parts: Sequence[Any], *, each: int = 1, most: int = MOST_WORDS) -> list[int]:
    """Return the words by which a device finds the parts, `[rows, bytes]` tensors of one byte an element, `each` pages a row.

    No more than `most` words of a part are looked at, a multiple of `PIECE_WORDS` up to `MOST_WORDS`.

    Raises:
        ValueError: a page's bytes do not lie side by side in words of 4.
    """
    found, first = list[int](), 1
    for part in parts:
        stride, size, address = int(part.stride(0)), int(part.shape[1]) // each, int(part.data_ptr())
        if (part.stride(1) != 1 and size > 1) or (stride | size | address) % 4 or part.element_size() != 1:
            raise ValueError(f"pages of {size} bytes, {stride} apart, expected words of 4 bytes side by side")
        words, pieces = size // 4, most // PIECE_WORDS
        apart = PIECE_WORDS if words <= most else words // pieces
        found += (address, stride, size, min(words, most), apart, first)
        first += 2 * min(words, most)
    return found
