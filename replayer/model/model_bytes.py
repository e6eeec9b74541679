"""Whether the first layer's K and V that forwards wrote are those that a checkpoint gives for the tokens and positions."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.ops.token_rows.encoding import ITEM_BYTES
from ...kernels.ops.token_rows.reference import FILLED, FITS, Encoding, encoding_of, stored_values
from ...recorder.state.requests import RequestFacts
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.header import KvStream
from ...recorder.trace.schema import IDENTITY_KINDS
from ..checks.check import Covered, HistoryCheck
from ..checks.history import History
from ..report.findings import Cause, Finding, counted, evidence, of_request
from ..run.coverage import COMPARED, WRITTEN
from .first_layer import Expected, FirstLayer, FloatArray, first_layer
from .token_tables import TokenTables
from .written import (
    EVENT,
    FORWARD,
    NEEDED,
    POSITION,
    REQUEST,
    ROUNDING,
    ROW,
    SLOT,
    TIME,
    TOKEN_BITS,
    ForwardTokens,
    forward_tokens,
    rows_of_bytes,
)

_MOST_KEPT: Final = 1 << 16
_TRIED: Final = 8  # of many that are wrong, to see whether the model explains them
_NEAR: Final = 256  # positions before and after
_NO_NUMBER: Final = "the checkpoint gives NaN or infinity for them"
_LEFT_OUT: Final = "an adapter, media, an unknown token, padding, or no bytes"
_ADAPTER, _WEIGHTS, _MEDIA = (IDENTITY_KINDS.index(kind) for kind in ("adapter", "weights", "media"))


class _Wrong(NamedTuple):
    half: str
    place: Int64Array
    token: int
    got: FloatArray
    off: float


class _Explained(NamedTuple):
    words: str
    cause: Cause


@dataclass(slots=True)
class _Compared:
    """What became of a half under one version of the weights."""

    tokens: int = 0
    wrong: int = 0
    kept: list[_Wrong] = field(default_factory=list)


def bytes_of_layer(stream: KvStream) -> int:
    """Return how many of a stream's bytes are of its first layer."""
    return stream.capture_bytes // max(1, len(stream.layers))


