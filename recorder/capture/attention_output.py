"""What positions attention read, by what came out of it: the output of a token is held against the sum that it ought to be.

A kernel masks, cuts and strides by itself, and nothing that it is given says whether it did as it was told. Its output does:
it is the mean of the values in the request's slots, weighed by softmax of the token's query with the keys there. If it is
not that mean over the positions that the token is to read, the runs of positions are searched for one of which it is the
mean. A run that differs by less than what rounding changes is not told from the right one: of a long prefix that is
attended evenly a position more or less is not seen.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.arrays import Int64Array
from .forward_input import OutputRead

UNEXPLAINED: Final = -1
# By how much of its values' weighed lengths an output may be off, in units of what its type tells apart of 1.
_ROUNDING: Final = 8
_LEAST: Final = 1e-3
_STEPS: Final = 2  # and by how many of the smallest steps of its type each of its values
MAX_POSITIONS: Final = 1 << 14  # of a forward that are looked at, all tokens and layers together
MAX_SEARCHES: Final = 16  # of a forward, for what an output is the mean of instead


class AttentionCall(NamedTuple):
    """One layer's attention as it was called: `query` `[T, heads, dim]` and `output` `[T, heads, value dim]` of a forward's tokens.

    `scale` is what the scores are multiplied with, `cap` at what they are capped (0: nothing).
    """

    query: Any
    output: Any
    scale: float
    cap: float = 0.0


class RequestSlots(NamedTuple):
    """A request of a forward: its first token in it, how many of its positions are cached, and `[n]` the slots of all of them."""

    first_token: int
    prefix: int
    slots: Int64Array


# Returns K and V of some slots `[n]`, those that the pool does not have too, in a head: `[n, dim]` each.
ReadRows = Callable[[Int64Array, int], tuple[Any, Any]]


def requests_of(slots: Int64Array, prefix: Int64Array, extend: Int64Array) -> list[RequestSlots]:
    """Return the requests of a forward, of which `slots` has those of all their positions, one request after another."""
    parts = np.split(slots, np.cumsum(prefix + extend)[:-1]) if prefix.size else []
    begins = np.cumsum(extend) - extend
    return [RequestSlots(*one) for one in zip(begins.tolist(), prefix.tolist(), parts, strict=True)]


class OutputChecks:
    """Holds what attention gives in a forward against what it ought to; `take` returns what was found.

    Of each request and layer the last token is looked at, the first, and one that moves on from forward to forward; of its
    heads one, which moves on too. No more than so many positions are looked at in a forward: if there are more, layers take
    turns. Of `every` forwards one is looked at, of 0 none.
    """

    def __init__(self, every: int = 1, *, most_positions: int = MAX_POSITIONS) -> None:
        self._every, self._most = every, most_positions
        self._forwards, self._begun = 0, False  # how many there were, and whether a layer of this one has run
        self._number, self._asked = 0, 0  # how many were looked at, and the positions that this one's layers have
        self._layers = 1  # of so many layers one is looked at
        self._left, self._searches = most_positions, MAX_SEARCHES
        self._found: list[OutputRead] = []
        self._compared = 0

    def take(self) -> tuple[list[OutputRead], int]:
        """Return what was found since the last call, and of how many tokens outputs were compared; the next forward begins."""
        taken = self._found, self._compared
        if self._asked:
            self._number, self._layers, self._asked = self._number + 1, -(-self._asked // self._most), 0
        self._forwards, self._begun = self._forwards + self._begun, False
        self._left, self._searches, self._found, self._compared = self._most, MAX_SEARCHES, [], 0
        return taken

    def wanted(self) -> bool:
        """Say whether the forward is one that is looked at, of which a layer is about to run."""
        self._begun = True
        return self._every > 0 and not self._forwards % self._every

    def look(
        self,
        call: AttentionCall,
        ways: Sequence[Sequence[RequestSlots]],
        read: ReadRows,
        kv_heads: int,
        *,
        group: int,
        layer: int,
        windows: Sequence[int],
    ) -> None:
        """Look at what a layer gave; K and V are read as they are behind the call.

        A token reads so many positions before its own as one of `windows` says, 0: all. `ways`: the requests with their slots,
        more than once if the engine may number these otherwise.
        """
        if not self.wanted():
            return
        looked = [_looked_at(one, self._number) for one in ways[0]]
        positions = sum(one.prefix + token + 1 for one, tokens in zip(ways[0], looked, strict=True) for token in tokens)
        self._asked += positions
        if (layer + self._number) % self._layers or positions > self._left:
            return
        self._left -= positions
        kv_head, each = self._number % kv_heads, call.query.shape[1] // kv_heads
        head = kv_head * each + self._number // kv_heads % each
        sums = [[_Rows(read, one.slots, kv_head) for one in way] for way in ways]
        for r, one in enumerate(ways[0]):
            for token in looked[r]:
                position = one.prefix + token
                starts = _starts(position, windows)
                output = _Output(call, one.first_token + token, head)
                self._compared += 1
                right = any(output.is_mean(way[r], start, position + 1) for way in sums for start in starts)
                if right or not self._searches:
                    continue
                self._searches -= 1
                place: dict[str, Any] = {"group": group, "layer": layer, "request": r, "position": position}
                self._found.append(_read(output, ways, sums, starts[0], place))


def look_at_one(
    call: AttentionCall, keys: Any, values: Any, windows: Sequence[int], place: dict[str, int]
) -> list[OutputRead]:
    """Return what a single token's output shows, nothing if it is right: of a call with one token and one head.

    `keys` and `values` `[n, dim]` are those of its request's positions, itself included; `place` has `group`, `layer`, `request`
    and `position`.
    """
    position = place["position"]
    alone = RequestSlots(0, position, np.arange(len(keys), dtype=np.int64))
    rows, output = _Rows(lambda *_: (keys, values), alone.slots, 0), _Output(call, 0, 0)
    starts = _starts(position, windows)
    if any(output.is_mean(rows, start, position + 1) for start in starts):
        return []
    found = _read(output, [[alone]], [[rows]], starts[0], {**place, "request": 0})
    return [found._replace(request=place["request"])]


def _starts(position: int, windows: Sequence[int]) -> list[int]:
    """Return the first position that a token may read, by each of the windows, 0: all."""
    return [max(position - window, 0) if window else 0 for window in windows]


def _looked_at(one: RequestSlots, number: int) -> list[int]:
    """Return which of a request's new tokens are looked at."""
    extend = one.slots.size - one.prefix
    return sorted({0, number % extend, extend - 1}) if extend > 0 <= one.prefix else []


