"""Tokens that the model is fed and that are not the request's."""

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.constants import UNKNOWN_TOKEN
from ...kernels.tokens import contradicting
from ...recorder.state.events import SampleEvent
from ...recorder.state.forward import BatchTokens, Forward
from ...recorder.state.history import SAMPLE_EVENT, SAMPLE_FORWARD, SAMPLE_POSITION, SAMPLE_REQUEST, SAMPLE_TOKEN
from ...recorder.trace.reader import EventView
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, register
from .view import ForwardView


class _InputCheck(HistoryCheck):
    """Compares what forwards were fed with what they should have been fed."""

    def of_tokens(
        self, forward: Forward, tokens: BatchTokens, wrong: BoolArray, expected: Int64Array, last: Int64Array | None
    ) -> list[Finding]:
        """Return a finding for each token that is wrong, `[tokens] bool`.

        `expected` `[tokens] int64` is what belongs there; `last` are the rows of what was sampled, None if nothing was.
        """
        findings = []
        for token in np.flatnonzero(wrong).tolist():
            fed, right = int(forward.input_ids[token]), int(expected[token])
            detail = f"was fed token {fed}, the scheduler has {right} there"
            if last is not None:
                detail = f"was fed token {fed}, forward {last[token, SAMPLE_FORWARD]} sampled {right} for it"
            findings.append(
                self.of_request(
                    forward,
                    int(tokens.request[token]),
                    detail,
                    position=int(tokens.position[token]),
                    slot=int(forward.out_cache_loc[0][token]) if forward.out_cache_loc else -1,
                    events=() if last is None else [int(last[token, SAMPLE_EVENT]) - 1],
                    cause=Cause(token=fed, expected_token=right),
                )
            )
        return findings


@register
class InputNotSampled(_InputCheck):
    """The model is fed a token that was not sampled: sampled(t) != input(t + 1).

    Invariant: when a request samples a token for position p, the next forward of that request that takes position p is fed
    that token. Evidence: the forward that sampled, the event that reported it if it came later (overlapped scheduling),
    and the forward that was fed; no special sampler and no truth tokens are needed. Legitimate exceptions: a request that
    starts over (retracted, resumed, forked) is fed the same tokens again and so still agrees; drafts are not samples, so
    only the target runner is judged, and what a target-verify forward accepts is judged by the truth tokens instead; an
    unknown token (-1), fed or sampled, is compared with nothing.
    """

    kind = "input_not_sampled"
    finds = "the model was fed another token than the one sampled for that position"
    covered = Covered.COMPILED
    events = frozenset({"sample"})

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each input token that is not the one sampled for its position; note what is sampled."""
        forward = view.forward
        if forward.runner != 0 or not len(forward.req_pool_indices):
            return []
        tokens = self.history.tokens(view)
        findings = self._judge(forward, tokens)
        self.history.samples.apply_forward(forward, tokens)
        return findings

    def event(self, view: EventView) -> list[Finding]:
        """Learn tokens that arrive late; return a finding for each that a later forward was fed wrongly.

        Raises:
            UnusableEventError: they do not fit the forward that sampled them.
        """
        event = self.history.known
        if not isinstance(event, SampleEvent):
            return []
        fed = self.history.samples.apply_sample(event)
        return [finding for one in fed for finding in self._judge(one.forward, one.tokens, only=event.event)]

    def _judge(self, forward: Forward, tokens: BatchTokens, *, only: int = -1) -> list[Finding]:
        """Compare what a forward was fed with what was sampled: all of it, or what event `only` reported."""
        known = self.history.samples.last
        rows = forward.req_pool_indices[tokens.request]
        inside = (rows > 0) & (rows < len(known))
        last = known[np.where(inside, rows, 0)]
        due = inside & (last[:, SAMPLE_EVENT] > 0) & (last[:, SAMPLE_REQUEST] == forward.request_ids[tokens.request])
        due &= last[:, SAMPLE_POSITION] == tokens.position
        if only >= 0:
            due &= last[:, SAMPLE_EVENT] == only + 1
        fed, sampled = forward.input_ids[: len(rows)], last[:, SAMPLE_TOKEN]
        due &= (fed != UNKNOWN_TOKEN) & (sampled != UNKNOWN_TOKEN)
        return self.of_tokens(forward, tokens, due & (fed != sampled), sampled, last)


@register
class InputNotTruth(_InputCheck):
    """The model is fed a token that the scheduler does not have at that position.

    Invariant: the input token at position p of a request is the truth token at p (p + 1 for an EAGLE draft), if the
    scheduler knows that position already. Evidence: the forward's `input_ids` and the truth tokens recorded with it; the
    canary's own token check sees the same only when a later forward reads the slot. Legitimate exceptions: positions past
    what the scheduler has committed (drafted tokens, an overlapped step's own token) are not compared; nor are unknown
    tokens (-1), and of a token beyond 32 bits only those.
    """

    kind = "input_not_truth"
    finds = "the model was fed a token that the scheduler does not have at that position"
    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each input token that contradicts the truth tokens."""
        forward, truth = view.forward, view.tables.truth
        if truth is None or forward.truth_lens is None:
            return []
        tokens = self.history.tokens(view)
        rows = forward.req_pool_indices[tokens.request]
        at = tokens.position + self.history.header.runners[forward.runner].token_offset
        known = (at >= 0) & (at < np.minimum(forward.truth_lens[tokens.request], truth.shape[1]))
        known &= (rows > 0) & (rows < truth.shape[0])
        expected = np.full(len(at), UNKNOWN_TOKEN, dtype=np.int64)
        expected[known] = truth[rows[known], at[known]]
        wrong = contradicting(expected, forward.input_ids[: len(at)])
        return self.of_tokens(forward, tokens, wrong, expected, None)
