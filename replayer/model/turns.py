"""How positions turn K, learnt from a trace alone: a token's K at some positions says what it must be at another.

A rotary embedding turns a value of K with a partner by an angle that grows with the position: as the token stands at `p` the
value is `a cos(p t) + b sin(p t)`, with `a` and `b` the token's, which the partner need not be known for, and `t` the value's own
for all tokens. `t` is looked for where tokens came at four positions and more; where none explains nearly all of them, nothing is said.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.ops.token_rows.encoding import float_values
from .shifts import find_shifts
from .written import EVENT, FURTHEST, POSITION, REQUEST, ROUNDING, WrittenTokens

Floats = npt.NDArray[np.float64]

TURNED: Final = frozenset(ROUNDING)  # dtypes; of 8 bits too little is left
_MOST_ROWS: Final = 1 << 16  # that are judged at once, and of what is off
_MOST_PARTS: Final = 256  # of those judged at once, whose tokens show how well the angles fit
_KEPT: Final = 4  # of a token, for those that come later
_EACH: Final = 8  # of a token that are looked at together, of which not more than two are of one request's forward
_OF_ONE: Final = 2
_NEAR: Final = 1024  # positions that are looked at together: for more, angles would have to be learnt too well
_CLOSER: Final = 4.0  # times as far apart, at once
_WIDER: Final = 1.2  # times as far apart as those that angles were learnt from: they are learnt closer before
_STEP: Final = 0.25  # radians at the farthest position, between angles that are tried
_RIDGE: Final = 1e-4
_LEARNT, _OTHERWISE = 0.05, 0.15  # of a token's values, that an angle leaves unexplained, and that all others do
_APART: Final = 4.0  # radians at the farthest position, from where on an angle is another
_FREEDOM, _FEWEST_TOKENS, _MOST_TOKENS = 12, 6, 48  # from which, and from how many at most, angles are learnt
_FASTEST, _SLOWEST = np.pi, 0.02  # radians a position; what turns more slowly tells nothing
_FITS, _OFF = 0.12, 0.3  # of a token's values: what rounding leaves, and what it does not
_RIGHT: Final = 0.6  # of the tokens are turned alike,
_KNOWN: Final = 0.9  # or with one exception: else K follows from more than the position
_AGAIN: Final = 2  # tokens at three positions that are off alike in one forward
_AT_ONCE: Final = 256  # angles
_BEYOND: Final = 64  # positions, behind all that were seen


class Misturned(NamedTuple):
    """A token whose K is not that of its position: by how much of its values, its place, that of one that fits, and `as_at`, the only
    position that its K would be right at, -1 for none; `others` are the positions that say so, and `alike` the tokens beside it that are off
    by as many positions, where that was looked for.
    """

    much: float
    key: int
    place: list[int]
    before: list[int]
    as_at: int
    others: int
    alike: int = 0


class _Tokens(NamedTuple):
    """`[g, n]` rows of a token each, of which there are those of `there`; `[g, n]` positions from their middle one."""

    rows: Int64Array
    there: BoolArray
    at: Floats

    def some(self, which: Any) -> "_Tokens":
        """Return some of them."""
        return _Tokens(self.rows[which], self.there[which], self.at[which])


@dataclass(slots=True)
class Turns:
    """What is known of a stream of K: its angles, some rows of each token, the shortest and longest request whose K fits, and what does not."""

    dtype: str
    angles: Floats | None = None
    used: Int64Array | None = None  # values that turn by them
    found: list[Misturned] = field(default_factory=list)
    span: float = 0.0  # how far apart positions were that angles were learnt from
    judged: int = 0  # tokens
    right: int = 0
    known: int = 0  # that are right but for one row
    lengths: tuple[int, int] = (1 << 62, -1)
    _waiting: list[WrittenTokens] = field(default_factory=list)
    _kept: WrittenTokens | None = None
    shifted: list[Misturned] = field(default_factory=list)  # by as many positions as others beside it
    _tries: int = 3  # to learn angles
    _looks: int = 3  # for parts that are shifted
    _left: list[Floats] = field(default_factory=list)  # of those that are right, what is unexplained

    def add(self, written: WrittenTokens) -> None:
        """Take over what forwards wrote."""
        self._waiting.append(written)
        if sum(len(one.keys) for one in self._waiting) > _MOST_ROWS:
            self.judge()

    def judge(self) -> None:
        """Judge what has come since the last time."""
        parts = [*([self._kept] if self._kept is not None else []), *self._waiting]
        old = 0 if self._kept is None else len(self._kept.keys)
        self._waiting.clear()
        if not parts:
            return
        keys, data, places = (np.concatenate(column) for column in zip(*parts, strict=True))
        values = float_values(data, self.dtype).astype(np.float64)
        fit = np.isfinite(values).all(axis=1) & (places[:, POSITION] >= 0)
        tokens = _of_tokens(keys, places, fit)
        if self.angles is None and len(tokens.rows) and self._tries:
            self._tries -= 1
            self._learn(tokens, values)
        wrong, explained = np.zeros(len(keys), np.bool_), self.right + self.known
        judged = self.judged
        if self.angles is not None and len(tokens.rows):
            self._learn_closer(tokens, values)
            known = np.abs(tokens.at).max(axis=1) <= _WIDER * self.span
            self._judge(tokens.some(known), values, keys, places, old, wrong)
        explained, judged = self.right + self.known - explained, self.judged - judged
        if self._looks and (not judged or explained < _KNOWN * judged):
            self._looks -= 1
            for one in find_shifts(keys, values, places, self.dtype):
                if one.row >= old:
                    wrong[one.row] = True
                    place, before = places[one.row].tolist(), places[one.beside].tolist()
                    as_at = max(place[POSITION] + one.by, -1)
                    self.shifted.append(
                        Misturned(one.much, int(keys[one.row]), place, before, as_at, one.others, one.tokens)
                    )
        order = np.lexsort((places[:, EVENT], keys))
        order = order[fit[order] & ~wrong[order]]
        last = np.ones(len(order), np.bool_)
        last[: -_KEPT or None] = keys[order][:-_KEPT] != keys[order][_KEPT:]
        kept = np.sort(order[last])[-_MOST_ROWS // 2 :]
        self._kept = WrittenTokens(keys[kept], data[kept], places[kept])

    def tell(self) -> list[Misturned]:
        """Return what is off, if nearly all tokens are turned alike, and requests as short and as long as those.

        Of a token at three positions one that is off cannot be told from the other two, but by the position that it would be right at: it
        counts where another token of its forward is as far off.
        """
        self.judge()
        if self.right < max(_RIGHT * self.judged, _FEWEST_TOKENS) or self.right + self.known < _KNOWN * self.judged:
            return self.shifted
        if float(np.median(np.concatenate(self._left))) > _FITS / 4:
            return self.shifted  # they are turned by something that the angles come near to
        low, high = self.lengths  # a length may choose the angles
        alike = Counter((one.place[EVENT], one.as_at - one.place[POSITION]) for one in self.found)
        return [
            one
            for one in self.found
            if low <= one.place[FURTHEST] <= high
            and (one.others > 2 or alike[one.place[EVENT], one.as_at - one.place[POSITION]] >= _AGAIN)
        ]

    def _learn(self, tokens: _Tokens, values: Floats) -> None:
        """Look for the angle of each value."""
        counts = tokens.there.sum(axis=1)
        # Where all distances have a divisor, several angles do the same.
        lowest = np.where(tokens.there, tokens.at, np.inf).min(axis=1, keepdims=True)
        steps = np.gcd.reduce(np.where(tokens.there, tokens.at - lowest, 0.0).astype(np.int64), axis=1)
        chosen = np.flatnonzero((counts > 3) & (steps == 1))
        chosen = chosen[np.argsort(-counts[chosen], kind="stable")][:_MOST_TOKENS]
        if len(chosen) < _FEWEST_TOKENS or int((counts[chosen] - 2).sum()) < _FREEDOM:
            return
        mine = tokens.some(chosen)
        span = max(float(np.abs(mine.at).max()), 1.0)
        tried = np.arange(0.0, _FASTEST, _STEP / span)
        angles = np.zeros(values.shape[1])
        fits = np.zeros(values.shape[1], np.bool_)
        for lane in range(values.shape[1]):
            given = np.where(mine.there, values[mine.rows, lane], 0.0)[:, :, None]
            left = _medians(given, mine, tried)
            best, step = float(tried[left.argmin()]), _STEP / span
            others = left[np.abs(tried - best) > _APART / span]
            near = np.clip(best + np.linspace(-step, step, 65), 0.0, _FASTEST)
            closer = _medians(given, mine, near)
            angles[lane] = near[closer.argmin()]
            fits[lane] = closer.min() < _LEARNT and others.min(initial=1.0) > _OTHERWISE
        used = np.flatnonzero(fits & (angles > _SLOWEST))
        if len(used) > 1 and fits.sum() * 2 >= len(fits):
            self.angles, self.used, self.span = angles[used], used, span

    def _learn_closer(self, tokens: _Tokens, values: Floats) -> None:
        """Learn the angles from positions that are farther apart, if there are some."""
        assert self.angles is not None and self.used is not None  # for the type checker
        counts, spans = tokens.there.sum(axis=1), np.abs(tokens.at).max(axis=1)
        while True:
            widest = float(spans.max())
            reach = min(widest, self.span * _CLOSER)
            chosen = np.flatnonzero((counts > 3) & (spans <= reach) & (spans > self.span / 2))
            chosen = chosen[np.argsort(-spans[chosen], kind="stable")][:_MOST_TOKENS]
            if reach <= _WIDER * self.span or len(chosen) < _FEWEST_TOKENS:
                return
            mine, step = tokens.some(chosen), _STEP / self.span
            learnt = self.angles.copy()
            for n, lane in enumerate(self.used.tolist()):
                near = np.clip(learnt[n] + np.linspace(-step, step, 129), 0.0, _FASTEST)
                left = _medians(np.where(mine.there, values[mine.rows, lane], 0.0)[:, :, None], mine, near)
                learnt[n] = near[left.argmin()]
                if left.min() >= _LEARNT:
                    return
            self.angles, self.span = learnt, reach

    def _judge(
        self, tokens: _Tokens, values: Floats, keys: Int64Array, places: Int64Array, old: int, wrong: BoolArray
    ) -> None:
        assert self.angles is not None and self.used is not None  # for the type checker
        given = np.where(tokens.there[:, :, None], values[:, self.used][tokens.rows], 0.0)
        left = _unexplained(given, tokens, self.angles)
        new = (tokens.rows >= old) & tokens.there
        judged = new.any(axis=1)
        right = left < _FITS
        self.judged += int(judged.sum())
        self.right += int((judged & right).sum())
        if len(self._left) < _MOST_PARTS:
            self._left.append(left[judged & right])
        lengths = places[tokens.rows[right][tokens.there[right]], FURTHEST]
        if len(lengths):
            self.lengths = min(self.lengths[0], int(lengths.min())), max(self.lengths[1], int(lengths.max()))
        last = int(places[:, POSITION].max())
        for g in np.flatnonzero(judged & (left > _FITS)).tolist():
            one = tokens.some(slice(g, g + 1))
            found = self._odd_one(given[g], one, places, last)
            if found is None:
                continue
            self.known += 1
            n, much, as_at = found
            row, others = int(one.rows[0, n]), np.flatnonzero(one.there[0])
            others = others[others != n]
            wrong[row] = True
            if row >= old and much > _OFF and len(self.found) < _MOST_ROWS:
                place, before = places[row].tolist(), places[one.rows[0, others[-1]]].tolist()
                self.found.append(Misturned(much, int(keys[row]), place, before, as_at, len(others)))

    def _odd_one(self, given: Floats, one: _Tokens, places: Int64Array, last: int) -> tuple[int, float, int] | None:
        """Return the one row of a token that its others agree without, how far off it is, and where it would be right, -1 for nowhere.

        Two others agree with anything: there it is the one that would be right somewhere. None if it is not one alone.
        """
        assert self.angles is not None
        found = []
        enough = one.there.sum() > 3
        for n in np.flatnonzero(one.there[0]).tolist():
            without = one.there.copy()
            without[0, n] = False
            rest, left = np.where(without[0, :, None], given, 0.0)[None], one._replace(there=without)
            if enough and _unexplained(rest, left, self.angles)[0] >= _FITS:
                continue
            a, b = (part[0] for part in _solved(rest, left, self.angles))
            as_at = self._as_at(given[n], a, b, int(places[one.rows[0, n], POSITION] - one.at[0, n]), last)
            if enough or as_at >= 0:
                found.append((n, float(_apart(given[n], a, b, one.at[0, n] * self.angles)), as_at))
        return found[0] if len(found) == 1 else None

    def _as_at(self, row: Floats, a: Floats, b: Floats, middle: int, last: int) -> int:
        """Return the only position at which a row would be what its token's others say, -1 if there is none."""
        assert self.angles is not None
        tried = np.arange(max(0, middle - 2 * _NEAR), min(last + _BEYOND, middle + 2 * _NEAR))
        turned = (tried - middle)[:, None] * self.angles
        by = _apart(row, a, b, turned)
        best, *others = np.sort(by)[:2].tolist()
        return int(tried[by.argmin()]) if best < _FITS and others and others[0] > best + _FITS else -1


