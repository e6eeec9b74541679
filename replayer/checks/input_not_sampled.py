"""The model is fed a token that was not sampled: sampled(t) != input(t + 1).

Invariant: when a request samples a token for position p, the next forward of that request that takes position p is fed
that token. Evidence: the forward that sampled and the forward that was fed, both in the trace; no special sampler and
no truth tokens are needed. Legitimate exceptions: a request that starts over (retracted, resumed, forked) is fed the
same tokens again and so still agrees; drafts are not samples, so only the target runner is judged, and what a
target-verify forward accepts is judged by the truth tokens instead.
"""

import numpy as np
import numpy.typing as npt

from ...recorder.reader import EventView
from ..findings import Finding
from ..forward import Forward
from ..requests import RequestBook
from ..tables import StateTables
from .batch_tokens import batch_tokens, input_finding
from .view import ForwardView

_REQUEST, _POSITION, _TOKEN, _FORWARD = range(4)
_NOTHING = (-1, -1, -1, -1)


class InputNotSampled:
    """Remembers the last token sampled for each row, and whose it was."""

    def __init__(self, *, token_offsets: tuple[int, ...], book: RequestBook) -> None:
        del token_offsets
        self._book = book
        self._last: npt.NDArray[np.int64] = np.full((0, 4), -1, dtype=np.int64)

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each input token that is not the one sampled for its position."""
        forward, tables = view.forward, view.tables
        self._make_room(tables)
        if not len(self._last):
            return []
        findings = self._judge(forward) if forward.runner == 0 else []
        self._remember(forward)
        return findings

    def event(self, view: EventView) -> list[Finding]:
        """Nothing but forwards is looked at."""
        return []

    def finish(self) -> list[Finding]:
        """Nothing is left to say at the end."""
        return []

    def forget(self) -> None:
        """Take every sampled token for unknown."""
        self._last[:] = _NOTHING

    def _make_room(self, tables: StateTables) -> None:
        rows = max((len(table) for table in tables.req_to_token), default=0)
        if rows > len(self._last):
            self._last = np.full((rows, 4), -1, dtype=np.int64)

    def _judge(self, forward: Forward) -> list[Finding]:
        tokens = batch_tokens(forward)
        rows = forward.req_pool_indices[tokens.request]
        inside = (rows > 0) & (rows < len(self._last))
        last = self._last[np.where(inside, rows, 0)]
        same = inside & (last[:, _REQUEST] == forward.request_ids[tokens.request])
        due = same & (last[:, _POSITION] == tokens.position)
        fed = forward.input_ids[: len(rows)]
        wrong = np.flatnonzero(due & (fed != last[:, _TOKEN]))
        return [
            input_finding(
                "input_not_sampled",
                f"was fed token {fed[token]}, forward {last[token, _FORWARD]} sampled {last[token, _TOKEN]} for it",
                forward,
                tokens,
                int(token),
                self._book,
            )
            for token in wrong
        ]

    def _remember(self, forward: Forward) -> None:
        counts = forward.sampled_lens
        if forward.runner != 0 or not len(counts):
            return
        if forward.mode == "target_verify":
            rows = forward.req_pool_indices
            self._last[rows[(rows > 0) & (rows < len(self._last))]] = _NOTHING
            return
        ends = np.cumsum(counts)
        rows = forward.req_pool_indices
        chosen = np.flatnonzero((counts > 0) & (rows > 0) & (rows < len(self._last)))
        after = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        self._last[rows[chosen], _REQUEST] = forward.request_ids[chosen]
        self._last[rows[chosen], _POSITION] = (after + counts - 1)[chosen]
        self._last[rows[chosen], _TOKEN] = forward.sampled_tokens[ends[chosen] - 1]
        self._last[rows[chosen], _FORWARD] = forward.forward
