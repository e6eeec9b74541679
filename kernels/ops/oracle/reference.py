"""The token oracle: a sampler whose every token is a hash of request and position, hence known beforehand."""

import numpy as np

from ...arrays import Int64Array, require
from ...dispatch import In64, Out64, select
from ..hash.reference import as_i64, as_u64, splitmix64

MAX_VOCAB = (1 << 31) - 1  # tokens travel as int32


def oracle_tokens_loops(request_ids: In64, positions: In64, vocab_size: int, out: Out64) -> None:
    """Write s(request_id XOR position) mod vocab_size, unsigned."""
    for i in range(len(out)):
        word = splitmix64(as_u64(request_ids[i]) ^ as_u64(positions[i]))
        out[i] = as_i64(word % as_u64(vocab_size))


def oracle_tokens(
    *, request_ids: Int64Array, positions: Int64Array, vocab_size: int, out: Int64Array, backend: str = "cpu"
) -> None:
    """Write the oracle's token for each (generalised request id, position); a sampler asks for its position + 1.

    `request_ids`, `positions`, `out` [n] int64. Raises `ValueError` for a vocabulary outside 1 .. 2^31 - 1.
    """
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size is {vocab_size}, expected 1 to {MAX_VOCAB}")
    require("out", out, np.int64, 1, written=True)
    require("request_ids", request_ids, np.int64, 1, length=len(out))
    require("positions", positions, np.int64, 1, length=len(out))
    select(oracle_tokens_loops, backend)(request_ids, positions, vocab_size, out)


def generalized_ids(*, request_ids: Int64Array, rooms: Int64Array | None, out: Int64Array) -> None:
    """Write the room of each request where it has one (>= 0), else the request's own id; all [bs] int64."""
    require("out", out, np.int64, 1, written=True)
    require("request_ids", request_ids, np.int64, 1, length=len(out))
    if rooms is None:
        out[:] = request_ids
        return
    require("rooms", rooms, np.int64, 1, length=len(out))
    out[:] = np.where(rooms >= 0, rooms, request_ids)
