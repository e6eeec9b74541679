"""The model is fed a token that the scheduler does not have at that position.

Invariant: the input token at position p of a request is the truth token at p (p + 1 for an EAGLE draft), wherever the
scheduler knows that position already. Evidence: the forward's `input_ids` and the truth tokens recorded with it; the
canary's own token check sees the same only when a later forward reads the slot. Legitimate exceptions: positions past
what the scheduler has committed (drafted tokens, an overlapped step's own token) are not compared.
"""

import numpy as np

from ...recorder.reader import EventView
from ..findings import Finding
from ..requests import RequestBook
from ..tables import UNKNOWN_TOKEN
from .batch_tokens import batch_tokens, input_finding
from .view import ForwardView


class InputNotTruth:
    """Compares each forward's input tokens with the truth tokens."""

    def __init__(self, *, token_offsets: tuple[int, ...], book: RequestBook) -> None:
        self._token_offsets = token_offsets
        self._book = book

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each input token that contradicts the truth tokens."""
        forward, truth = view.forward, view.tables.truth
        if truth is None or forward.truth_lens is None:
            return []
        tokens = batch_tokens(forward)
        rows = forward.req_pool_indices[tokens.request]
        at = tokens.position + self._token_offsets[forward.runner]
        known = (at >= 0) & (at < np.minimum(forward.truth_lens[tokens.request], truth.shape[1]))
        known &= (rows > 0) & (rows < truth.shape[0])
        expected = np.full(len(at), UNKNOWN_TOKEN, dtype=np.int64)
        expected[known] = truth[rows[known], at[known]]
        fed = forward.input_ids[: len(at)]
        wrong = np.flatnonzero((expected != UNKNOWN_TOKEN) & (fed != expected))
        return [
            input_finding(
                "input_not_truth",
                f"was fed token {fed[token]}, the scheduler has {expected[token]} there",
                forward,
                tokens,
                int(token),
                self._book,
            )
            for token in wrong
        ]

    def event(self, view: EventView) -> list[Finding]:
        """Nothing but forwards is looked at."""
        return []

    def finish(self) -> list[Finding]:
        """Nothing is left to say at the end."""
        return []

    def forget(self) -> None:
        """Nothing is remembered here: the truth tokens are the state tables' own."""
