"""The model is fed a token that the scheduler does not have at that position.

Invariant: the input token at position p of a request is the truth token at p (p + 1 for an EAGLE draft), wherever the
scheduler knows that position already. Evidence: the forward's `input_ids` and the truth tokens recorded with it; the
canary's own token check sees the same only when a later forward reads the slot. Legitimate exceptions: positions past
what the scheduler has committed (drafted tokens, an overlapped step's own token) are not compared; nor are unknown
tokens (-1), and of a token beyond 32 bits only those.
"""

import numpy as np

from ...kernels.constants import UNKNOWN_TOKEN
from ...kernels.tokens import contradicting
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import input_finding
from .view import ForwardView


class InputNotTruth(HistoryCheck):
    """Compares each forward's input tokens with the truth tokens, which are the state tables' own."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._token_offsets = tuple(runner.token_offset for runner in history.header.runners)

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each input token that contradicts the truth tokens."""
        forward, truth = view.forward, view.tables.truth
        if truth is None or forward.truth_lens is None:
            return []
        tokens = self._history.tokens(view)
        rows = forward.req_pool_indices[tokens.request]
        at = tokens.position + self._token_offsets[forward.runner]
        known = (at >= 0) & (at < np.minimum(forward.truth_lens[tokens.request], truth.shape[1]))
        known &= (rows > 0) & (rows < truth.shape[0])
        expected = np.full(len(at), UNKNOWN_TOKEN, dtype=np.int64)
        expected[known] = truth[rows[known], at[known]]
        fed = forward.input_ids[: len(at)]
        wrong = np.flatnonzero(contradicting(expected, fed))
        return [
            input_finding(
                "input_not_truth",
                f"was fed token {fed[token]}, the scheduler has {expected[token]} there",
                forward,
                tokens,
                int(token),
                self._history.request_table,
                Cause(token=int(fed[token]), expected_token=int(expected[token])),
            )
            for token in wrong
        ]
