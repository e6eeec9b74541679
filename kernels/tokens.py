"""When two tokens contradict each other: a table of truth tokens holds 32 bits, and -1 is a token that nobody knows."""

import numpy as np
import numpy.typing as npt

from .constants import UNKNOWN_TOKEN
from .dispatch import primitive
from .ops.hash.reference import as_i32, as_u64


@primitive(inlined=True)
def contradicts(truth: int, token: int) -> int:
    """Say whether a token is another than that of the truth table; 0 or 1."""
    return 1 if truth != UNKNOWN_TOKEN and token != UNKNOWN_TOKEN and truth != as_i32(as_u64(token)) else 0


def contradicting(truth: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return `[n] bool`: what `contradicts` says of `truth` and `tokens`, `[n] int64` each."""
    return (truth != UNKNOWN_TOKEN) & (tokens != UNKNOWN_TOKEN) & (truth != tokens.astype(np.int32))