def _of_tokens(keys: Int64Array, places: Int64Array, fit: BoolArray) -> _Tokens:
    """Return the rows of each token, those that are near one another together, three at least.

    Which of more than `_EACH` are together is left to chance: at equal distances several angles would do the same.
    """
    order = np.lexsort((places[:, EVENT], places[:, POSITION], keys))
    order = order[fit[order]]
    key, at = keys[order], places[order, POSITION]
    new = (np.diff(key, prepend=-1) != 0) | (np.diff(at, prepend=-1) != 0)  # of equal positions the first is enough
    order, key, near = order[new], key[new], at[new] // _NEAR
    begins = np.flatnonzero((np.diff(key, prepend=-1) != 0) | (np.diff(near, prepend=-1) != 0))
    counts = np.diff(np.append(begins, len(order)))
    of = np.repeat(np.arange(len(begins)), counts)
    order = order[np.lexsort((np.random.default_rng(0).random(len(order)), of))]
    number, blocks = np.arange(len(order)) - begins[of], -(-counts // _EACH)
    block, column = (np.cumsum(blocks) - blocks)[of] + number % blocks[of], number // blocks[of]
    rows = np.zeros((int(blocks.sum()), _EACH), np.int64)
    there = np.zeros(rows.shape, np.bool_)
    rows[block, column] = order
    there[block, column] = ~_too_many(block, places[order, EVENT], places[order, REQUEST])
    enough = there.sum(axis=1) > 2
    rows, there = rows[enough], there[enough]
    position = places[rows, POSITION]
    low, high = (np.where(there, position, far) for far in (1 << 62, -1))
    middle = (low.min(axis=1, initial=1 << 62) + high.max(axis=1, initial=-1)) // 2
    return _Tokens(rows, there, np.where(there, position - middle[:, None], 0).astype(np.float64))


def _too_many(block: Int64Array, event: Int64Array, request: Int64Array) -> BoolArray:
    """Say which rows `[n]` of a block come behind `_OF_ONE` others of their request's forward: these are off together."""
    order = np.lexsort((request, event, block))
    begins = np.ones(len(order), np.bool_)
    begins[1:] = np.any([np.diff(one[order]) != 0 for one in (block, event, request)], axis=0)
    number = np.arange(len(order))
    found = np.zeros(len(order), np.bool_)
    found[order] = number - np.maximum.accumulate(np.where(begins, number, 0)) >= _OF_ONE
    return found


def _solved(given: Floats, tokens: _Tokens, angles: Floats) -> tuple[Floats, Floats]:
    """Return `a` and `b` of each token and value, `[g, lanes]`; `given` is `[g, n, lanes]`, and 0 where no row is."""
    turned = tokens.at[:, :, None] * angles
    c, s = (np.where(tokens.there[:, :, None], part, 0.0) for part in (np.cos(turned), np.sin(turned)))
    ridge = _RIDGE * tokens.there.sum(axis=1)[:, None]
    cc, ss, cs = (c * c).sum(axis=1) + ridge, (s * s).sum(axis=1) + ridge, (c * s).sum(axis=1)
    cy, sy = (c * given).sum(axis=1), (s * given).sum(axis=1)
    det = cc * ss - cs * cs
    return (cy * ss - sy * cs) / det, (sy * cc - cy * cs) / det


def _left(given: Floats, tokens: _Tokens, angles: Floats) -> Floats:
    """Return the squares of what `a` and `b` leave of each token's values, `[g, lanes]`, for as many as are more than these two."""
    a, b = _solved(given, tokens, angles)
    turned = tokens.at[:, :, None] * angles
    off = np.where(tokens.there[:, :, None], given - a[:, None] * np.cos(turned) - b[:, None] * np.sin(turned), 0.0)
    counts = tokens.there.sum(axis=1)[:, None]
    left: Floats = (off**2).sum(axis=1) * counts / np.maximum(counts - 2, 1)
    return left


def _unexplained(given: Floats, tokens: _Tokens, angles: Floats) -> Floats:
    """Return how much of each token's values is left, as a part of all of them, `[g]`."""
    left = _left(given, tokens, angles).sum(axis=1)
    return np.sqrt(left / np.maximum((given**2).sum(axis=(1, 2)), 1e-30))


def _medians(given: Floats, tokens: _Tokens, tried: Floats) -> Floats:
    """Return how much each angle leaves of most tokens' value `[g, n, 1]`, `[tried]`."""
    of = np.maximum((given**2).sum(axis=1), 1e-30)
    parts = np.split(tried, range(_AT_ONCE, len(tried), _AT_ONCE))
    return np.concatenate([np.median(np.sqrt(_left(given, tokens, part) / of), axis=0) for part in parts])


def _apart(row: Floats, a: Floats, b: Floats, turned: Floats) -> Floats:
    """Return how far a row is from what `a` and `b` give at angles `[..., lanes]`, as a part of how large they are, `[...]`."""
    off = row - a * np.cos(turned) - b * np.sin(turned)
    return np.asarray(np.sqrt((off**2).sum(axis=-1) / max(float((a**2 + b**2).sum() / 2), 1e-30)))
