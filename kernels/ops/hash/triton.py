"""The canary's hash on the device: splitmix64's finaliser and the chain over canary records, in uint64.

Records are read as two pairs of words, 16 bytes each: token and position, then prev_hash and kv_hash.
"""

import triton
import triton.language as tl

from ...constants import ANCHOR
from .reference import MASK64, splitmix64

MULTIPLIER_1, MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)
CHAIN_SEED = tl.constexpr(splitmix64(ANCHOR & MASK64))


@triton.jit
def hash_word(x):
    """s(x) of uint64."""
    x = x ^ (x >> 30)
    x = x * _MULTIPLIER_1
    x = x ^ (x >> 27)
    x = x * _MULTIPLIER_2
    return x ^ (x >> 31)


@triton.jit
def hash_chain(prev_hash, token, position):
    """mix3 of uint64: what the successor of a record carries."""
    return hash_word(hash_word(hash_word(prev_hash) ^ token) ^ position)


@triton.jit
def load_pair(words, at, mask, S: tl.constexpr, ONCE: tl.constexpr = False):
    """The two words of `words` at `at` [S] and after it, uint64, 0 where `mask` is off; `ONCE`: nobody reads them again."""
    policy: tl.constexpr = "evict_first" if ONCE else ""
    both = tl.load(words + at[:, None] + tl.arange(0, 2)[None, :], mask=mask[:, None], other=0, eviction_policy=policy)
    first, second = tl.split(both.to(tl.uint64, bitcast=True))
    return first, second


@triton.jit
def store_pair(words, first, second, mask, S: tl.constexpr):
    """Store two words at each of the pointers `words` [S], 16 bytes at once."""
    tl.store(words[:, None] + tl.arange(0, 2)[None, :], tl.join(first, second), mask=mask[:, None])


@triton.jit
def signed(x):
    """The int64 with the bits of a uint64."""
    return x.to(tl.int64, bitcast=True)


@triton.jit
def unsigned(x):
    """The uint64 with the bits of an int64."""
    return x.to(tl.uint64, bitcast=True)
