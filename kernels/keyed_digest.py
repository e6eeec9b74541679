"""Keyed digests of rows of bytes: SipHash-2-4 with 128 bits, which says who is equal to whom and nothing else.

Source: J.-P. Aumasson and D. J. Bernstein, "SipHash: a fast short-input PRF", 2012, and its 128-bit form.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from .dispatch import In64, In64x2, Out64x2, primitive, select
from .ops.hash.reference import MASK64, as_i64, as_u64

DIGEST_BYTES: Final = 16
KEY_BYTES: Final = 16

_INIT: Final = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_START_0, _START_1, _START_2, _START_3 = _INIT
_WIDE_START: Final = 0xEE
_WIDE_SECOND: Final = 0xDD


def keyed_digests(*, rows: npt.NDArray[np.uint8], key: bytes, backend: str = "cpu") -> npt.NDArray[np.uint8]:
    """Return a digest of each row, `[n, 16] uint8`.

    `rows` `[n, width] uint8`, C-contiguous, `width` a multiple of 8; `key` 16 bytes. Raises `ValueError` for others.
    """
    if rows.ndim != 2 or rows.dtype != np.uint8 or rows.shape[1] % 8 or not rows.flags.c_contiguous:
        raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}, expected C-contiguous uint8 [n, a multiple of 8]")
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key has {len(key)} bytes, expected {KEY_BYTES}")
    digests = np.empty((rows.shape[0], 2), np.int64)
    words = np.frombuffer(rows.tobytes(), np.int64).reshape(rows.shape[0], rows.shape[1] // 8)
    select(_digest_loops, backend)(words, np.frombuffer(key, np.int64), digests)
    return digests.view(np.uint8)


def _digest_loops(words: In64x2, key: In64, digests: Out64x2) -> None:
    """`words` `[n, width / 8]`, `key` `[2]`, `digests` `[n, 2]`; little-endian."""
    key_0, key_1 = as_u64(key[0]), as_u64(key[1])
    last = as_u64(((words.shape[1] * 8) & 0xFF) << 56)
    for row in range(words.shape[0]):
        a = as_u64(_START_0) ^ key_0
        b = as_u64(_START_1) ^ key_1 ^ as_u64(_WIDE_START)
        c = as_u64(_START_2) ^ key_0
        d = as_u64(_START_3) ^ key_1
        for column in range(words.shape[1]):
            word = as_u64(words[row, column])
            a, b, c, d = _two_rounds(a, b, c, d ^ word)
            a = a ^ word
        a, b, c, d = _two_rounds(a, b, c, d ^ last)
        a, b, c, d = _two_rounds(a ^ last, b, c ^ as_u64(_WIDE_START), d)
        a, b, c, d = _two_rounds(a, b, c, d)
        digests[row, 0] = as_i64(a ^ b ^ c ^ d)
        a, b, c, d = _two_rounds(a, b ^ as_u64(_WIDE_SECOND), c, d)
        a, b, c, d = _two_rounds(a, b, c, d)
        digests[row, 1] = as_i64(a ^ b ^ c ^ d)


@primitive()
def _rotated(word: int, bits: int) -> int:
    return ((word << as_u64(bits)) & MASK64) | (word >> as_u64(64 - bits))


@primitive()
def _round(a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
    a = (a + b) & MASK64
    b = _rotated(b, 13) ^ a
    a = _rotated(a, 32)
    c = (c + d) & MASK64
    d = _rotated(d, 16) ^ c
    a = (a + d) & MASK64
    d = _rotated(d, 21) ^ a
    c = (c + b) & MASK64
    b = _rotated(b, 17) ^ c
    c = _rotated(c, 32)
    return a, b, c, d


@primitive()
def _two_rounds(a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
    a, b, c, d = _round(a, b, c, d)
    return _round(a, b, c, d)
