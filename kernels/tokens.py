"""When two tokens contradict each other: a table of truth tokens holds 32 bits, and -1 is a token that nobody knows."""

import numpy as np
import numpy.typing as npt

from .arrays import Int64Array
from .constants import RECORD_TOKEN, UNKNOWN_TOKEN
from .dispatch import primitive
from .ops.hash.reference import as_i32, as_u64
from .ops.plan.reference import VerifyPlan


@primitive(inlined=True)
def contradicts(truth: int, token: int) -> int:
    """Say whether a token is another than that of the truth table; 0 or 1."""
    return 1 if truth != UNKNOWN_TOKEN and token != UNKNOWN_TOKEN and truth != as_i32(as_u64(token)) else 0


def contradicting(truth: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return `[n] bool`: what `contradicts` says of `truth` and `tokens`, `[n] int64` each."""
    return (truth != UNKNOWN_TOKEN) & (tokens != UNKNOWN_TOKEN) & (truth != tokens.astype(np.int32))


def expect_stored(plan: VerifyPlan, records: Int64Array) -> None:
    """Expect of a plan's entries the very token that their slot holds, where that does not contradict the truth token.

    A truth table has 32 bits of a token, a slot's record (`records` `[num_slots, 4] int64`) has 64, and an unknown one
    contradicts nothing.
    """
    count = int(plan.num_valid[0])
    slots, expected = plan.slots[:count], plan.expected_tokens[:count]
    asked = np.flatnonzero((expected != UNKNOWN_TOKEN) & (slots > 0) & (slots < len(records)))
    stored = records[slots[asked], RECORD_TOKEN]
    agree = ~contradicting(expected[asked], stored)
    expected[asked[agree]] = stored[agree]
