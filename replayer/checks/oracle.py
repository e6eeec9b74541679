"""Tokens that are not those which the engine's oracle foretold: sampled, or fed where nothing else would see it."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.constants import UNKNOWN_TOKEN
from ...kernels.ops.oracle.own import HASH, load_oracle
from ...kernels.ops.oracle.reference import generalized_ids
from ...recorder.state.events import SampleEvent
from ...recorder.state.forward import Forward
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, register
from .history import ForwardView, History


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