def _read(
    output: "_Output",
    ways: Sequence[Sequence[RequestSlots]],
    sums: list[list["_Rows"]],
    start: int,
    place: dict[str, Any],
) -> OutputRead:
    """Return what an output is the mean of: a run of the request's own positions, or of another's, or of none."""
    mine, end = place["request"], place["position"] + 1
    for way in sums:
        run = output.run(way[mine], start, end)
        if run is not None:
            return OutputRead(**place, start=run[0], length=run[1] - run[0])
    for r, other in enumerate(ways[0]):
        run = output.run(sums[0][r], 0, min(end, other.slots.size)) if r != mine and other.slots.size else None
        if run is not None and run[1] > run[0]:
            return OutputRead(**place, start=run[0], length=run[1] - run[0], slots=other.slots[run[0] : run[1]])
    return OutputRead(**place, start=0, length=UNEXPLAINED)


class _Rows:
    """K and V of a request's positions in one head, `[n, dim]` each; read when they are asked for, once."""

    def __init__(self, read: ReadRows, slots: Int64Array, head: int) -> None:
        self._read, self._slots, self._head = read, slots, head
        self._found: tuple[Any, Any, Any] | None = None

    def all(self) -> tuple[Any, Any, Any]:
        """Return K and V, and the squares of V's lengths `[n]`, in float32."""
        if self._found is None:
            keys, values = (half.float() for half in self._read(self._slots, self._head))
            self._found = keys, values, values.square().sum(1)
        return self._found


class _Output:
    """A token's output in one head: of which runs of positions it is the mean."""

    def __init__(self, call: AttentionCall, token: int, head: int) -> None:
        self._query, self._output = call.query[token, head].float(), call.output[token, head].float()
        self._scale, self._cap = call.scale, call.cap
        eps, smallest = _resolution(call.output.dtype)
        self._tolerance = max(_LEAST, _ROUNDING * eps)
        self._steps = _STEPS * smallest * float(self._output.numel()) ** 0.5

    def is_mean(self, rows: _Rows, start: int, end: int) -> bool:
        """Say whether the output is the mean over a run; of what is no number nothing is said."""
        return not bool(self._errors(rows, np.array([start]), np.array([end]))[0] > self._tolerance)

    def run(self, rows: _Rows, start: int, end: int) -> tuple[int, int] | None:
        """Return the run that the output is the mean of, None for none: one that ends at `end`, or else that begins at `start` or 0.

        Of several that fit it is the one that leaves out nothing, or else the one that fits best.
        """
        size = len(rows.all()[0])
        low, high = np.arange(end), np.full(end, end)
        more = [
            (begin, last) for begin in dict.fromkeys((start, 0)) for last in range(begin + 1, size + 1) if last != end
        ]
        begins, ends = np.array(more, np.int64).reshape(-1, 2).T
        for lows, highs in ((low, high), (begins, ends)):
            if not lows.size:
                continue
            errors = np.nan_to_num(self._errors(rows, lows, highs), nan=np.inf)
            if errors.min() <= self._tolerance:
                best = 0 if errors[0] <= self._tolerance else int(errors.argmin())
                return int(lows[best]), int(highs[best])
        return None

    def _errors(self, rows: _Rows, begins: Int64Array, ends: Int64Array) -> Any:
        """Return how far the output is from the mean over each run, `[n]`, as a part of its values' lengths: their weighed mean square."""
        import torch

        keys, values, squares = rows.all()
        first, last, one = int(begins.min()), int(ends.max()), len(begins) == 1
        scores = (keys[first:last] @ self._query) * self._scale
        if self._cap:
            scores = self._cap * (scores / self._cap).tanh()
        weights = (scores - scores.max()).exp()
        low, high = torch.from_numpy(begins - first), torch.from_numpy(ends - first)

        def over(parts: Any) -> Any:
            sums = torch.cat((torch.zeros_like(parts[:1]), parts.cumsum(0, dtype=torch.float64)))
            return sums[high] - sums[low]

        values, squares = values[first:last], squares[first:last]
        if one:
            total, mean, length = weights.sum()[None], (weights @ values)[None], (weights @ squares)[None]
        else:
            total, mean, length = over(weights), over(weights[:, None] * values), over(weights * squares)
        length = (length / total).sqrt().clamp(min=1e-30)
        off = ((mean / total[:, None] - self._output).norm(dim=1) - self._steps).clamp(min=0)
        return (off / length).double().numpy()


def _resolution(dtype: Any) -> tuple[float, float]:
    """Return what a type tells apart of 1, and its smallest step."""
    import torch

    found = torch.finfo(dtype)
    return float(found.eps), float(found.smallest_normal * found.eps)
