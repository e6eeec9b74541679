"""How equal tokens' bytes differ in a stream: V's by token, K's by token and position, under one adapter and one set of weights.

What is remembered of a stream is held against what comes next, a batch of events at a time.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.ops.token_rows.encoding import float_values
from ...kernels.ops.token_rows.reference import encoding_of
from .written import BEFORE, EVENT, FURTHEST, POSITION, REQUEST, ROUNDING, TOKEN_BITS, WrittenTokens

# Of 8 bits equal values may differ by a code: by a part of the value, and of small ones by a step, of which there are so many to 1.
_CODES: Final = {dtype: of for dtype in ("float8_e4m3fn", "float8_e5m2") if (of := encoding_of(dtype, 1.0)) is not None}
# How far equal tokens may differ, by dtype.
EQUAL: Final = ROUNDING | {dtype: of.relative for dtype, of in _CODES.items()}
_NOISE: Final = 16  # times what most repeats differ by
_MOST: Final = 0.7  # of the repeats are right, or the bytes follow from more than the token
_FEWEST: Final = 32  # repeats from which anything can be learnt
_RECENT: Final = 4096  # rows that show, with those of a batch, how large K is
_POSITION_BITS: Final = 20  # of K's keys, between the identity and the token
_MAX_TOKENS: Final = 1 << 17  # that are remembered of a stream
_MAX_DIFFERENCES: Final = 1 << 20


class Difference(NamedTuple):
    """A token whose bytes differ by more than rounding from those of the token `before` it with its key.

    `among_right`: the same forward wrote other tokens of that identity with the bytes that they had; `partly`: of the
    same request, too.
    """

    much: float  # of the largest value
    place: list[int]
    before: list[int]
    key: int
    among_right: bool
    partly: bool = False

    @property
    def identity(self) -> int:
        """The number of its adapter and weights."""
        return self.key >> TOKEN_BITS


@dataclass(slots=True)
class Repeats:
    """What is remembered of a stream: of each key the last bytes, those before them, and where both stand; who was written last stands last.

    `pairs` counts repeats that tell something, `by` how far those of them that are not equal differ, `found` all that differ by
    more than rounding. `alike` has by identity the events `[n, 2]` from one to the other of which a token came again so: weights and
    adapter are the same. `across` has the lengths `[n, 2]` from one to the other of which a token's K came again so: no length
    there chooses the angles.
    """

    half: str
    dtype: str
    keys: Int64Array
    rows: ByteArray
    older: ByteArray
    places: Int64Array
    older_places: Int64Array
    pairs: int = 0
    by: list[npt.NDArray[np.float64]] = field(default_factory=list)
    found: list[Difference] = field(default_factory=list)
    alike: dict[int, Int64Array] = field(default_factory=dict)
    across: Int64Array = field(default_factory=lambda: np.empty((0, 2), np.int64))

    @classmethod
    def begin(cls, half: str, dtype: str, written: WrittenTokens) -> "Repeats":
        """Remember nothing yet of a stream that has rows like these."""
        keys, data, places = written
        return cls(half, dtype, keys[:0], data[:0], data[:0], places[:0], places[:0])

    @property
    def token_bits(self) -> int:
        """How many of a key's bits are the token's."""
        return TOKEN_BITS if self.half == "V" else TOKEN_BITS - _POSITION_BITS

    def limit(self) -> float | None:
        """Return by how much equal tokens may differ, as their repeats show it; None if these do not show that they are equal."""
        by = np.sort(np.concatenate([np.zeros(0), *self.by]))
        equal, most = self.pairs - len(by), int(_MOST * self.pairs)
        noise = 0.0 if most < equal or not len(by) else float(by[min(most - equal, len(by) - 1)])
        limit = max(EQUAL[self.dtype], _NOISE * noise)
        nothing = limit >= 1  # equal tokens differ by as much as others do
        too_few = self.pairs < _FEWEST
        if too_few or nothing or int((by > limit).sum()) > (1 - _MOST) * self.pairs or len(by) > _MAX_DIFFERENCES:
            return None
        return limit

    def beyond(self, limit: float) -> int:
        """Return how many of the repeats differ by more."""
        return sum(int((by > limit).sum()) for by in self.by)

    def spans(self, one: Difference) -> bool:
        """Say whether tokens of its identity came again with their bytes over the whole time between the two of a difference."""
        spans = self.alike.get(one.identity, np.empty((0, 2), np.int64))
        begin, end = sorted((one.before[EVENT], one.place[EVENT]))
        return bool(((spans[:, 0] <= begin) & (end <= spans[:, 1])).any())

    def compare(self, written: WrittenTokens) -> None:
        """Compare each token with the one before it that has the same key, and remember the last."""
        keys, data, places = written if self.half == "V" else _by_position(written)
        if not len(keys) or sum(map(len, self.by)) > _MAX_DIFFERENCES:
            return
        fresh = np.unique(keys)
        again = fresh[np.minimum(np.searchsorted(fresh, self.keys), len(fresh) - 1)] == self.keys
        old = self.keys[again]
        # What is remembered stands in front, the older bytes first: each token then has its two before it.
        twice = np.concatenate([old, old, keys])
        order = np.argsort(twice, kind="stable")
        rows = np.concatenate([self.older[again], self.rows[again], data])[order]
        places = np.concatenate([self.older_places[again], self.places[again], places])[order]
        keys = twice[order]
        new = order >= 2 * len(old)
        same = np.append(False, keys[1:] == keys[:-1])
        tells = same & new
        if self.half == "V":
            tells &= np.append(False, (places[1:, [POSITION, BEFORE]] != places[:-1, [POSITION, BEFORE]]).all(axis=1))
            tells &= (places[:, BEFORE] >= 0) & (np.roll(places[:, BEFORE], 1) >= 0)
        self.pairs += int(tells.sum())
        other = np.append(False, (rows[1:] != rows[:-1]).any(axis=1))
        differ = np.flatnonzero(same & new & other)
        usual = (
            _usual(np.concatenate([self.rows[-_RECENT:], data]), self.dtype)
            if self.half == "K" and len(differ)
            else 0.0
        )
        by = _differ_by(rows[differ], rows[differ - 1], self.dtype, usual)
        self.by.append(by[tells[differ]])
        alike = same & new
        alike[differ] = by <= EQUAL[self.dtype]
        if self.half == "K":
            turned = np.flatnonzero(alike & (places[:, POSITION] > 0))  # at the first there are no angles
            lengths = np.sort(np.stack([places[turned - 1, FURTHEST], places[turned, FURTHEST]], axis=1), axis=1)
            self.across = _joined(np.concatenate([self.across, lengths[lengths[:, 0] < lengths[:, 1]]]))
        ends, begins = (places[np.flatnonzero(alike) - n, EVENT] for n in (0, 1))
        spans, of = np.stack([begins, ends], axis=1), keys[alike] >> TOKEN_BITS
        right = set(np.unique(of << TOKEN_BITS | ends).tolist())
        of_requests = set(map(tuple, np.unique(places[np.flatnonzero(alike)][:, [EVENT, REQUEST]], axis=0).tolist()))
        for at, much in zip(differ.tolist(), by.tolist(), strict=True):
            if much <= EQUAL[self.dtype] or len(self.found) >= _MAX_TOKENS:
                continue
            if at > 1 and keys[at - 2] == keys[at] and bool((rows[at] == rows[at - 2]).all()):
                # The one in between was wrong, and was found.
                spans = np.append(spans, [[places[at - 2, EVENT], places[at, EVENT]]], axis=0)
                of = np.append(of, keys[at] >> TOKEN_BITS)
                continue
            key, place = int(keys[at]), places[at].tolist()
            # All that a forward wrote comes at once. Of K it is its V that shows the weights.
            among_right = self.half == "K" or (key >> TOKEN_BITS << TOKEN_BITS | place[EVENT]) in right
            partly = (place[EVENT], place[REQUEST]) in of_requests
            self.found.append(Difference(much, place, places[at - 1].tolist(), key, among_right, partly))
        for identity in np.unique(of).tolist():
            before = self.alike.get(identity, spans[:0])
            self.alike[identity] = _joined(np.concatenate([before, spans[of == identity]]))
        last = np.flatnonzero(np.append(keys[1:] != keys[:-1], True))[-_MAX_TOKENS:]
        before = np.where(same[last], last - 1, last)
        kept = np.flatnonzero(~again)[max(0, len(self.keys) - len(old) + len(last) - _MAX_TOKENS) :]
        self.keys, self.rows, self.older, self.places, self.older_places = (
            np.concatenate([had[kept], got])
            for had, got in (
                (self.keys, keys[last]),
                (self.rows, rows[last]),
                (self.older, rows[before]),
                (self.places, places[last]),
                (self.older_places, places[before]),
            )
        )

    def chosen_by_length(self, limit: float) -> bool:
        """Say whether a length can be what chooses the angles of a request: all K that differs was turned below and above it, and no K
        that is the same.
        """
        pairs = [sorted((place[FURTHEST], before[FURTHEST])) for much, place, before, *_ in self.found if much > limit]
        if not pairs:
            return False
        length, below = max(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
        for begin, end in self.across.tolist():
            if begin <= length < end:
                length = end
        return length < below


def _by_position(written: WrittenTokens) -> WrittenTokens:
    """Return tokens whose keys hold the position, too; those that have no room in it are left out."""
    keys, data, places = written
    token, position = keys & (1 << TOKEN_BITS) - 1, places[:, POSITION]
    fits = np.flatnonzero(
        (token >> TOKEN_BITS - _POSITION_BITS == 0) & (position >= 0) & (position >> _POSITION_BITS == 0)
    )
    keys = keys[fits] + (position[fits] << TOKEN_BITS - _POSITION_BITS)
    return WrittenTokens(keys, data[fits], places[fits])


def _joined(spans: Int64Array) -> Int64Array:
    """Return spans `[n, 2]` with those that touch made one, ascending."""
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    furthest = np.maximum.accumulate(spans[:, 1])
    new = np.append(True, spans[1:, 0] > furthest[:-1])
    return np.stack([spans[new, 0], furthest[np.append(np.flatnonzero(new)[1:], len(spans)) - 1]], axis=1)


def _usual(rows: ByteArray, dtype: str) -> float:
    """Return the largest value of most rows: where rotation takes large values from one another their rounding is left, at few positions."""
    largest = np.abs(float_values(rows, dtype)).max(axis=1, initial=0)
    return float(np.median(largest[np.isfinite(largest)])) if np.isfinite(largest).any() else 0.0


def _differ_by(one: ByteArray, other: ByteArray, dtype: str, least: float) -> npt.NDArray[np.float64]:
    """Return how far rows differ, as a part of their largest value or of `least`, `[n]`."""
    a, b = (float_values(rows, dtype) for rows in (one, other))
    step = _CODES[dtype].absolute if dtype in _CODES else 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.maximum(np.abs(a).max(axis=1, initial=least), np.abs(b).max(axis=1, initial=least))
        found = np.maximum(np.abs(a - b).max(axis=1, initial=0) - step, 0) / np.maximum(largest, 1e-30)
    return np.where(np.isnan(found), 1.0, found)
