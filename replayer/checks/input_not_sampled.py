"""The model is fed a token that was not sampled: sampled(t) != input(t + 1).

Invariant: when a request samples a token for position p, the next forward of that request that takes position p is fed
that token. Evidence: the forward that sampled, the event that told of it where it came later (overlapped scheduling),
and the forward that was fed; no special sampler and no truth tokens are needed. Legitimate exceptions: a request that
starts over (retracted, resumed, forked) is fed the same tokens again and so still agrees; drafts are not samples, so
only the target runner is judged, and what a target-verify forward accepts is judged by the truth tokens instead; an
unknown token (-1), fed or sampled, is compared with nothing.
"""

import numpy as np

from ...kernels.constants import UNKNOWN_TOKEN
from ...recorder.state.events import SampleEvent
from ...recorder.state.forward import BatchTokens, Forward
from ...recorder.state.history import SAMPLE_EVENT, SAMPLE_FORWARD, SAMPLE_POSITION, SAMPLE_REQUEST, SAMPLE_TOKEN
from ...recorder.trace.reader import EventView
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .reporting import input_finding
from .view import ForwardView


class InputNotSampled(HistoryCheck):
    """Compares what each target forward was fed with what was sampled last for its rows, and takes in what this one sampled."""

    covered = Covered.COMPILED
    judges = frozenset({"sample"})

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each input token that is not the one sampled for its position."""
        forward = view.forward
        if forward.runner != 0 or not len(forward.req_pool_indices):
            return []
        tokens = self._history.tokens(view)
        findings = self._judge(forward, tokens)
        self._history.samples.take_forward(forward, tokens)
        return findings

    def event(self, view: EventView) -> list[Finding]:
        """Learn tokens that arrive late; return a finding for each that a later forward was fed wrongly.

        Raises:
            UnusableEventError: they do not fit the forward that sampled them.
        """
        del view
        event = self._history.known
        if not isinstance(event, SampleEvent):
            return []
        findings = []
        for fed in self._history.samples.take_sample(event):
            findings += self._judge(fed.forward, fed.tokens, only=event.event)
        return findings

    def _judge(self, forward: Forward, tokens: BatchTokens, *, only: int = -1) -> list[Finding]:
        """Compare what a forward was fed with what was sampled, as event `only` told it or any."""
        known = self._history.samples.last
        rows = forward.req_pool_indices[tokens.request]
        inside = (rows > 0) & (rows < len(known))
        last = known[np.where(inside, rows, 0)]
        due = inside & (last[:, SAMPLE_EVENT] > 0) & (last[:, SAMPLE_REQUEST] == forward.request_ids[tokens.request])
        due &= last[:, SAMPLE_POSITION] == tokens.position
        if only >= 0:
            due &= last[:, SAMPLE_EVENT] == only + 1
        fed = forward.input_ids[: len(rows)]
        due &= (fed != UNKNOWN_TOKEN) & (last[:, SAMPLE_TOKEN] != UNKNOWN_TOKEN)
        wrong = np.flatnonzero(due & (fed != last[:, SAMPLE_TOKEN]))
        return [
            input_finding(
                "input_not_sampled",
                f"was fed token {fed[token]}, forward {last[token, SAMPLE_FORWARD]} sampled {last[token, SAMPLE_TOKEN]} for it",
                forward,
                tokens,
                int(token),
                self._history.request_table,
                Cause(token=int(fed[token]), expected_token=int(last[token, SAMPLE_TOKEN])),
                [int(last[token, SAMPLE_EVENT]) - 1],
            )
            for token in wrong
        ]
