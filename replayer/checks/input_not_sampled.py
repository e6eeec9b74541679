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
from ...recorder.state.batch_tokens import BatchTokens
from ...recorder.state.forward import Forward
from ...recorder.state.sample_book import FORWARD, POSITION, REQUEST, TOKEN, TOLD
from ...recorder.state.slot_events import SampleEvent
from ...recorder.trace.reader import EventView
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .reporting import input_finding
from .view import ForwardView


class InputNotSampled(HistoryCheck):
    """Compares what each target forward was fed with what was sampled last for its rows, and moves that book on."""

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
        book = self._history.samples.last
        rows = forward.req_pool_indices[tokens.request]
        inside = (rows > 0) & (rows < len(book))
        last = book[np.where(inside, rows, 0)]
        due = inside & (last[:, TOLD] > 0) & (last[:, REQUEST] == forward.request_ids[tokens.request])
        due &= last[:, POSITION] == tokens.position
        if only >= 0:
            due &= last[:, TOLD] == only + 1
        fed = forward.input_ids[: len(rows)]
        due &= (fed != UNKNOWN_TOKEN) & (last[:, TOKEN] != UNKNOWN_TOKEN)
        wrong = np.flatnonzero(due & (fed != last[:, TOKEN]))
        return [
            input_finding(
                "input_not_sampled",
                f"was fed token {fed[token]}, forward {last[token, FORWARD]} sampled {last[token, TOKEN]} for it",
                forward,
                tokens,
                int(token),
                self._history.book,
                Cause(token=int(fed[token]), expected_token=int(last[token, TOKEN])),
                [int(last[token, TOLD]) - 1],
            )
            for token in wrong
        ]
