"""The hash that a record's successor carries, for many records at once on the host."""

import numpy as np
import numpy.typing as npt

from ....kernels.constants import RECORD_POSITION, RECORD_PREV_HASH, RECORD_TOKEN

Int64Array = npt.NDArray[np.int64]
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def carried_hashes(records: Int64Array) -> Int64Array:
    """Return `mix3(prev_hash, token, position)` of records `[n, >= 3] int64`, `[n] int64`."""
    token, position, prev_hash = (
        np.ascontiguousarray(records[:, word]).view(np.uint64)
        for word in (RECORD_TOKEN, RECORD_POSITION, RECORD_PREV_HASH)
    )
    return _hash_words(_hash_words(_hash_words(prev_hash) ^ token) ^ position).view(np.int64)


def _hash_words(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIER_1
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIER_2
    found: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return found
