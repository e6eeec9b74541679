"""How a position turns a token's K: learnt from the model itself, and used only where the model is seen to do so.

A rotary embedding turns pairs of values by an angle that depends on the position and the pair alone. Which values are pairs (halves of
a head, neighbours, a part of it) and by which angles is read off what the model gives for the same tokens at position 0 and
elsewhere, so no architecture is known by name; where that does not fit, nothing is turned.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.arrays import Int64Array

Heads = Callable[[Int64Array, Int64Array], Any]  # tokens and positions [n] to K [n, heads, dim] float32 on the device
_PROBES: Final = 64
_EACH: Final = 2  # tokens from which a position's angles are learnt
_SAMPLES: Final = 8  # heads of them
_FITS: Final = 2.0**-15  # of the largest value, where pairs are looked for
NEAR: Final = 2.0**-15  # and where angles are learnt
_LENGTH: Final = 2.0**-13  # by which a turn may change how long a pair is
_ALIKE: Final = 0.95  # of the probes' values: computed in another batch, some are rounded the other way
_AT_ONCE: Final = 1024  # positions
_NAN_BITS: Final = 0x7FC0  # of bfloat16
_BESIDE: Final = (0, -1, 1)  # in bits: a float32 that is known within less may be rounded either way
MOST_POSITIONS: Final = 1 << 18


class Pairs(NamedTuple):
    """Values of a head that turn together: `first` and `second` `[pairs]` dimensions, of `dim`."""

    first: Int64Array
    second: Int64Array
    dim: int

    @property
    def partners(self) -> Int64Array:
        """For each dimension the one with which it turns, or itself, `[dim]`."""
        found = np.arange(self.dim)
        found[self.first], found[self.second] = self.second, self.first
        return found


class Turning:
    """The angles of the positions that were asked for, a row each, as `kernels.ops.token_rows` takes them: `cosines` and `sines` `[rows,
    columns] float32` on the device, NaN where the model does something else: of all of a head's values, or those to `keep`.

    If it `rounds`, by `low`, the same model in bfloat16, `low_cosines` and `low_sines` `[rows, columns] int16` are the angles with which that
    computes, as bits, NaN where it rounds otherwise than each product and their sum.
    """

    def __init__(self, heads: Heads, low: Heads | None, pairs: Pairs, probes: Int64Array, batch: int) -> None:
        self.pairs, self._heads, self._probes, self._batch = pairs, heads, probes, batch
        at_zero = heads(probes, np.zeros_like(probes))
        self._at_zero = _complex(at_zero, pairs)
        self.cosines, self.sines = (at_zero.new_full((0, pairs.dim), float("nan")) for _ in range(2))
        self.low_cosines, self.low_sines = (
            self.cosines.new_full((0, pairs.dim), _NAN_BITS, dtype=_int16()) for _ in range(2)
        )
        self.rounds = low is not None
        self._low = low
        self._low_at_zero: Any = None if low is None else low(probes, np.zeros_like(probes))
        self._row_of = np.full(MOST_POSITIONS, -1, np.int32)
        self._size = 0

    def keep(self, columns: int) -> None:
        """Hold angles of a head's first `columns` values alone, so that those of a position are read at once; for before any is learnt."""
        self.cosines, self.sines, self.low_cosines, self.low_sines = (
            one[:, :columns].clone() for one in (self.cosines, self.sines, self.low_cosines, self.low_sines)
        )

    def learn(self, positions: Int64Array) -> Int64Array:
        """Return the rows of positions below `MOST_POSITIONS`, `[n]`, and learn those that are new."""
        asked = np.zeros(int(positions.max(initial=-1)) + 1, np.bool_)
        asked[positions] = True
        new = np.flatnonzero(asked & (self._row_of[: len(asked)] < 0))
        self._make_room(self._size + len(new))
        count = len(self._probes)
        each = max(1, min(_AT_ONCE, self._batch // count))
        for at in range(0, len(new), each):
            self._learn(new[at : at + each], count)
        return self._row_of[positions].astype(np.int64)

    def _learn(self, new: Int64Array, count: int) -> None:
        import torch

        there = self._heads(np.tile(self._probes, len(new)), np.repeat(new, count))
        turned = _complex(there, self.pairs).reshape(len(new), count, *self._at_zero.shape[1:])
        angle, good = _fitted(self._at_zero[None], turned, NEAR)
        angle = torch.where(good[:, None], angle, complex("nan"))
        cosines = self.cosines.new_ones(len(new), self.pairs.dim)
        sines = self.sines.new_zeros(len(new), self.pairs.dim)
        first, second = (torch.from_numpy(one).to(there.device) for one in self.pairs[:2])
        cosines[:, first] = cosines[:, second] = angle.real.float()
        sines[:, first], sines[:, second] = -angle.imag.float(), angle.imag.float()
        where = slice(self._size, self._size + len(new))
        columns = self.cosines.shape[1]
        self.cosines[where], self.sines[where] = cosines[:, :columns], sines[:, :columns]
        if self._low is not None:
            low = self._low(np.tile(self._probes, len(new)), np.repeat(new, count))
            low = low.reshape(len(new), count, *low.shape[1:])
            rounded = self._rounded_angles(low, cosines, sines)
            self.low_cosines[where], self.low_sines[where] = (one[:, :columns] for one in rounded)
        self._row_of[new] = np.arange(self._size, self._size + len(new))
        self._size += len(new)

    def _rounded_angles(self, there: Any, cosines: Any, sines: Any) -> tuple[Any, Any]:
        """Return the bits of bfloat16 `[m, dim]`, at or beside those of what was learnt, with which what the model gives in bfloat16,
        `[m, probes, heads, dim]`, is what it gives at position 0, turned.
        """
        import torch

        own = self._low_at_zero.bfloat16()[None]
        partner = own[..., self.pairs.partners]
        found = [torch.full_like(one, _NAN_BITS, dtype=torch.int16) for one in (cosines, sines)]
        bits = [one.bfloat16().view(torch.int16) for one in (cosines, sines)]
        alike = torch.full_like(cosines, _ALIKE * there.shape[1] * there.shape[2])
        for one in _BESIDE:
            for other in _BESIDE:
                tried = [bits[0] + one, bits[1] + other]
                cosine, sine = (part.view(torch.bfloat16)[:, None, None] for part in tried)
                same = (own * cosine + partner * sine == there).sum(dim=(1, 2)).to(alike.dtype)
                better = same > alike
                alike = torch.where(better, same, alike)
                found = [torch.where(better, new, old) for new, old in zip(tried, found, strict=True)]
        return found[0], found[1]

    def _make_room(self, size: int) -> None:
        have = len(self.cosines)
        if size <= have:
            return
        more = min(MOST_POSITIONS, max(256, 2 * have, size))
        shape = more, self.cosines.shape[1]
        cosines, sines = (one.new_full(shape, float("nan")) for one in (self.cosines, self.sines))
        cosines[:have], sines[:have] = self.cosines, self.sines
        self.cosines, self.sines = cosines, sines
        low = [one.new_full(shape, _NAN_BITS) for one in (self.low_cosines, self.low_sines)]
        low[0][:have], low[1][:have] = self.low_cosines, self.low_sines
        self.low_cosines, self.low_sines = low


def learn_turning(heads: Heads, low: Heads | None, vocab_size: int, positions: int, batch: int) -> Turning | None:
    """Return how a model turns K, None if not by pairs; it knows so many tokens and positions, and computes `batch` at once."""
    import torch

    tokens = np.unique(np.linspace(0, vocab_size - 1, _PROBES).astype(np.int64))
    at_zero = heads(tokens, np.zeros_like(tokens))
    fine = at_zero.isfinite().all(dim=-1).all(dim=-1)
    tokens, at_zero = tokens[fine.cpu().numpy()], at_zero[fine]
    places = np.unique([1, max(1, positions // 2), max(1, positions - 1)])
    if not len(tokens):
        return None
    there = [heads(tokens, np.full_like(tokens, place)) for place in places.tolist()]
    moved = sum((one != at_zero).any(dim=0).any(dim=0) for one in there).nonzero().flatten().tolist()
    dim = int(at_zero.shape[-1])
    for pairs in _candidates(moved, dim):
        zero = _complex(at_zero, pairs)
        fits = all(bool(_fitted(zero[None], _complex(one, pairs)[None], _FITS)[1].all()) for one in there)
        if fits and _rest_stays(at_zero, there, pairs):
            # The tokens whose smallest pair is the largest tell the angles best.
            length = zero.abs().amax(dim=1).amin(dim=1)
            count = max(_EACH, -(-_SAMPLES // at_zero.shape[1]))
            best = tokens[length.argsort(descending=True)[:count].cpu().numpy()]
            # Rounding so must hold for all tokens: of few some angle will always be right.
            all_of = Turning(heads, low, pairs, tokens, batch)
            rows = torch.from_numpy(all_of.learn(places))
            rounds = low is not None and bool((all_of.low_cosines[rows] != _NAN_BITS).all())
            return Turning(heads, low if rounds else None, pairs, best, batch)
    return None


def _int16() -> Any:
    import torch

    return torch.int16


def _candidates(moved: list[int], dim: int) -> Iterator[Pairs]:
    if not moved:
        return
    low, high = min(moved), max(moved) + 1
    for first, end in dict.fromkeys([(low, high), (0, dim), (0, high), (low, dim)]):
        half = (end - first) // 2
        if 2 * half == end - first:
            yield Pairs(np.arange(first, first + half), np.arange(first + half, end), dim)
            yield Pairs(np.arange(first, end, 2), np.arange(first + 1, end, 2), dim)


def _rest_stays(at_zero: Any, there: list[Any], pairs: Pairs) -> bool:
    rest = np.setdiff1d(np.arange(pairs.dim), np.concatenate(pairs[:2]))
    return all(bool((one[..., rest] == at_zero[..., rest]).all()) for one in there)


def _complex(heads: Any, pairs: Pairs) -> Any:
    """Return the pairs of heads `[n, heads, dim]` as complex128 `[n, heads, pairs]`."""
    import torch

    return torch.complex(heads[..., pairs.first].double(), heads[..., pairs.second].double())


def _fitted(zero: Any, there: Any, near: float) -> tuple[Any, Any]:
    """Return by which factor `[m, pairs]` pairs `[1, n, heads, pairs]` come nearest to others, `[m, n, heads, pairs]`, and for which m
    all are as near as that, and no pair longer or shorter.
    """
    length = (zero.abs() ** 2).sum(dim=(1, 2))
    factor = (there * zero.conj()).sum(dim=(1, 2)) / length
    off = (there - factor[:, None, None] * zero).abs().amax(dim=(1, 2, 3))
    good = (off <= near * zero.abs().max()) & ((factor.abs() - 1).abs() <= _LENGTH).all(dim=1)
    return factor, good
