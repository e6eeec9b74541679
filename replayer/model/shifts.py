"""By how many positions parts of a trace were turned away from one another, where too few of them agree to learn angles from the most.

Of nearly all rotary embeddings the first value turns by 1 radian a position, whatever the base. So the tokens at three positions that
are turned alike are known before the other angles are, and these are learnt from them alone. The tokens that a forward computes of
a request are turned alike, right or wrong. These parts are laid beside one another, each by as many positions as its tokens say: what
is not where most forwards' parts are was turned by another position than the one that it was fed.
"""

from collections import Counter
from collections.abc import Set
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import BoolArray, Int64Array
from .written import EVENT, FURTHEST, POSITION, REQUEST

Floats = npt.NDArray[np.float64]

_FITS: Final = {"float32": 0.01, "float16": 0.01, "bfloat16": 0.03}  # of a token's values, that rounding leaves at most
_NOISE: Final = 16  # times what it leaves of most
_LANES: Final = 8  # values of a row that are looked at
_FAR: Final = 2048  # positions that are looked at: farther ones need angles that are known better
_SPAN: Final = 128  # positions that the angles are learnt from first,
_CLOSER: Final = 4  # and then from so many times as many, as much closer
_EXACTLY: Final = 1e-8
_STEP: Final = 4.0  # times what may be left, in radians at the farthest position, between angles that are tried
_APART: Final = 0.1  # radians, from where on an angle is another
_TRIPLES, _TOKENS = 16, 64  # of a token, and tokens, that the angles are learnt from
_MOST_TRIPLES: Final = 256  # tokens at three positions that are looked at first
_SLOWEST: Final = 0.02  # radians a position: what turns more slowly tells nothing
_LEAST_LANES: Final = 3  # that turn
_EXPLAINED: Final = 0.5  # of the tokens at three positions where the first value turns by 1
_LEAST: Final = 2.0**-6  # of what may be left
_FEWEST: Final = 6  # tokens that show it
_EACH: Final = 4  # rows of a token, of those laid down and of the part that is laid beside them
_FEW: Final = 6  # tokens of a request's forward: these are one part with others like them
_ALIKE: Final = 0.8  # of a part's tokens
_ALONE: Final = 8  # times what may be left: there is one way alone to lay a part if nothing else comes so near for half of its tokens
_SEARCHED: Final = 8  # tokens,
_WIDE: Final = 3  # and so many times as many positions as there are
_AGAIN: Final = 2  # tokens that say by how much a part is off
_OF_PART: Final = 1024  # rows
_STARTS, _MOST_PARTS, _ROUNDS, _SEARCHES = 4, 64, 8, 128
_AT_ONCE: Final = 256


class Shifted(NamedTuple):
    """A row that is turned as if it stood `by` positions farther on, by `others` of its token, of which `beside` is one, and off by `much` of its
    values; so do so many `tokens` that were computed with it.
    """

    row: int
    by: int
    beside: int
    others: int
    much: float
    tokens: int


class _Law(NamedTuple):
    """The values that turn, by which angles, and what these may leave unexplained."""

    used: Int64Array
    angles: Floats
    fits: float


class _Beside(NamedTuple):
    """Tokens of a part and of others: `[n, rows, lanes]` values, `[n, rows]` positions, which are its own, which there are, and which rows."""

    values: Floats
    at: Floats
    own: BoolArray
    there: BoolArray
    rows: Int64Array


def find_shifts(keys: Int64Array, values: Floats, places: Int64Array, dtype: str) -> list[Shifted]:
    """Return what is not turned as most forwards' parts are: of tokens `keys` `[n]` with `values` `[n, lanes]` and `places` `[n, 9]`."""
    near = np.flatnonzero(np.isfinite(values).all(axis=1) & (places[:, POSITION] >= 0) & (places[:, POSITION] < _FAR))
    values, positions = values[near, :_LANES], places[near, POSITION].astype(np.float64)
    _, token = np.unique(keys[near], return_inverse=True)
    law = _law(token, values, positions, _FITS[dtype])
    if law is None:
        return []
    found = _Frame(token, values[:, law.used], positions, places[near], law).shifts()
    return [one._replace(row=int(near[one.row]), beside=int(near[one.beside])) for one in found]


