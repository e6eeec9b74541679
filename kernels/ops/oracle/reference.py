"""The token oracle: a sampler whose every token is a hash of request and position, hence known beforehand."""

import numpy as np
import numpy.typing as npt

from ...arrays import require
from ...dispatch import In64, Out64, select
from ..hash.reference import as_i64, as_u64, splitmix64

MAX_VOCAB = (1 << 31) - 1  # tokens travel as int32

# Modes whose inputs nobody can foretell (a prompt, a draft model's guesses): expected is what was fed.
MODES_AS_FED = ("extend", "mixed", "target_verify")
MODES = (*MODES_AS_FED, "decode", "draft_extend", "idle")


def oracle_tokens_loops(request_ids: In64, positions: In64, vocab_size: int, out: Out64) -> None:
    """Write s(request_id XOR position) mod vocab_size, unsigned."""
    for i in range(len(out)):
        word = splitmix64(as_u64(request_ids[i]) ^ as_u64(positions[i]))
        out[i] = as_i64(word % as_u64(vocab_size))


def repeat_ids_loops(ids: In64, counts: In64, out: Out64) -> None:
    """Write each id `counts[r]` times, one after another, as far as `out` goes."""
    at = 0
    for r in range(len(ids)):
        count = max(0, min(int(counts[r]), len(out) - at))
        for i in range(at, at + count):
            out[i] = ids[r]
        at += count


def oracle_tokens(
    *,
    request_ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    vocab_size: int,
    out: npt.NDArray[np.int64],
    backend: str = "cpu",
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


def generalized_ids(
    *, request_ids: npt.NDArray[np.int64], rooms: npt.NDArray[np.int64] | None, out: npt.NDArray[np.int64]
) -> None:
    """Write the room of each request where it has one (>= 0), else the request's own id; all [bs] int64."""
    require("out", out, np.int64, 1, written=True)
    require("request_ids", request_ids, np.int64, 1, length=len(out))
    if rooms is None:
        out[:] = request_ids
        return
    require("rooms", rooms, np.int64, 1, length=len(out))
    out[:] = np.where(rooms >= 0, rooms, request_ids)


def expected_inputs(
    *,
    mode: str,
    input_ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    request_ids: npt.NDArray[np.int64],
    rooms: npt.NDArray[np.int64] | None,
    lens: npt.NDArray[np.int64],
    vocab_size: int,
    out_tokens: npt.NDArray[np.int64],
    out_positions: npt.NDArray[np.int64],
    backend: str = "cpu",
) -> None:
    """Write what a forward under the oracle must have been fed, for write's input assert.

    `mode` as the trace has it; `input_ids`, `positions`, `out_tokens`, `out_positions` [tokens] int64; `request_ids`,
    `rooms` (or None), `lens` (tokens a request: 1 in decode, the draft's count, or extend_lens) [bs] int64. In extend,
    mixed and target-verify the expected tokens are the actual ones, otherwise the oracle's at `positions`; positions
    are taken as fed. Raises `ValueError` where the lens do not add up to the tokens.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    num_tokens = len(input_ids)
    require("input_ids", input_ids, np.int64, 1)
    require("positions", positions, np.int64, 1, length=num_tokens)
    require("out_tokens", out_tokens, np.int64, 1, length=num_tokens, written=True)
    require("out_positions", out_positions, np.int64, 1, length=num_tokens, written=True)
    require("request_ids", request_ids, np.int64, 1)
    if rooms is not None:
        require("rooms", rooms, np.int64, 1, length=len(request_ids))
    require("lens", lens, np.int64, 1, length=len(request_ids))
    if num_tokens == 0:
        return
    if bool((lens < 0).any()) or int(np.minimum(lens, num_tokens + 1).sum()) != num_tokens:
        raise ValueError(f"lens add up to {int(lens.sum())}, expected the forward's {num_tokens} tokens")
    out_positions[:] = positions
    if mode in MODES_AS_FED:
        out_tokens[:] = input_ids
        return
    ids = np.empty(len(request_ids), np.int64)
    generalized_ids(request_ids=request_ids, rooms=rooms, out=ids)
    ids_per_token = np.empty(num_tokens, np.int64)
    select(repeat_ids_loops, backend)(ids, lens, ids_per_token)
    oracle_tokens(
        request_ids=ids_per_token, positions=positions, vocab_size=vocab_size, out=out_tokens, backend=backend
    )
