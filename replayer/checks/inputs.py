"""Tokens that the model was fed, or sampled, and that are not the request's: by its samples, its scheduler, its oracle."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.constants import UNKNOWN_TOKEN
from ...kernels.ops.oracle.own import HASH, load_oracle
from ...kernels.ops.oracle.reference import generalized_ids
from ...kernels.tokens import contradicting
from ...recorder.state.events import SampleEvent
from ...recorder.state.forward import BatchTokens, Forward
from ...recorder.state.history import (
    ROW_END,
    ROW_EVENT,
    ROW_REQUEST,
    SAMPLE_EVENT,
    SAMPLE_FORWARD,
    SAMPLE_POSITION,
    SAMPLE_REQUEST,
    SAMPLE_TOKEN,
)
from ...recorder.state.tables import look_up
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, register
from .history import ForwardView, History

_MOST_TOKENS: Final = 1 << 20  # kept of requests that were put back and wait
_MOST_PUT_BACK: Final = 1 << 16  # requests of which the last sampled token is kept meanwhile


class _InputCheck(HistoryCheck):
    def of_inputs(
        self,
        forward: Forward,
        tokens: BatchTokens,
        wrong: BoolArray,
        expected: Int64Array,
        *,
        last: Int64Array | None = None,
        before: Int64Array | None = None,
    ) -> Iterator[Finding]:
        """Find each token that is wrong, `[tokens] bool`.

        `expected` `[tokens] int64` is what belongs there; `last` are the rows of what was sampled, None if nothing was;
        `before` `[tokens] int64` is where that is known of the time before the request was put back: the event + 1.
        """
        for token in np.flatnonzero(wrong).tolist():
            fed, right, events = int(forward.input_ids[token]), int(expected[token]), []
            detail = f"was fed token {fed}, the scheduler has {right} there"
            if before is not None and before[token]:
                has = f"had {right} there" if right != UNKNOWN_TOKEN else "has none there, and had one"
                detail = f"was fed token {fed}, the scheduler {has} before the request was put back"
                events = [int(before[token]) - 1]
            if last is not None:
                detail = f"was fed token {fed}, forward {last[token, SAMPLE_FORWARD]} sampled {right} for it"
                events = [int(last[token, SAMPLE_EVENT]) - 1]
            yield self.of_request(
                forward,
                int(tokens.request[token]),
                detail,
                position=int(tokens.position[token]),
                slot=int(forward.out_cache_loc[0][token]) if forward.out_cache_loc else -1,
                events=events,
                cause=Cause(token=fed, expected_token=right),
            )


@register
class InputNotSampled(_InputCheck):
    """The model is fed a token that was not sampled: sampled(t) != input(t + 1).

    No special sampler and no truth tokens are needed. A request that was put back is fed what was sampled for it last, if no
    forward computes up to there again, and so samples anew: then a result may have been thrown away. Drafts are not samples, so only the target runner is judged; what a target-verify forward accepts is judged by
    the truth tokens instead; an unknown token (-1), fed or sampled, is compared with nothing.
    """

    kind = "input_not_sampled"
    finds = "the model was fed another token than the one sampled for that position"
    covered = Covered.COMPILED  # which stops where a request is put back, and where it runs again
    events = frozenset({"keyframe", "sample", "status"})

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._put_back: dict[int, Int64Array] = {}  # by request: what was sampled for it last, as in `LastSamples.last`

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        if view.forward.runner == 0 and len(view.forward.req_pool_indices):
            yield from self._judge(view.forward, self.history.tokens(view))

    def event(self, view: EventView) -> Iterator[Finding]:
        """Find each token that arrives late and that a later forward was fed wrongly; keep that of a request that is put back."""
        if view.kind == "keyframe":  # which holds none of these
            self._put_back.clear()
        elif view.kind == "status":
            self._keep(view)
        for fed in self.history.fed_since:
            yield from self._judge(fed.forward, fed.tokens, only=view.number)

    def requests_reported(self) -> set[int]:
        return super().requests_reported() | set(self._put_back)

    def forget(self) -> None:
        super().forget()
        self._put_back.clear()

    def _keep(self, view: EventView) -> None:
        request, status = int(view.scalar("request_id")), view.scalar("status")
        if status == "admitted":
            return
        self._put_back.pop(request, None)
        known = self.history.samples.last
        mine = known[(known[:, SAMPLE_EVENT] > 0) & (known[:, SAMPLE_REQUEST] == request)]
        if status == "retracted" and len(mine):
            self._put_back[request] = mine[np.argmax(mine[:, SAMPLE_FORWARD])].copy()
            if len(self._put_back) > _MOST_PUT_BACK:
                del self._put_back[next(iter(self._put_back))]

    def _fed_again(self, forward: Forward, tokens: BatchTokens, last: Int64Array) -> None:
        """Put what was sampled before a request was put back into `last`, of tokens; it is forgotten when a forward comes to it."""
        for r in np.flatnonzero(np.isin(forward.request_ids, [*self._put_back])).tolist():
            kept = self._put_back[int(forward.request_ids[r])]
            begin, position = int(forward.prefix_lens[r]), int(kept[SAMPLE_POSITION])
            end = begin + max(int(forward.extend_lens[r]), 0)
            if begin <= position < end:
                last[(tokens.request == r) & (tokens.position == position)] = kept
            if end >= position:
                del self._put_back[int(forward.request_ids[r])]

    def _judge(self, forward: Forward, tokens: BatchTokens, *, only: int = -1) -> Iterator[Finding]:
        """Compare what a forward was fed with what was sampled: all of it, or what event `only` reported."""
        known = self.history.samples.last
        rows = forward.req_pool_indices[tokens.request]
        inside = (rows > 0) & (rows < len(known))
        last = known[np.where(inside, rows, 0)]
        if self._put_back and only < 0:
            self._fed_again(forward, tokens, last)
        due = inside & (last[:, SAMPLE_EVENT] > 0) & (last[:, SAMPLE_REQUEST] == forward.request_ids[tokens.request])
        due &= last[:, SAMPLE_POSITION] == tokens.position
        if only >= 0:
            due &= last[:, SAMPLE_EVENT] == only + 1
        fed, sampled = forward.input_ids[: len(rows)], last[:, SAMPLE_TOKEN]
        due &= (fed != UNKNOWN_TOKEN) & (sampled != UNKNOWN_TOKEN)
        return self.of_inputs(forward, tokens, due & (fed != sampled), sampled, last=last)


@register
class InputNotTruth(_InputCheck):
    """The model is fed a token that the scheduler does not have at that position (the next one for an EAGLE draft).

    The canary's own token check sees the same only when a later forward reads the slot. Positions past what the scheduler
    has committed and unknown tokens (-1) are not compared, and of a token beyond 32 bits only those bits. A request that was
    put back is fed again what the scheduler had then, and the scheduler has it still: one that lost it is no witness.
    """

    kind = "input_not_truth"
    finds = "the model was fed a token that the scheduler does not have at that position"
    covered = Covered.COMPILED  # which stops where a request is put back, and where it runs again
    events = frozenset({"keyframe", "status"})

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._put_back: dict[int, tuple[int, Int64Array]] = {}  # by request: the event, and the tokens of its positions
        self._batch: TraceBatch | None = None
        self._first = 0  # the first event that may be looked at again

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        forward, truth = view.forward, view.tables.truth
        if truth is None or forward.truth_lens is None:
            return
        tokens = self.history.tokens(view)
        rows = forward.req_pool_indices[tokens.request]
        at = tokens.position + self.history.header.runners[forward.runner].token_offset
        stands, known = look_up(truth, rows, at)
        expected = np.where(known & (at < forward.truth_lens[tokens.request]), stands, UNKNOWN_TOKEN)
        wrong, before = contradicting(expected, forward.input_ids[: len(at)]), np.zeros(len(at), np.int64)
        if self._put_back and forward.runner == 0:
            had = np.full(len(at), UNKNOWN_TOKEN, np.int64)
            for r in np.flatnonzero(forward.req_pool_indices > 0).tolist():
                self._fed_again(forward, r, np.flatnonzero(tokens.request == r), at, had, before)
            gone = (had != UNKNOWN_TOKEN) & (at >= forward.truth_lens[tokens.request])
            other = (contradicting(had, forward.input_ids[: len(at)]) | gone) & ~wrong
            expected = np.where(other, np.where(gone, UNKNOWN_TOKEN, had), expected)
            wrong, before = wrong | other, np.where(other, before, 0)
        yield from self.of_inputs(forward, tokens, wrong, expected, before=before)

    def event(self, view: EventView) -> list[Finding]:
        """Keep the tokens of a request that is put back, and forget those of one that ends; no keyframe holds them."""
        if view.kind == "keyframe":
            self.forget()
            self._first = view.number
            return []
        request = int(view.scalar("request_id"))
        if view.scalar("status") == "retracted":
            self._keep(view, request)
        elif view.scalar("status") != "admitted":
            self._put_back.pop(request, None)
        return []

    def batch(self, batch: TraceBatch) -> None:
        self._batch = batch  # the next one may begin by putting a request back

    def requests_reported(self) -> set[int]:
        return super().requests_reported() | set(self._put_back)

    def forget(self) -> None:
        super().forget()
        self._put_back.clear()

    def _keep(self, view: EventView, request: int) -> None:
        """Keep the truth of the positions that a request has computed, as far as its last forward said that it is told."""
        self._put_back.pop(request, None)
        tables, last = self.history.tables, self.history.rows.last[0]
        truth = None if tables is None else tables.truth
        mine = np.flatnonzero((last[:, ROW_EVENT] > self._first) & (last[:, ROW_REQUEST] == request))
        if truth is None or not len(mine):
            return
        row = int(mine[np.argmax(last[mine, ROW_EVENT])])
        event, end = int(last[row, ROW_EVENT]) - 1, int(last[row, ROW_END])
        batch = view.batch if event >= view.batch.first_event else self._batch
        if batch is None or not batch.first_event <= event < batch.first_event + batch.num_events:
            return
        ran = batch.event(event - batch.first_event)
        lens, rows = ran.ints("truth_lens"), ran.ints("req_pool_indices")
        lens = lens[rows == row] if len(lens) == len(rows) else lens[:0]  # of a forward whose tokens nobody told
        if len(lens) == 1 and row < len(truth):
            self._put_back[request] = view.number, truth[row, : min(end, int(lens[0]))].astype(np.int64)
        while sum(len(tokens) for _, tokens in self._put_back.values()) > _MOST_TOKENS:
            del self._put_back[next(iter(self._put_back))]

    def _fed_again(
        self, forward: Forward, r: int, mine: Int64Array, at: Int64Array, had: Int64Array, before: Int64Array
    ) -> None:
        """Put what request r, if it was put back, had where its tokens `mine` are into `had`; it is forgotten behind the last."""
        request = int(forward.request_ids[r])
        event, kept = self._put_back.get(request, (0, had[:0]))
        mine = mine[(at[mine] >= 0) & (at[mine] < len(kept))]
        had[mine], before[mine] = kept[at[mine]], event + 1
        if forward.prefix_lens[r] + max(int(forward.extend_lens[r]), 0) >= len(kept):
            self._put_back.pop(request, None)


@register
class PositionNotPlace(HistoryCheck):
    """A request that has nothing in the cache is fed a token at another position than its place: 0, 1, 2 ...

    The canary asserts positions of what goes on from a record alone, and of others only when a later forward reads them.
    """

    kind = "position_not_place"
    finds = "a request with nothing in the cache was fed a token at another position than its place"
    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        forward = view.forward
        begins = (forward.prefix_lens == 0) & (forward.req_pool_indices > 0)
        if not begins.any():
            return
        tokens = self.history.tokens(view)
        fed = forward.positions[: len(tokens.request)]
        wrong = np.flatnonzero(begins[tokens.request] & (fed != tokens.position))
        for r in np.unique(tokens.request[wrong]).tolist():
            mine = wrong[tokens.request[wrong] == r]
            first = int(mine[0])
            place = int(tokens.position[first])
            detail = f"was fed position {int(fed[first])} for its token {place}"
            slot = int(forward.out_cache_loc[0][first]) if forward.out_cache_loc else -1
            yield self.of_request(forward, r, detail, position=place, slot=slot, count=len(mine))


@register
class OracleToken(HistoryCheck):
    """The target sampled another token than its oracle's, or was fed one at a position behind the prompt.

    Requests go by their room if they have one, else by their id. Not judged: requests of which nobody said how long the prompt
    is, unknown tokens (-1), several tokens sampled at once, which are accepted drafts. `counts` says how many were judged.
    """

    kind = "oracle_token"
    finds = "the engine sampled, or the model was fed, another token than the one that the oracle has for that position"
    covered = Covered.INCREMENTAL
    events = frozenset({"sample"})

    @classmethod
    def concerns(cls, header: TraceHeader) -> bool:
        return header.sampler is not None

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.counts = {"sampled": 0, "sampled_judged": 0, "fed_judged": 0}
        sampler = history.header.sampler
        name = history.oracle or HASH
        self._usable = sampler is not None and (sampler.name == HASH or bool(history.oracle))
        if self._usable and sampler is not None:
            self._tokens = load_oracle(HASH if sampler.name == HASH else name, sampler.vocab_size)

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        if view.forward.runner == 0 and len(view.forward.req_pool_indices):
            yield from self._fed(view)
            yield from self._sampled(view.forward, view.forward.sampled_lens, view.forward.sampled_tokens, ())

    def event(self, view: EventView) -> Iterator[Finding]:
        """Judge tokens that arrive late, in the forward that sampled them."""
        event = self.history.known
        if isinstance(event, SampleEvent):
            for fed in self.history.samples.fed:
                if fed.forward.forward == event.forward and len(fed.forward.req_pool_indices) == len(event.lens):
                    yield from self._sampled(fed.forward, event.lens, event.tokens, (view.number,))

    def _requests(self, forward: Forward) -> tuple[Int64Array, Int64Array, BoolArray]:
        """Return of each request `[bs]` its seed, its prompt's length, and whether that is known."""
        rooms, prompts, known = self.history.request_table.rooms_and_prompts(forward.request_ids)
        seeds = np.empty(len(forward.request_ids), np.int64)
        generalized_ids(request_ids=forward.request_ids, rooms=rooms, out=seeds)
        return seeds, prompts, known & (prompts >= 0)

    def _fed(self, view: ForwardView) -> Iterator[Finding]:
        forward, tokens = view.forward, self.history.tokens(view)
        seeds, prompts, known = self._requests(forward)
        fed, at = forward.input_ids[: len(tokens.request)], tokens.position
        judged = known[tokens.request] & (at >= prompts[tokens.request]) & (fed != UNKNOWN_TOKEN)
        found = self._wrong(judged, seeds[tokens.request], at, fed, "fed_judged")
        # The canary's own assert has a decode's in front of its row.
        asserted = self.history.header.oracle is not None and forward.mode == "decode"
        of_request = Counter(int(tokens.request[token]) for token, _ in found)
        for token, right in () if asserted else found:
            count = of_request.pop(int(tokens.request[token]), 0)
            if not count:  # the first of its request has said so
                continue
            detail = f"was fed token {int(fed[token])}, the oracle has {right} there"
            slot = int(forward.out_cache_loc[0][token]) if forward.out_cache_loc else -1
            cause = Cause(token=int(fed[token]), expected_token=right)
            request = int(tokens.request[token])
            place = int(at[token])
            yield self.of_request(forward, request, detail, count=count, cause=cause, position=place, slot=slot)

    def _sampled(
        self, forward: Forward, lens: Int64Array, sampled: Int64Array, events: tuple[int, ...]
    ) -> Iterator[Finding]:
        """Judge the tokens that a forward sampled, request by request."""
        if not len(lens):
            return
        self.counts["sampled"] += len(sampled)
        firsts = np.cumsum(lens) - lens
        one = lens == 1
        tokens = np.full(len(lens), UNKNOWN_TOKEN, np.int64)
        tokens[one] = sampled[firsts[one]]
        seeds, prompts, known = self._requests(forward)
        at = forward.prefix_lens + forward.extend_lens
        rows = (forward.req_pool_indices != 0) & known & (at >= prompts) & (tokens != UNKNOWN_TOKEN)
        for request, right in self._wrong(rows, seeds, at, tokens, "sampled_judged"):
            token = int(tokens[request])
            detail = f"sampled token {token}, the oracle has {right} for position {int(at[request])}"
            cause = Cause(token=token, expected_token=right)
            yield self.of_request(forward, request, detail, events=events, cause=cause, position=int(at[request]))

    def _wrong(
        self, judged: BoolArray, seeds: Int64Array, at: Int64Array, tokens: Int64Array, count: str
    ) -> list[tuple[int, int]]:
        """Return `(entry, the oracle's token)` of those judged `[n]` that have another, and count the judged."""
        entries = np.flatnonzero(judged)
        if not self._usable or not len(entries):
            return []
        self.counts[count] += len(entries)
        right = self._tokens(np.ascontiguousarray(seeds[entries]), np.ascontiguousarray(at[entries]))
        wrong = right != tokens[entries]
        return list(zip(entries[wrong].tolist(), right[wrong].tolist(), strict=True))