class _Frame:
    """Parts laid beside one another, each by the positions that its tokens say."""

    def __init__(self, token: Int64Array, values: Floats, positions: Floats, places: Int64Array, law: _Law) -> None:
        self.token, self.values, self.positions, self.law = token, values, positions, law
        self.event, self.length = places[:, EVENT], places[:, FURTHEST]
        self.part = _parts(places)
        parts = np.split(np.argsort(self.part, kind="stable"), np.cumsum(np.bincount(self.part))[:-1])
        self.rows = [one[:_OF_PART] for one in parts]
        self.by: dict[int, int] = {}  # of the parts that are laid
        self.frame: dict[int, dict[float, int]] = {}  # by token and position their rows
        self.searches, self.reach = 0, min(_FAR, _WIDE * (1 + int(positions.max())))

    def shifts(self) -> list[Shifted]:
        """Return the rows that are off, none if more parts fit nowhere than were laid."""
        parts, best, frame = self._tried(), dict[int, int](), self.frame
        for start in parts[:_STARTS]:
            self.by, self.frame = {}, {}
            self._put(start, 0)
            for _ in range(_ROUNDS):
                laid = [self._lay(one) for one in parts if one not in self.by]  # each one helps the next
                if not any(laid):
                    break
            if len(self.by) > len(best):
                best, frame = self.by, self.frame
            if 2 * len(best) > len(parts):
                break
        self.by, self.frame = best, frame
        nowhere = sum(len(self._beside(one, _AGAIN).values) == _AGAIN for one in parts if one not in best)
        if nowhere > len(best):
            return []  # they were turned by something else
        if len(set(best.values())) < 2:
            return []
        votes: Counter[int] = Counter()
        for one in sorted(best, key=lambda one: int(self.event[self.rows[one]].min())):
            votes[best[one]] += len(np.unique(self.event[self.rows[one]]))
        right = votes.most_common(1)[0][0]
        off = [row for one, by in best.items() if by != right for row in self._off(one, by, right)]
        # A length may choose the angles.
        lengths = [self.length[self.rows[one]] for one, by in best.items() if by == right]
        low, high = min(one.min() for one in lengths), max(one.max() for one in lengths)
        return [one for one in off if low <= self.length[one.row] <= high]

    def _off(self, one: int, by: int, right: int) -> list[Shifted]:
        """Return the rows of a part that is off, if enough of its tokens say so now that all others are laid.

        Not beside parts that are off by as much: these may all have been laid by what one token said.
        """
        beside = self._beside(one, but={other for other, its in self.by.items() if its == by})
        fit, as_fed = (self._left(beside, shift) for shift in (by, right))
        off = (fit < self.law.fits) & (as_fed > _ALONE * self.law.fits)
        count = int(off.sum())
        found = []
        for n in np.flatnonzero(off).tolist() if count >= max(_AGAIN, _ALIKE * len(off)) else ():
            mine, others = (beside.rows[n, beside.there[n] & (beside.own[n] == own)] for own in (True, False))
            for row in mine.tolist():
                before = others[self.event[others] <= self.event[row]]
                other = int(before[-1] if len(before) else others[0])
                much = min(float(as_fed[n]), 1.0)
                found.append(Shifted(row, by - right, other, len(others) + len(mine) - 1, much, count))
        return found

    def _tried(self) -> list[int]:
        """Return the parts that are looked at, those that have the most tokens twice first."""
        twice = np.array([len(one) - len(np.unique(self.token[one])) for one in self.rows])
        order = np.lexsort((-np.array([len(one) for one in self.rows]), -twice))
        return [int(n) for n in order if len(self.rows[n]) > 1][:_MOST_PARTS]

    def _lay(self, one: int) -> bool:
        """Lay a part beside the others, if its tokens say where."""
        beside = self._beside(one, _SEARCHED)
        count = len(beside.values)
        enough = max(1.0, _ALIKE * count)
        if not count:
            return False
        if int((self._left(beside, 0) < self.law.fits).sum()) >= enough:
            self._put(one, 0)
            return True
        if self.searches >= _SEARCHES:
            return False
        self.searches += 1
        tried = np.arange(-self.reach, self.reach + 1)
        left = np.concatenate(
            [self._left(beside, shifts) for shifts in np.split(tried, range(_AT_ONCE, len(tried), _AT_ONCE))]
        )
        counts = (left < self.law.fits).sum(axis=1)
        best = int(counts.argmax())
        near = np.delete(left, best, axis=0) < _ALONE * self.law.fits
        if counts[best] < enough or 2 * int(near.sum(axis=1).max()) > counts[best]:
            return False
        self._put(one, int(tried[best]))
        return True

    def _put(self, one: int, by: int) -> None:
        """Take a part's rows to those that are laid."""
        self.by[one] = by
        for row in self.rows[one].tolist():
            self.frame.setdefault(int(self.token[row]), {}).setdefault(float(self.positions[row]) + by, row)

    def _left(self, beside: _Beside, by: int | Int64Array) -> Floats:
        """Return what is left of each token, `[..., n]`, where a part is laid so many positions on, `[...]`."""
        shift = np.asarray(by)[..., None, None] * beside.own
        return _left(beside.values, beside.at + shift, beside.there, self.law.angles)

    def _beside(self, one: int, most: int | None = None, but: Set[int] = frozenset()) -> _Beside:
        """Return the first tokens of a part that the parts that are laid, `but` some, hold, too, at three positions together."""
        left_out = {one, *but}
        mine: dict[int, dict[float, int]] = {}
        for row in self.rows[one].tolist():
            mine.setdefault(int(self.token[row]), {})[float(self.positions[row])] = row
        laid = {
            token: {at: row for at, row in self.frame[token].items() if int(self.part[row]) not in left_out}
            for token in mine
            if token in self.frame
        }
        tokens = [token for token, rows in laid.items() if rows and len(rows) + len(mine[token]) > 2][:most]
        shape = len(tokens), 2 * _EACH
        values, at, which = np.zeros((*shape, self.values.shape[1])), np.zeros(shape), np.zeros(shape, np.int64)
        own, there = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        for n, token in enumerate(tokens):
            parts = [list(rows.items())[:_EACH] for rows in (laid[token], mine[token])]
            both = parts[0] + parts[1]
            at[n, : len(both)] = [position for position, _ in both]
            which[n, : len(both)] = [row for _, row in both]
            there[n, : len(both)] = True
            own[n, len(parts[0]) : len(both)] = True
        values = np.where(there[..., None], self.values[which], 0.0)
        return _Beside(values, at, own, there, which)


