"""What the KV of each request's positions was computed with beside its tokens: adapter, salt, weights, media."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.state.forward import Forward, columns
from ...recorder.state.requests import MEDIA
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import IDENTITY_KINDS
from .facts import Sinks
from .names import SlotNames

UNKNOWN_IDENTITY: Final = -1  # the number of an identity that nobody has declared, or that was lost
_FEW: Final = 1024  # identities that are kept without a look at who still has one
_KINDS: Final = range(len(IDENTITY_KINDS))


@dataclass(slots=True)
class _Followed:
    """A request up to `end` tokens, and what its last position was computed with, by kind: known or not, and the hash."""

    end: int = 0
    number: int = UNKNOWN_IDENTITY
    last: dict[int, tuple[int, int]] = field(default_factory=dict)


class _Identity(NamedTuple):
    """The trace's columns `[n, 4] int64`, and the position from which on no media are declared."""

    values: Int64Array
    behind_media: int


_NONE: Final = _Identity(np.empty((0, 4), np.int64), 0)


class Identities:
    """Identities by number. A slot's is that of the request that wrote it, so that a hit on another's KV shows.

    `others`: forwards say what they computed tokens with that is not their request's. Memory: a line for each identity that a
    request or a slot still has.
    """

    def __init__(self, sinks: Sinks, names: Sequence[SlotNames], *, others: bool) -> None:
        self._sinks = sinks
        self._names = names
        self._others = others
        self._declared: dict[int, int] = {}  # by request
        self._numbers: dict[bytes, int] = {}
        self._known: dict[int, _Identity] = {}
        self._next = 0
        self._most = _FEW
        self._followed: dict[int, _Followed] = {}

    def request(self, view: EventView) -> None:
        """Take what an event declares of a request; raise `UnusableEventError` if its columns do not fit one another."""
        values = np.stack(columns(view, "identity", ("kind", "start", "count", "hash")), axis=1)
        request_id = int(view.scalar("request_id"))
        if len(self._known) >= self._most:
            self._drop_unused()
        if len(values) or request_id in self._declared:
            self._declared[request_id] = self._number(values)

    def ended(self, request_id: int) -> None:
        """Forget a request."""
        self._declared.pop(request_id, None)
        self._followed.pop(request_id, None)

    def forget(self) -> None:
        """After a loss: any request may have another identity."""
        self._declared.clear()

    def of(self, forward: Forward) -> Int64Array:
        """Return the number of the identity that each request of a forward is computed with, `[bs]`."""
        found = [self._declared.get(request_id, UNKNOWN_IDENTITY) for request_id in forward.request_ids.tolist()]
        others = forward.identity.tolist() if self._others and forward.identity is not None else ()
        for kind, request, count, other in others:
            if count > 0 and found[request] != UNKNOWN_IDENTITY:
                values = self._known[found[request]].values
                values = values[values[:, 0] != kind]
                found[request] = self._number(np.append(values, [(kind, 0, 0, other)], axis=0))
        return np.array(found, np.int64)

    def follow(
        self,
        ids: Int64Array,
        prefix: Int64Array,
        ends: Int64Array,
        numbers: Int64Array,
        cached: Callable[[int, int, int], Int64Array],
    ) -> None:
        """Record what positions are computed with that requests `[n]` have for the first time: up to `ends`, of which `prefix`
        were there before. `cached(r, start, stop)` gives the numbers of the slots that request r's positions lead to.
        """
        rows: list[tuple[int, int, int, int, int]] = []
        parts = zip(ids.tolist(), prefix.tolist(), ends.tolist(), numbers.tolist(), strict=True)
        for r, (request_id, begin, end, number) in enumerate(parts) if self._next else ():
            known = self._followed.setdefault(request_id, _Followed())
            if known.end < begin:
                for start, stop, of in _runs(cached(r, known.end, begin), known.end):
                    rows += self._changes(known, request_id, of, start, stop)
                known.end = begin
            if known.end < end:
                rows += self._changes(known, request_id, number, known.end, end)
                known.end = end
        if rows:
            self._sinks.add("identities", *np.array(rows, np.int64).T)

    def _changes(
        self, known: _Followed, request_id: int, number: int, start: int, stop: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        identity = self._known.get(number, _NONE)
        if number == known.number and start > identity.behind_media:
            return
        known.number = number
        for kind in _KINDS:
            for position, found in identity_pieces(identity.values, kind, start, stop):
                if known.last.get(kind, (0, 0)) != found:
                    known.last[kind] = found
                    yield request_id, position, kind, *found

    def _number(self, values: Int64Array) -> int:
        key = values.tobytes()
        if key not in self._numbers:
            media = values[values[:, 0] == MEDIA]
            behind_media = int((media[:, 1] + media[:, 2]).max(initial=0))
            self._numbers[key], self._known[self._next] = self._next, _Identity(values, behind_media)
            self._next += 1
        return self._numbers[key]

    def _drop_unused(self) -> None:
        used = {number for names in self._names for tier in names.writers for number in np.unique(tier[:, 2]).tolist()}
        used.update(self._declared.values())
        self._known = {number: identity for number, identity in self._known.items() if number in used}
        self._numbers = {key: number for key, number in self._numbers.items() if number in used}
        self._most = max(_FEW, 2 * len(self._known))


def _runs(numbers: Int64Array, start: int) -> Iterable[tuple[int, int, int]]:
    """Yield `(start, stop, number)` of positions from `start` on that have one number, `[n]`."""
    if len(numbers):
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for first, last in pairwise(cuts):
            yield start + first, start + last, int(numbers[first])


def identity_pieces(values: Int64Array, kind: int, start: int, stop: int) -> list[tuple[int, tuple[int, int]]]:
    """Return where positions from `start` to `stop - 1` begin to depend on another value, and on what: known or not, and its hash."""
    mine = values[values[:, 0] == kind]
    if not len(mine):
        return [(start, (0, 0))]
    if kind != MEDIA:
        return [(start, (1, int(mine[-1, 3])))]
    ends = mine[:, 1] + np.maximum(mine[:, 2], 0)
    points = np.unique(np.clip(np.concatenate([[start], mine[:, 1], ends]), start, stop))
    fills = np.zeros(len(points), np.int64)
    for first, last, (_, _, count, value) in zip(mine[:, 1].tolist(), ends.tolist(), mine.tolist(), strict=True):
        if count > 0:
            fills[(points >= first) & (points < last)] = value
    return [(at, (1, value)) for at, value in zip(points.tolist(), fills.tolist(), strict=True) if at < stop]