class ModelBytes(HistoryCheck):
    """A forward wrote other K or V than the checkpoint gives for token and position, in the first layer.

    Judged are the target's tokens of requests without an adapter and media. If most of a half differs, and the model does not
    say what they are instead, the checkpoint is not what ran, and nothing is found. `counts` says how many values of tokens were
    compared, and why others were not.
    """

    kind = "model_bytes"
    finds = "the first layer's K or V of a token is not what the model that was named gives for it"
    covered = Covered.COMPILED  # it is given whole batches

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.counts: Counter[str] = Counter()
        self._compared: dict[int, dict[str, _Compared]] = {}  # by weights and half
        self._numbers: dict[int | None, int] = {None: 0}  # as where nothing is declared
        self._streams: list[tuple[int, int, KvStream, Encoding]] = []
        self._why = self._refused()
        if self._why:
            return
        for number, (group, stream) in enumerate(history.header.streams(0)):
            if not stream.samples and stream.layer_of(0) == 0:
                dtype = stream.dtype or history.header.model.dtype
                encoding = encoding_of(dtype, stream.scale)
                known = dtype in ROUNDING or history.header.model.dtype in ROUNDING
                if encoding is not None and known:
                    self._streams.append((number, group, stream, encoding))
                else:
                    said = "nobody says what they are, or by what they are scaled"
                    self._why = f"values of {dtype or 'an unknown type'} are not compared: {said}"
        if self._streams:
            dtype = history.header.model.dtype
            self._layer: FirstLayer = first_layer(
                history.model, dtype if dtype in ROUNDING else self._streams[0][3].dtype
            )
            widths = {one.half: bytes_of_layer(one) // ITEM_BYTES[of.dtype] for _, _, one, of in self._streams}
            self._tables = TokenTables(self._layer, history.header.ranks, widths)
            self._why = ""
        self._why = self._why or ("" if self._streams else "no bytes of the first layer were recorded")

    def _refused(self) -> str:
        header = self.history.header
        if header.tokens != "plain":
            return "the trace holds hashes of tokens"
        derived = sorted(NEEDED & set(header.runners[0].derived))
        return f"{', '.join(derived)} were not observed" if derived else ""

    def batch(self, batch: TraceBatch) -> None:
        """Compare what a batch's forwards wrote."""
        header = self.history.header
        rows = np.flatnonzero((np.array(batch.kinds) == "forward") & (batch.scalar_ints("runner") == 0))
        tokens = int(np.diff(batch.offsets("input_ids"))[rows].sum())
        halves = max(1, len(self._streams))
        self.counts[WRITTEN] += tokens * halves
        if self._why:
            self.counts[self._why] += tokens
            return
        of_tokens: set[tuple[int, int]] = set()  # event and slot of what is no V of its token, so that K is not asked
        given = forward_tokens(batch, header, 0, self._identity_of)
        data = None if given is None else self._tables.load(batch)
        left = 0
        for number, group, stream, encoding in sorted(self._streams, key=lambda one: one[2].half in self._layer.moves):
            size = 0
            if given is not None:
                widths = [one.capture_bytes for _, one in header.streams(0)]
                begins = given.begins(sum(widths[:number]), widths[number])
                table = header.groups[group].table
                size = self._compare_stream(stream, encoding, given, begins, data, table, of_tokens)
            left += tokens - size
        if left:
            self.counts[_LEFT_OUT] += left

    def _identity_of(self, ids: Int64Array, events: Int64Array) -> Int64Array:
        """Return a number for the weights of each request as of an event, `[n]`, -1 for one with an adapter or media."""
        found = np.zeros(len(ids), np.int64)
        facts = {request: self.history.request_table.facts.get(request) for request in np.unique(ids).tolist()}
        if any(known is not None and known.identities for known in facts.values()):
            for at, (request, event) in enumerate(zip(ids.tolist(), events.tolist(), strict=True)):
                found[at] = self._weights(facts[request], event)
        return found

    def _weights(self, known: RequestFacts | None, event: int) -> int:
        declared = next((one for one in reversed(known.identities if known else ()) if one.event <= event), None)
        values = [] if declared is None else declared.values.tolist()
        if any(value for kind, _, _, value in values if kind in (_ADAPTER, _MEDIA)):
            return -1
        weights = next((value for kind, _, _, value in values if kind == _WEIGHTS), None)
        return self._numbers.setdefault(weights, len(self._numbers))

    def _compare_stream(
        self,
        stream: KvStream,
        encoding: Encoding,
        given: ForwardTokens,
        begins: Int64Array,
        data: Any,
        block_table: int,
        of_tokens: set[tuple[int, int]],
    ) -> int:
        """Compare what forwards wrote to a stream, and return of how many tokens there are bytes.

        What fits its token's row in the table is right. Of the rest the definition is asked.
        """
        values, whole = given.batch.values("kv_bytes"), stream.capture_bytes
        tokens, positions = given.keys & (1 << TOKEN_BITS) - 1, given.positions
        inside = (tokens < self._layer.vocab_size) & (positions >= 0) & (positions < 1 << TOKEN_BITS)
        flags = self._tables.flags(stream.half, data, begins, np.where(inside, tokens, -1), positions, encoding)
        if flags is None:
            flags = np.zeros(len(begins), np.uint8)
        filled, right = flags & FILLED > 0, flags == FILLED | FITS
        unsure = np.flatnonzero(~filled)  # bytes behind those that were looked at may be there
        filled[unsure] = rows_of_bytes(values, begins[unsure], whole).any(axis=1)
        size = int(filled.sum())
        if why := self._layer.why_not.get(stream.half):
            self.counts[why] += size
            return size
        for identity in np.unique(given.keys[filled] >> TOKEN_BITS).tolist():
            known = self._compared.setdefault(identity, {}).setdefault(stream.half, _Compared())
            known.tokens += int((right & (given.keys >> TOKEN_BITS == identity)).sum())
        self.counts[COMPARED] += int(right.sum())
        rest = np.flatnonzero(filled & ~right)
        if len(rest):
            got = stored_values(rows_of_bytes(values, begins[rest], whole)[:, : bytes_of_layer(stream)], encoding)
            self._compare(stream.half, given.keys[rest], got, given.places(rest, block_table), of_tokens)
        return size

    def _compare(
        self, half: str, keys: Int64Array, got: FloatArray, places: Int64Array, of_tokens: set[tuple[int, int]]
    ) -> None:
        inside = (keys & (1 << TOKEN_BITS) - 1) < self._layer.vocab_size
        positions = places[:, POSITION]
        inside &= (positions >= 0) & (positions < 1 << TOKEN_BITS)
        self.counts[_LEFT_OUT] += int((~inside).sum())
        keys, got, places = keys[inside], got[inside], places[inside]
        tokens = keys & (1 << TOKEN_BITS) - 1
        asked = places[:, POSITION] * self._layer.vocab_size + tokens if half in self._layer.moves else tokens
        unique, which = np.unique(asked, return_inverse=True)
        expected = self._expected(half, unique % self._layer.vocab_size, unique // self._layer.vocab_size, got.shape[1])
        mine = Expected(*(part[which] for part in expected))
        if mine.values.shape[1] < got.shape[1]:
            got = got[:, : mine.values.shape[1]]
        wrong = mine.differ(got, self._encoding(half))
        if not mine.known.all():
            self.counts[_NO_NUMBER] += int((~mine.known).sum())
            keys, places, tokens = (part[mine.known] for part in (keys, places, tokens))
            got, wrong = got[mine.known], wrong[mine.known]
            mine = Expected(*(part[mine.known] for part in mine))
        self.counts[COMPARED] += len(keys)
        for identity in np.unique(keys >> TOKEN_BITS).tolist():
            of = keys >> TOKEN_BITS == identity
            known = self._compared.setdefault(identity, {}).setdefault(half, _Compared())
            known.tokens += int(of.sum())
            known.wrong += int((wrong & of).sum())
            for at in np.flatnonzero(wrong & of).tolist():
                where = int(places[at, EVENT]), int(places[at, SLOT])
                if where in of_tokens:
                    known.wrong -= 1
                    continue
                if half not in self._layer.moves:
                    of_tokens.add(where)
                if len(known.kept) < _MOST_KEPT:
                    off = float(np.abs(got[at] - mine.values[at]).max() / max(float(mine.largest[at]), 1e-30))
                    known.kept.append(_Wrong(half, places[at], int(tokens[at]), got[at], off))

    def _encoding(self, half: str) -> Encoding:
        return next(encoding for _, _, stream, encoding in self._streams if stream.half == half)

    def _expected(self, half: str, tokens: Int64Array, positions: Int64Array, width: int) -> Expected:
        return self._layer.expected(half, tokens, positions, self.history.header.ranks, width)

    def ends(self) -> Iterator[Finding]:
        """Judge a file by what it has shown, and forget it."""
        together: dict[tuple[int, int], list[_Wrong]] = {}
        for halves in self._compared.values():
            why = ""
            # What follows from the token alone comes first: without it the rest says nothing.
            for half, known in halves.items():
                if not why and 2 * known.wrong > known.tokens and not self._explains(known.kept):
                    why = f"{half} of most tokens is nothing that this model gives: it is not what ran, or computes otherwise"
                if why:
                    self.counts[COMPARED] -= known.tokens
                    self.counts[why] += known.tokens
                    continue
                for one in known.kept:
                    together.setdefault((int(one.place[EVENT]), int(one.place[REQUEST])), []).append(one)
        self._compared.clear()
        for number, members in enumerate(together[key] for key in sorted(together)):
            yield self._finding(members, explained=number < _TRIED)

    def _explains(self, wrong: list[_Wrong]) -> bool:
        """Say whether most of a sample of what is wrong is another token or another position."""
        some = wrong[:: max(1, len(wrong) // _TRIED)][:_TRIED]
        return 2 * sum(bool(self._explain(one).cause.cause != "no_token") for one in some) > len(some)

    def _explain(self, one: _Wrong) -> _Explained:
        """Say what a slot holds instead."""
        ranks, position = self.history.header.ranks, int(one.place[POSITION])
        if len(self._layer.moves) == 2 or one.half not in self._layer.moves:
            token = self._layer.nearest_token(one.half, one.got, position, ranks)
            if token != one.token and self._is(one, token, position):
                return _Explained(
                    f"is that of token {token}, and not of {one.token}, which was fed",
                    Cause("holds_other_token", token=token, expected_token=one.token),
                )
        if one.half in self._layer.moves:
            near = np.arange(max(0, position - _NEAR), position + _NEAR + 1)
            there = self._layer.nearest_position(one.half, one.got, one.token, near, ranks)
            if self._is(one, one.token, there):
                return _Explained(
                    f"of token {one.token} is that of position {there}, and not of {position}",
                    Cause("holds_other_position", token=one.token, expected_token=one.token),
                )
        off = f"it is off by {one.off:.1%} of the largest value" if np.isfinite(one.off) else "it is NaN or infinity"
        words = f"of token {one.token} is nothing that the model gives: {off}"
        return _Explained(words, Cause("no_token", expected_token=one.token))

    def _is(self, one: _Wrong, token: int, position: int) -> bool:
        expected = self._expected(one.half, np.array([token]), np.array([position]), len(one.got))
        return not expected.differ(one.got[None], self._encoding(one.half))[0]

    def _finding(self, members: list[_Wrong], *, explained: bool) -> Finding:
        first, names = members[0], self.history.request_table
        words, cause = (
            self._explain(first)
            if explained
            else (f"of token {first.token} is not what the model gives", Cause("", expected_token=first.token))
        )
        place = first.place.tolist()
        return Finding(
            kind=self.kind,
            event=place[EVENT],
            forward=place[FORWARD],
            time_ns=place[TIME],
            runner=0,
            group=next(group for _, group, stream, _ in self._streams if stream.half == first.half),
            **of_request(names, place[REQUEST]),
            req_pool_idx=place[ROW],
            position=place[POSITION],
            slot=place[SLOT],
            detail=counted(f"{first.half} in the first layer {words}", len(members)),
            count=len(members),
            evidence=evidence(place[EVENT]),
            **cause._asdict(),
        )
