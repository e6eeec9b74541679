"""What a forward under the hash oracle must have been fed, for the write-input assert.

The oracle's tokens are known wherever the engine generates: the inputs of decodes, wherever they stand, and of a draft
model's extends past the prompt. A prompt that is extended, a draft model's own guesses and what a target verifies are
taken as fed, as the published canary takes them; so is an unknown token.
"""

import numpy as np
import numpy.typing as npt

from ...kernels.constants import UNKNOWN_TOKEN
from ...kernels.ops.oracle.reference import generalized_ids, oracle_tokens
from ...recorder.state.batch_tokens import batch_tokens
from ...recorder.state.forward import Forward
from ...recorder.state.requests import RequestBook
from ...recorder.trace.header import TraceHeader

Int64Array = npt.NDArray[np.int64]


def expected_tokens(forward: Forward, header: TraceHeader, book: RequestBook, *, backend: str) -> Int64Array | None:
    """Return the token that each of a forward's inputs must be, `[T] int64`; None where nothing can be asserted.

    A draft's input at position p is the token of p + 1 (`token_offset`). Requests go by their room where they have one.
    """
    offset = header.runners[forward.runner].token_offset
    asked = forward.mode == "draft_extend" or (forward.mode == "decode" and not offset)
    if header.oracle is None or not asked or not len(forward.request_ids):
        return None
    tokens = batch_tokens(forward)
    if not len(tokens.request):
        return None
    rooms, prompts, told = book.rooms_and_prompts(forward.request_ids)
    ids = np.empty(len(forward.request_ids), np.int64)
    generalized_ids(request_ids=forward.request_ids, rooms=rooms, out=ids)
    # The model goes by the positions that it is fed; where those are wrong, the chain says so.
    at = forward.positions[: len(tokens.request)] + offset
    foretold = np.empty(len(at), np.int64)
    oracle_tokens(
        request_ids=ids[tokens.request],
        positions=at,
        vocab_size=header.oracle.vocab_size,
        out=foretold,
        backend=backend,
    )
    known = told[tokens.request]
    if forward.mode == "draft_extend":  # its inputs may be the prompt's
        known &= (prompts >= 0)[tokens.request] & (at >= prompts[tokens.request])
    expected = forward.input_ids.copy()
    known &= expected[: len(at)] != UNKNOWN_TOKEN
    expected[: len(at)][known] = foretold[known]
    return expected