def _parts(places: Int64Array) -> Int64Array:
    """Return the part that each row is of: a forward's request, or of forwards that compute few of it those with the same batch."""
    _, forward = np.unique(places[:, EVENT], return_inverse=True)
    _, request = np.unique(places[:, REQUEST], return_inverse=True)
    both, of, counts = np.unique(np.stack([forward, request], axis=1), axis=0, return_inverse=True, return_counts=True)
    _, member = np.unique(np.stack([both[:, 1], counts], axis=1), axis=0, return_inverse=True)
    marks = np.random.default_rng(0).integers(1 << 62, size=len(both))[member.reshape(-1)]
    batch = np.zeros(len(both), np.int64)
    np.bitwise_xor.at(batch, both[:, 0], marks)
    of_batch = np.where(counts[of.reshape(-1)] < _FEW, batch[forward], -1 - forward)
    _, part = np.unique(np.stack([request, of_batch], axis=1), axis=0, return_inverse=True)
    return part.reshape(-1)


def _left(values: Floats, at: Floats, there: BoolArray, angles: Floats) -> Floats:
    """Return how much of values `[..., n, lanes]` at positions `[..., n]` the angles leave unexplained, of the lane of which it is most, `[...]`."""
    turned = at[..., None] * angles
    c, s = (np.where(there[..., None], one, 0.0) for one in (np.cos(turned), np.sin(turned)))
    cc, ss, cs = (c * c).sum(axis=-2) + 1e-9, (s * s).sum(axis=-2) + 1e-9, (c * s).sum(axis=-2)
    cy, sy = (c * values).sum(axis=-2), (s * values).sum(axis=-2)
    det = cc * ss - cs * cs
    a, b = (cy * ss - sy * cs) / det, (sy * cc - cy * cs) / det
    off = values - a[..., None, :] * c - b[..., None, :] * s
    counts = there.sum(axis=-1)[..., None]
    left = np.sqrt((off**2).sum(axis=-2) * counts / np.maximum(counts - 2, 1)) / _size(values)
    return np.asarray(left.max(axis=-1))


