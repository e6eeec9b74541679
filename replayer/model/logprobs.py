"""The log-probabilities that an engine gave for a request's sampled tokens, held against those of its model."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.trace.schema import LOGPROB_KINDS
from .first_layer import LEAST, FloatArray
from .request_walk import SampledLogprob

_NOISE: Final = 8.0  # times what the engine's dtype changes in a vocabulary's log-probabilities, by root mean square
_MOST_VALUES: Final = 1 << 26  # of positions times the vocabulary, that are computed at once
_RAW: Final = LOGPROB_KINDS.index("raw")
_WHY_NOT: Final = {
    "": "the engine does not say whether temperature and penalties are in them",
    "processed": "they are of what was sampled from, behind temperature or penalties",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobDiffers:
    """A sampled token whose log-probability is not the model's; `position` is the token's own, `tolerance` how much it may be off."""

    event: int
    forward: int
    position: int
    token: int
    recorded: float
    computed: float
    tolerance: float
    words: str = ""


@dataclass(slots=True)
class LogprobsCompared:
    """What came of it: `differing` in the order of the forwards; `tolerance` is what half of the tokens had at most; of `unknown`
    tokens the checkpoint gives NaN or infinity.
    """

    compared: int = 0
    tolerance: float = 0.0
    differing: tuple[LogprobDiffers, ...] = ()
    unknown: int = 0


def comparable(
    sampled: list[SampledLogprob], tokens: Int64Array, vocab_size: int
) -> tuple[list[SampledLogprob], list[str]]:
    """Return those that the model can be asked about, given a request's tokens `[n]`, and why the others cannot be compared."""
    chosen, left = [], Counter[str]()
    for one in sampled:
        first = one.position - len(one.before)
        if np.isnan(one.logprob):
            left["the engine gave none"] += 1
        elif one.kind != _RAW:
            left[_WHY_NOT.get(LOGPROB_KINDS[one.kind] if 0 <= one.kind < len(LOGPROB_KINDS) else "", _WHY_NOT[""])] += 1
        elif not 0 < one.position <= len(tokens) or tuple(tokens[first : one.position].tolist()) != one.before:
            left["the tokens before them are not known"] += 1
        elif not 0 <= one.token < vocab_size:
            left["the model has no such token"] += 1
        else:
            chosen.append(one)
    most = max(1, _MOST_VALUES // max(1, vocab_size))
    wanted = np.unique([one.position for one in chosen])
    if len(wanted) > most:
        left[f"only the first {most:,} are computed, for they take a whole vocabulary each"] += sum(
            one.position > wanted[most - 1] for one in chosen
        )
        chosen = [one for one in chosen if one.position <= wanted[most - 1]]
    return chosen, [f"log-probabilities of {count:,} tokens: {why}" for why, count in left.items()]


def compare(
    sampled: list[SampledLogprob], positions: Int64Array, full: FloatArray, low: FloatArray
) -> LogprobsCompared:
    """Compare with what the model gives behind `positions` `[n]` ascending, `[n, vocab]` in float32 and in the engine's dtype.

    A log-probability may be off by eight times what the dtype changes, by root mean square over the vocabulary, at its position or
    at most positions, and by 2^-8 of the largest logit.
    """
    if not sampled:
        return LogprobsCompared()
    with np.errstate(invalid="ignore", over="ignore"):
        noise = np.sqrt(np.square(full - low).mean(axis=1))
        largest = np.abs(full - full.mean(axis=1, keepdims=True)).max(axis=1)
        usual = np.median(noise[np.isfinite(noise)]) if np.isfinite(noise).any() else 0.0
        tolerance = _NOISE * np.maximum(noise, usual) + LEAST * largest
    rows = np.searchsorted(positions, [one.position - 1 for one in sampled])
    known = np.flatnonzero(np.isfinite(tolerance[rows]))
    found = []
    for one, row in ((sampled[n], int(rows[n])) for n in known.tolist()):
        computed, most = float(full[row, one.token]), float(tolerance[row])
        if not abs(one.logprob - computed) <= most:
            found.append(
                LogprobDiffers(
                    event=one.event,
                    forward=one.forward,
                    position=one.position,
                    token=one.token,
                    recorded=one.logprob,
                    computed=computed,
                    tolerance=most,
                )
            )
    found.sort(key=lambda one: (one.event, one.position))
    half = float(np.median(tolerance[rows[known]])) if len(known) else 0.0
    return LogprobsCompared(len(known), half, tuple(found), len(sampled) - len(known))
