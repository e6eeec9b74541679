"""What a token's V in a first layer is: the same wherever the token stands, under one adapter and one set of weights. Its K
there is the same where it stands at the same position, and follows from its K at others.

So a trace is its own oracle, without a model. It is asked a file at a time, and how far equal tokens' bytes differ where nothing is
wrong (another batch, another kernel) is learnt from the file itself: from repeats at another position behind another token, since
a prompt that comes again has the same bytes also where V follows from more than the token.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.state.requests import Identity, RequestTable
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.schema import IDENTITY_KINDS
from ..model.repeats import EQUAL, Difference, Repeats
from ..model.turns import TURNED, Misturned, Turns
from ..model.written import (
    EVENT,
    FORWARD,
    NEEDED,
    POSITION,
    REQUEST,
    ROW,
    SLOT,
    TIME,
    TOKEN_BITS,
    forward_tokens,
    written_tokens,
)
from ..report.findings import NO_ADAPTER, Cause, Finding, counted, evidence, of_request
from .check import Covered, HistoryCheck, register
from .history import History

_K_MOST: Final = 0.25  # of the largest value in the row, or in most rows


@register
class TokenBytes(HistoryCheck):
    """A token was written with other bytes than the last time, in a first layer, under the same adapter and weights.

    V follows from the token alone: a request that is computed with another's adapter, or by weights that have been replaced,
    leaves records, hashes and tables right, and shows nowhere else. Where V does so, K follows from token and position: what
    differs in K alone was rotated by something else than its position, as is what does not go with the token's K at other
    positions, by angles that nearly all tokens show, and what a forward computed of a request as if it stood elsewhere.
    Judged are requests that declare their adapter and no media; where no request declares any, only what is turned as at
    another position. And only in a file whose repeats at other positions, behind other tokens, show that the engine computes
    so: at least 32, seven of ten alike. Bytes that change for good are not judged: weights and adapters may be loaded anew,
    unseen; nor, where requests do not declare their weights, a forward of which all tokens differ.
    """

    kind = "token_bytes"
    finds = "a forward wrote other bytes for a token than were written for it before, with the same adapter and weights"
    covered = Covered.COMPILED  # it is given whole batches

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._streams: dict[tuple[int, int], Repeats] = {}
        self._turns: dict[tuple[int, int], Turns] = {}
        self._identities: dict[tuple[int, int | None], int] = {}
        self._weights_known: set[int] = set()
        self._declared = False

    def batch(self, batch: TraceBatch) -> None:
        header, table = self.history.header, self.history.request_table
        if header.tokens != "plain":
            return
        if self._declared != bool(table.declared):  # what was remembered was under adapters that nobody has told
            self._declared = bool(table.declared)
            self._streams.clear()
            self._turns.clear()
        identity_of = partial(self._identity_of, table) if self._declared else _nobodys
        for runner, known in enumerate(header.runners):
            judged = {
                number: (group, stream)
                for number, (group, stream) in enumerate(header.streams(runner))
                if stream.half in ("K", "V")
                and not stream.samples
                and stream.layer_of(0) == 0
                and stream.dtype in EQUAL
                and not NEEDED & set(known.derived)
            }
            given = forward_tokens(batch, header, runner, identity_of) if judged else None
            if given is None:
                continue
            for number, (group, stream) in judged.items():
                written = written_tokens(given, header, runner, number, header.groups[group].table)
                first = stream.capture_bytes // max(1, len(stream.layers))  # what follows is other layers'
                written = written._replace(data=np.ascontiguousarray(written.data[:, :first]))
                begun = Repeats.begin(stream.half, stream.dtype, written)
                self._streams.setdefault((runner, number), begun).compare(written)
                if stream.half == "K" and stream.dtype in TURNED:
                    self._turns.setdefault((runner, number), Turns(stream.dtype)).add(written)

    def ends(self) -> Iterator[Finding]:
        """Judge a file by what it has shown, and forget it."""
        for (runner, number), stream in self._streams.items():
            if stream.half == "V":
                limit = stream.limit()
                if limit is not None:
                    if self._declared:
                        yield from self._judge(runner, number, stream, limit, stream)
                    if limit <= _K_MOST:  # else nearly all repeats differ: V follows from more than the token
                        yield from self._judge_k(runner, number, stream)
        self._streams.clear()
        self._turns.clear()

    def _judge_k(self, runner: int, number: int, v: Repeats) -> Iterator[Finding]:
        """Judge the K that was written beside a V that follows from the token alone."""
        streams = self.history.header.streams(runner)
        for other, (group, _) in enumerate(streams):
            k = self._streams.get((runner, other))
            if k is None or k.half == "V" or group != streams[number][0]:
                continue
            # Where V differs, too, all of the token was computed otherwise.
            otherwise = {(one.identity, one.place[EVENT]) for one in v.found}
            k.found = [one for one in k.found if (one.identity, one.place[EVENT]) not in otherwise]
            limit, said = k.limit(), set[tuple[int, int]]()
            if self._declared and limit is not None and not k.chosen_by_length(max(limit, _K_MOST)):
                for finding in self._judge(runner, other, k, max(limit, _K_MOST), v):
                    said.add((finding.event, finding.request_id))
                    yield finding
            turns = self._turns.get((runner, other))
            off: dict[tuple[int, int], list[Misturned]] = {}
            for one in turns.tell() if turns is not None else ():
                differs = Difference(one.much, one.place, one.before, one.key, among_right=True)
                place = one.place[EVENT], one.place[REQUEST]
                if one.as_at < 0 and not self._declared:  # an adapter that nobody has told of may have K of its own
                    continue
                if (differs.identity, one.place[EVENT]) not in otherwise and place not in said and v.spans(differs):
                    off.setdefault(place, []).append(one)
            for members in off.values():
                yield self._turned(runner, group, members)

    def _turned(self, runner: int, group: int, members: list[Misturned]) -> Finding:
        """Return what is said of tokens of a request's forward whose K is not turned by their positions."""
        one = members[0]
        token, at = (
            one.key & (1 << TOKEN_BITS) - 1,
            f"as it is at position {one.as_at}" if one.as_at >= 0 else "as at none",
        )
        show = "nearly all tokens"
        if one.alike:
            show = "tokens that were turned alike"
            at += f", {one.as_at - one.place[POSITION]:+} like {one.alike - 1} more tokens beside it"
        detail = (
            f"wrote K of token {token} at position {one.place[POSITION]} {at}, by that of {one.others} other positions and the angles that "
            f"{show} show, off by {one.much:.0%}"
        )
        return self._finding(
            runner, group, one.place, one.before, Cause("rotated", one.before[REQUEST], token), detail, len(members)
        )

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

    def _no_adapter(self, members: list[Difference]) -> str:
        """Return why what a forward computed otherwise of a request shows no other adapter and no other weights, "" if it may."""
        if any(one.partly for one in members):
            return NO_ADAPTER[0]
        has_adapters = any(adapter for adapter, _ in self._identities)
        return NO_ADAPTER[1] if not has_adapters and any(one.among_right for one in members) else ""

    def _same_weights(self, one: Difference, *streams: Repeats) -> bool:
        """Say whether other tokens show that weights and adapter were not replaced between the two places of what differs."""
        return all(s.spans(one) for s in streams) and (one.identity in self._weights_known or one.among_right)

    def _judge(self, runner: int, number: int, stream: Repeats, limit: float, v: Repeats) -> Iterator[Finding]:
        together: dict[tuple[int, int], list[Difference]] = {}
        for one in stream.found:
            # Else nothing shows that weights and adapter were those of before, or those of K alone were not.
            if one.much > limit and self._same_weights(one, v, stream):
                together.setdefault((one.place[EVENT], one.place[REQUEST]), []).append(one)
        names = self.history.request_table
        for members in together.values():
            much, place, before, key, *_ = members[0]
            rotated = stream.half == "K"
            token = key & (1 << stream.token_bits) - 1
            detail = (
                f"wrote {'K of ' if rotated else ''}token {token} with other bytes than request {names.name(before[REQUEST])} in forward "
                f"{before[FORWARD]}{' at this position' if rotated else ''}, by {much:.0%} of the largest value; of {stream.pairs:,} repeats "
                f"{'there' if rotated else 'elsewhere'} {stream.beyond(limit):,} do"
            )
            why = "rotated" if rotated else self._no_adapter(members)
            cause = Cause(why, before[REQUEST], token)
            group = self.history.header.streams(runner)[number][0]
            yield self._finding(runner, group, place, before, cause, detail, len(members))

    def _finding(
        self, runner: int, group: int, place: list[int], before: list[int], cause: Cause, detail: str, count: int
    ) -> Finding:
        return Finding(
            kind=self.kind,
            event=place[EVENT],
            forward=place[FORWARD],
            time_ns=place[TIME],
            runner=runner,
            group=group,
            **of_request(self.history.request_table, place[REQUEST]),
            req_pool_idx=place[ROW],
            position=place[POSITION],
            slot=place[SLOT],
            detail=counted(detail, count),
            count=count,
            evidence=evidence([before[EVENT]], place[EVENT]),
            **cause._asdict(),
        )


def _nobodys(ids: Int64Array, _events: Int64Array) -> Int64Array:
    """Return one identity for all requests, which have declared none."""
    return np.zeros_like(ids)