def _law(token: Int64Array, values: Floats, positions: Floats, fits: float) -> _Law | None:
    """Return by which angles tokens turn, None if too few of them are turned alike, or the first value does not turn by 1."""
    triples = _triples(token, positions)
    alike = triples.some(_left_of_three(triples, values[:, :1], np.ones(1))[0, :, 0] < fits)
    step = _STEP * fits / _SPAN
    some = alike.some(alike.span <= _SPAN).some(slice(0, _MOST_TRIPLES))
    if len(np.unique(some.owner)) < _FEWEST:
        return None
    tried = np.arange(step, 1 + _APART, step)
    parts = np.split(tried, range(_AT_ONCE, len(tried), _AT_ONCE))
    left = [_left_of_three(some, values, part) for part in parts]
    explained = np.concatenate([(one < fits).mean(axis=1) for one in left])
    angles = tried[np.concatenate([np.minimum(one, fits).sum(axis=1) for one in left]).argmin(axis=0)]
    others = np.where(np.abs(tried[:, None] - angles) > _APART, explained, 0.0)
    most = explained.max(axis=0)
    used = np.flatnonzero((angles > _SLOWEST) & (most > _EXPLAINED) & (2 * others.max(axis=0) < most))
    if len(used) < _LEAST_LANES or used[0] or abs(angles[0] - 1) > 2 * step:
        return None
    values, angles, noise = values[:, used], angles[used], np.ones(len(used))
    while step > _EXACTLY:
        step /= _CLOSER
        some = alike.some(alike.span <= _STEP * fits / step)
        tried = step * np.arange(-2 * _CLOSER, 2 * _CLOSER + 1)
        for lane in range(len(used)):
            by = _left_of_three(some, values[:, lane : lane + 1], angles[lane] + tried)[..., 0]
            best = int(np.minimum(by, fits).sum(axis=1).argmin())
            angles[lane], noise[lane] = angles[lane] + tried[best], np.median(by[best])
    return _Law(used, angles, min(fits, max(_NOISE * float(noise.max()), fits * _LEAST)))


def _left_of_three(triples: "_Triples", values: Floats, angles: Floats) -> Floats:
    """Return what each angle `[m]` leaves unexplained of the values at three positions, `[m, n, lanes]`."""
    far = np.sin(angles[:, None, None] * triples.apart)
    far /= np.sqrt((far**2).sum(axis=-1, keepdims=True) + 1e-30)
    given = values[triples.rows]
    given = given / _size(given)[:, None]
    return np.abs(np.einsum("mnk,nkl->mnl", far, given))


def _size(values: Floats) -> Floats:
    """Return how large values `[..., n, lanes]` are, `[..., lanes]`; of those that are small beside the others rounding tells nothing."""
    size = (values**2).sum(axis=-2)
    return np.asarray(np.sqrt(np.maximum(size, size.mean(axis=-1, keepdims=True) / 16) + 1e-30))


class _Triples(NamedTuple):
    """`[n, 3]` rows of a token each, how far each two others are `apart`, which token's, and how far all are."""

    rows: Int64Array
    apart: Floats
    owner: Int64Array
    span: Floats

    def some(self, which: Any) -> "_Triples":
        """Return some of them."""
        return _Triples(*(one[which] for one in self))


def _triples(token: Int64Array, positions: Floats) -> _Triples:
    """Return tokens at three positions, in an order left to chance."""
    rng = np.random.default_rng(0)
    order = np.argsort(token, kind="stable")
    groups = [one for one in np.split(order, np.cumsum(np.bincount(token))[:-1]) if len(one) > 2] if len(token) else []
    groups.sort(key=len, reverse=True)
    found, owner = [np.empty((0, 3), np.int64)], [np.empty(0, np.int64)]
    for n, one in enumerate(groups[:_TOKENS]):
        picked = one[None] if len(one) == 3 else np.array([rng.choice(one, 3, replace=False) for _ in range(_TRIPLES)])
        found.append(picked)
        owner.append(np.full(len(picked), n))
    rows = np.concatenate(found)
    at = positions[rows]
    apart = np.roll(at, -1, axis=1) - np.roll(at, 1, axis=1)
    which = rng.permutation(np.flatnonzero((apart != 0).all(axis=1)))
    return _Triples(rows[which], apart[which], np.concatenate(owner)[which], np.ptp(at, axis=1)[which])
