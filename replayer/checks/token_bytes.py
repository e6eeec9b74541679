"""What a token's V in a first layer is: the same wherever the token stands, under one adapter and one set of weights. Its K
there is the same where it stands at the same position.

So a trace is its own oracle, without a model. It is asked a file at a time, and how far equal tokens' bytes differ where nothing is
wrong (another batch, another kernel) is learnt from the file itself: from repeats at another position behind another token, since
a prompt that comes again has the same bytes also where V follows from more than the token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.ops.token_rows.encoding import float_values
from ...kernels.ops.token_rows.reference import encoding_of
from ...recorder.state.requests import Identity, RequestTable
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.schema import IDENTITY_KINDS
from ..model.written import (
    BEFORE,
    EVENT,
    FORWARD,
    FURTHEST,
    NEEDED,
    POSITION,
    REQUEST,
    ROUNDING,
    ROW,
    SLOT,
    TIME,
    TOKEN_BITS,
    written_tokens,
)
from ..report.findings import Cause, Finding, counted, evidence, of_request
from .check import Covered, HistoryCheck, register
from .history import History

# Of 8 bits equal values may differ by a code: by a part of the value, and of small ones by a step, of which there are so many to 1.
_CODES: Final = {dtype: of for dtype in ("float8_e4m3fn", "float8_e5m2") if (of := encoding_of(dtype, 1.0)) is not None}
_ROUNDING: Final = ROUNDING | {dtype: of.relative for dtype, of in _CODES.items()}
_NOISE: Final = 16  # times what most repeats differ by
_MOST: Final = 0.7  # of the repeats are right, or the bytes follow from more than the token
_FEWEST: Final = 64  # repeats from which anything can be learnt
_K_MOST: Final = 0.25  # of the largest value in the row, or in most rows
_RECENT: Final = 4096  # rows that show, with those of a batch, how large K is
_POSITION_BITS: Final = 20  # of K's keys, between the identity and the token
_MAX_TOKENS: Final = 1 << 17  # that are remembered of a stream
_MAX_DIFFERENCES: Final = 1 << 20


@dataclass(slots=True)
class _Stream:
    """What is remembered of a stream: of each key the last bytes, those before them, and where both stand; who was written last stands last.

    `pairs` counts repeats that tell something, `by` how far those of them that are not equal differ, `found` all that differ by
    more than rounding: by how much, the place, the place of the token before, the key, and whether the same forward wrote other
    tokens of the same identity with the bytes that they had. `alike` has by identity the events `[n, 2]` from one to the other of
    which a token came again so: weights and adapter are the same.
    `across` has the lengths `[n, 2]` from one to the other of which a token's K came again so: no length there chooses the angles.
    """

    half: str
    keys: Int64Array
    rows: ByteArray
    older: ByteArray
    places: Int64Array
    older_places: Int64Array
    pairs: int = 0
    by: list[npt.NDArray[np.float64]] = field(default_factory=list)
    found: list[tuple[float, list[int], list[int], int, bool]] = field(default_factory=list)
    alike: dict[int, Int64Array] = field(default_factory=dict)
    across: Int64Array = field(default_factory=lambda: np.empty((0, 2), np.int64))


@register
class TokenBytes(HistoryCheck):
    """A token was written with other bytes than the last time, in a first layer, under the same adapter and weights.

    K follows from token and position where V follows from the token alone, which is learnt from V: what differs in K alone was
    rotated by something else than its position. That V follows from the token alone: a request that is computed with another's adapter, or by weights that have been
    replaced, leaves records, hashes and tables right, and shows nowhere else. Judged are requests that declare their adapter
    and no media, in a file whose repeats at other positions, behind other tokens, show that the engine computes so: at least
    64, seven of ten alike. Bytes that change for good are not judged: weights and adapters may be loaded anew, unseen; nor, where
    requests do not declare their weights, a forward of which all tokens differ.
    """

    kind = "token_bytes"
    finds = "a forward wrote other bytes for a token than were written for it before, with the same adapter and weights"
    covered = Covered.COMPILED  # it is given whole batches

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._identities: dict[tuple[int, int | None], int] = {}
        self._weights_known: set[int] = set()

    def batch(self, batch: TraceBatch) -> None:
        header, table = self.history.header, self.history.request_table
        if header.tokens != "plain" or not table.declared:
            return
        for runner, known in enumerate(header.runners):
            for number, (group, stream) in enumerate(header.streams(runner)):
                if (
                    stream.half in ("K", "V")
                    and not stream.samples
                    and stream.layer_of(0) == 0
                    and stream.dtype in _ROUNDING
                    and not NEEDED & set(known.derived)
                ):
                    place = runner, number, header.groups[group].table
                    written = written_tokens(batch, header, *place, partial(self._identity_of, table))
                    if written is not None:
                        remembered = self._streams.setdefault((runner, number), _empty(stream.half, *written))
                        _compare(remembered, stream.dtype, *(_by_position(*written) if stream.half == "K" else written))

    def ends(self) -> Iterator[Finding]:
        """Judge a file by what it has shown, and forget it."""
        for (runner, number), stream in self._streams.items():
            if stream.half == "V":
                limit = self._limit(runner, number, stream)
                if limit is not None:
                    yield from self._judge(runner, number, stream, limit, stream)
                    if limit <= _K_MOST:  # else nearly all repeats differ: V follows from more than the token
                        yield from self._judge_k(runner, number, stream)
        self._streams.clear()

    def _judge_k(self, runner: int, number: int, v: _Stream) -> Iterator[Finding]:
        """Judge the K that was written beside a V that follows from the token alone."""
        streams = self.history.header.streams(runner)
        for other, (group, _) in enumerate(streams):
            k = self._streams.get((runner, other))
            limit = None if k is None or k.half == "V" or group != streams[number][0] else self._limit(runner, other, k)
            if k is not None and limit is not None:
                # Where V differs, too, all of the token was computed otherwise.
                otherwise = {(key >> TOKEN_BITS, place[EVENT]) for _, place, _, key, _ in v.found}
                k.found = [one for one in k.found if (one[3] >> TOKEN_BITS, one[1][EVENT]) not in otherwise]
                if not _by_length(k, max(limit, _K_MOST)):
                    yield from self._judge(runner, other, k, max(limit, _K_MOST), v)

    def _identity_of(self, table: RequestTable, ids: Int64Array, events: Int64Array) -> Int64Array:
        """Return a number for adapter and weights of each request as of an event, `[n]`, -1 where they are not known."""
        unique, which = np.unique(ids, return_inverse=True)
        found = np.full(len(ids), -1, np.int64)
        order = np.argsort(which.reshape(-1), kind="stable")
        for request, mine in zip(
            unique.tolist(), np.split(order, np.cumsum(np.bincount(which.reshape(-1)))[:-1]), strict=True
        ):
            facts = table.facts.get(request)
            declared = facts.identities if facts is not None else ()
            numbers = np.array([-1, *(self._number(one) for one in declared)], np.int64)
            since = np.array([one.event for one in declared], np.int64)
            found[mine] = numbers[np.searchsorted(since, events[mine], side="right")]
        return found

    def _number(self, identity: Identity) -> int:
        values: dict[str, int] = {}
        for kind, _, _, value in identity.values.tolist():
            name = IDENTITY_KINDS[kind] if 0 <= kind < len(IDENTITY_KINDS) else ""
            values[name] = values.get(name, 0) | value
        if "adapter" not in values or values.get("media", 1):
            return -1
        number = self._identities.setdefault((values["adapter"], values.get("weights")), len(self._identities))
        if "weights" in values:
            self._weights_known.add(number)
        return number

    def _same_weights(self, stream: _Stream, one: tuple[float, list[int], list[int], int, bool]) -> bool:
        """Say whether other tokens show that weights and adapter were not replaced between the two places of what differs."""
        _, place, before, key, among_right = one
        spans = stream.alike.get(key >> TOKEN_BITS, np.empty((0, 2), np.int64))
        spanned = bool(((spans[:, 0] <= before[EVENT]) & (place[EVENT] <= spans[:, 1])).any())
        return spanned and (key >> TOKEN_BITS in self._weights_known or among_right)

    def _limit(self, runner: int, number: int, stream: _Stream) -> float | None:
        """Return by how much equal tokens may differ, as the file shows it; None if it does not show that they are equal."""
        by = np.sort(np.concatenate([np.zeros(0), *stream.by]))
        equal, most = stream.pairs - len(by), int(_MOST * stream.pairs)
        noise = 0.0 if most < equal or not len(by) else float(by[min(most - equal, len(by) - 1)])
        limit = max(_ROUNDING[self.history.header.streams(runner)[number][1].dtype], _NOISE * noise)
        too_few = stream.pairs < _FEWEST
        nothing = limit >= 1  # equal tokens differ by as much as others do
        if too_few or nothing or int((by > limit).sum()) > (1 - _MOST) * stream.pairs or len(by) > _MAX_DIFFERENCES:
            return None
        return limit

    def _judge(self, runner: int, number: int, stream: _Stream, limit: float, v: _Stream) -> Iterator[Finding]:
        together: dict[tuple[int, int], list[Any]] = {}
        for one in stream.found:
            # Else nothing shows that weights and adapter were those of before, or those of K alone were not.
            if one[0] > limit and self._same_weights(v, one) and self._same_weights(stream, one):
                together.setdefault((one[1][EVENT], one[1][REQUEST]), []).append(one)
        names = self.history.request_table
        for (event, request), members in together.items():
            much, place, before, key, _ = members[0]
            rotated = stream.half == "K"
            token = key & (1 << TOKEN_BITS - (_POSITION_BITS if rotated else 0)) - 1
            others = sum(int((by > limit).sum()) for by in stream.by)
            detail = (
                f"wrote {'K of ' if rotated else ''}token {token} with other bytes than request {names.name(before[REQUEST])} in forward "
                f"{before[FORWARD]}{' at this position' if rotated else ''}, by {much:.0%} of the largest value; of {stream.pairs:,} repeats "
                f"{'there' if rotated else 'elsewhere'} {others:,} do"
            )
            yield Finding(
                kind=self.kind,
                event=event,
                forward=place[FORWARD],
                time_ns=place[TIME],
                runner=runner,
                group=self.history.header.streams(runner)[number][0],
                **of_request(names, request),
                req_pool_idx=place[ROW],
                position=place[POSITION],
                slot=place[SLOT],
                detail=counted(detail, len(members)),
                count=len(members),
                evidence=evidence([before[EVENT]], event),
                **Cause("rotated" if rotated else "", before[REQUEST], token)._asdict(),
            )


def _empty(half: str, keys: Int64Array, data: ByteArray, places: Int64Array) -> _Stream:
    return _Stream(half, keys[:0], data[:0], data[:0], places[:0], places[:0])


def _by_position(keys: Int64Array, data: ByteArray, places: Int64Array) -> tuple[Int64Array, ByteArray, Int64Array]:
    """Return tokens whose keys hold the position, too; those that have no room in it are left out."""
    token, position = keys & (1 << TOKEN_BITS) - 1, places[:, POSITION]
    fits = np.flatnonzero(
        (token >> TOKEN_BITS - _POSITION_BITS == 0) & (position >= 0) & (position >> _POSITION_BITS == 0)
    )
    keys = keys[fits] + (position[fits] << TOKEN_BITS - _POSITION_BITS)
    return keys, data[fits], places[fits]


def _compare(known: _Stream, dtype: str, keys: Int64Array, data: ByteArray, places: Int64Array) -> None:
    """Compare each token with the one before it that has the same key, and remember the last."""
    if not len(keys) or sum(map(len, known.by)) > _MAX_DIFFERENCES:
        return
    fresh = np.unique(keys)
    again = fresh[np.minimum(np.searchsorted(fresh, known.keys), len(fresh) - 1)] == known.keys
    old = known.keys[again]
    # What is remembered stands in front, the older bytes first: each token then has its two before it.
    twice = np.concatenate([old, old, keys])
    order = np.argsort(twice, kind="stable")
    rows = np.concatenate([known.older[again], known.rows[again], data])[order]
    places = np.concatenate([known.older_places[again], known.places[again], places])[order]
    keys = twice[order]
    new = order >= 2 * len(old)
    same = np.append(False, keys[1:] == keys[:-1])
    tells = same & new
    if known.half == "V":
        tells &= np.append(False, (places[1:, [POSITION, BEFORE]] != places[:-1, [POSITION, BEFORE]]).all(axis=1))
        tells &= (places[:, BEFORE] >= 0) & (np.roll(places[:, BEFORE], 1) >= 0)
    known.pairs += int(tells.sum())
    other = np.append(False, (rows[1:] != rows[:-1]).any(axis=1))
    differ = np.flatnonzero(same & new & other)
    usual = _usual(np.concatenate([known.rows[-_RECENT:], data]), dtype) if known.half == "K" and len(differ) else 0.0
    by = _differ_by(rows[differ], rows[differ - 1], dtype, usual)
    known.by.append(by[tells[differ]])
    alike = same & new
    alike[differ] = by <= _ROUNDING[dtype]
    if known.half == "K":
        turned = np.flatnonzero(alike & (places[:, POSITION] > 0))  # at the first there are no angles
        lengths = np.sort(np.stack([places[turned - 1, FURTHEST], places[turned, FURTHEST]], axis=1), axis=1)
        known.across = _joined(np.concatenate([known.across, lengths[lengths[:, 0] < lengths[:, 1]]]))
    ends, begins = (places[np.flatnonzero(alike) - n, EVENT] for n in (0, 1))
    spans, of = np.stack([begins, ends], axis=1), keys[alike] >> TOKEN_BITS
    right = set(np.unique(of << TOKEN_BITS | ends).tolist())
    for at, much in zip(differ.tolist(), by.tolist(), strict=True):
        if much <= _ROUNDING[dtype] or len(known.found) >= _MAX_TOKENS:
            continue
        if at > 1 and keys[at - 2] == keys[at] and bool((rows[at] == rows[at - 2]).all()):
            # The one in between was wrong, and was found.
            spans = np.append(spans, [[places[at - 2, EVENT], places[at, EVENT]]], axis=0)
            of = np.append(of, keys[at] >> TOKEN_BITS)
            continue
        key, place = int(keys[at]), places[at].tolist()
        # All that a forward wrote comes at once. Of K it is its V that shows the weights.
        among_right = known.half == "K" or (key >> TOKEN_BITS << TOKEN_BITS | place[EVENT]) in right
        known.found.append((much, place, places[at - 1].tolist(), key, among_right))
    for identity in np.unique(of).tolist():
        before = known.alike.get(identity, spans[:0])
        known.alike[identity] = _joined(np.concatenate([before, spans[of == identity]]))
    last = np.flatnonzero(np.append(keys[1:] != keys[:-1], True))[-_MAX_TOKENS:]
    before = np.where(same[last], last - 1, last)
    kept = np.flatnonzero(~again)[max(0, len(known.keys) - len(old) + len(last) - _MAX_TOKENS) :]
    known.keys, known.rows, known.older, known.places, known.older_places = (
        np.concatenate([had[kept], got])
        for had, got in (
            (known.keys, keys[last]),
            (known.rows, rows[last]),
            (known.older, rows[before]),
            (known.places, places[last]),
            (known.older_places, places[before]),
        )
    )


def _by_length(k: _Stream, limit: float) -> bool:
    """Say whether a length can be what chooses the angles of a request: all K that differs was turned below and above it, and no K
    that is the same.
    """
    pairs = [sorted((place[FURTHEST], before[FURTHEST])) for much, place, before, *_ in k.found if much > limit]
    if not pairs:
        return False
    length, below = max(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    for begin, end in k.across.tolist():
        if begin <= length < end:
            length = end
    return length < below


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
