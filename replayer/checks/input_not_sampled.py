"""The model is fed a token that was not sampled: sampled(t) != input(t + 1).

Invariant: when a request samples a token for position p, the next forward of that request that takes position p is fed
that token. Evidence: the forward that sampled, the event that told of it where it came later (overlapped scheduling),
and the forward that was fed; no special sampler and no truth tokens are needed. Legitimate exceptions: a request that
starts over (retracted, resumed, forked) is fed the same tokens again and so still agrees; drafts are not samples, so
only the target runner is judged, and what a target-verify forward accepts is judged by the truth tokens instead.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ...recorder.reader import EventView
from ..findings import Finding
from ..forward import Forward, UnusableEventError
from ..slot_events import SampleEvent
from .batch_tokens import BatchTokens
from .check import HistoryCheck
from .history import History
from .reporting import input_finding
from .view import ForwardView

Int64Array = npt.NDArray[np.int64]

# Columns of what was sampled last for a row; the event that told of it + 1 is 0 where nothing is known.
_REQUEST, _POSITION, _TOKEN, _FORWARD, _TOLD = range(5)

# How many forwards back a sample event may reach: no engine overlaps that many.
MAX_LATE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fed:
    """A target forward that may yet be told what was sampled before it, or by it."""

    forward: Forward
    tokens: BatchTokens


class InputNotSampled(HistoryCheck):
    """Remembers the last token sampled for each row, and whose it was; and what the last forwards were fed."""

    judges = frozenset({"sample"})

    def __init__(self, history: History) -> None:
        self._history = history
        rows = max([1, *(table.rows for table in history.header.tables)])
        self._last: npt.NDArray[np.int64] = np.zeros((rows, 5), dtype=np.int64)
        self._fed: deque[_Fed] = deque(maxlen=MAX_LATE)

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each input token that is not the one sampled for its position."""
        forward = view.forward
        if forward.runner != 0 or not len(forward.req_pool_indices):
            return []
        tokens = self._history.tokens(view)
        findings = self._judge(forward, tokens)
        if len(forward.sampled_lens):
            self._remember(forward, forward.sampled_lens, forward.sampled_tokens, forward.event)
        self._fed.append(_Fed(forward=_slim_copy(forward), tokens=tokens))
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
        at = next((i for i, fed in enumerate(self._fed) if fed.forward.forward == event.forward), None)
        if at is None:
            return []
        sampler = self._fed[at].forward
        if len(event.lens) != len(sampler.req_pool_indices):
            raise UnusableEventError(
                f"sampled_lens has {len(event.lens)} entries, forward {event.forward} had "
                f"{len(sampler.req_pool_indices)} requests"
            )
        self._remember(sampler, event.lens, event.tokens, event.event)
        findings = []
        for fed in list(self._fed)[at + 1 :]:
            findings += self._judge(fed.forward, fed.tokens, only=event.event)
        return findings

    def forget(self) -> None:
        """Take every sampled token for unknown."""
        self._last = np.zeros(self._last.shape, dtype=np.int64)
        self._fed.clear()

    def _judge(self, forward: Forward, tokens: BatchTokens, *, only: int = -1) -> list[Finding]:
        """Compare what a forward was fed with what was sampled, as event `only` told it or any."""
        rows = forward.req_pool_indices[tokens.request]
        inside = (rows > 0) & (rows < len(self._last))
        last = self._last[np.where(inside, rows, 0)]
        due = inside & (last[:, _TOLD] > 0) & (last[:, _REQUEST] == forward.request_ids[tokens.request])
        due &= last[:, _POSITION] == tokens.position
        if only >= 0:
            due &= last[:, _TOLD] == only + 1
        fed = forward.input_ids[: len(rows)]
        wrong = np.flatnonzero(due & (fed != last[:, _TOKEN]))
        return [
            input_finding(
                "input_not_sampled",
                f"was fed token {fed[token]}, forward {last[token, _FORWARD]} sampled {last[token, _TOKEN]} for it",
                forward,
                tokens,
                int(token),
                self._history.book,
                [int(last[token, _TOLD]) - 1],
            )
            for token in wrong
        ]

    def _remember(self, forward: Forward, counts: Int64Array, sampled: Int64Array, event: int) -> None:
        rows = forward.req_pool_indices
        inside = (rows > 0) & (rows < len(self._last))
        # What was sampled by a later forward is news already.
        inside &= self._last[np.where(inside, rows, 0), _FORWARD] <= forward.forward
        if forward.mode == "target_verify":
            self._last[rows[inside], _TOLD] = 0
            return
        chosen = np.flatnonzero((counts > 0) & inside)
        ends = np.cumsum(counts)
        after = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        self._last[rows[chosen], _REQUEST] = forward.request_ids[chosen]
        self._last[rows[chosen], _POSITION] = (after + counts - 1)[chosen]
        self._last[rows[chosen], _TOKEN] = sampled[ends[chosen] - 1]
        self._last[rows[chosen], _FORWARD] = forward.forward
        self._last[rows[chosen], _TOLD] = event + 1


def _slim_copy(forward: Forward) -> Forward:
    """Return a forward without what keeps its batch of events in memory."""
    names = ("req_pool_indices", "request_ids", "prefix_lens", "extend_lens", "input_ids", "positions")
    nothing = np.empty(0, np.int64)
    return replace(
        forward,
        **{name: getattr(forward, name).copy() for name in names},
        out_cache_loc=tuple(slots.copy() for slots in forward.out_cache_loc[:1]),
        truth_lens=None,
        sampled_lens=nothing,
        sampled_tokens=nothing,
        kv_bytes=(),
    )
