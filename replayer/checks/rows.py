"""Forwards that run a request on a row that is not its own, or that go back behind its last forward."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from ...kernels.arrays import record_words
from ...kernels.constants import RECORD_POSITION, RECORD_TOKEN
from ...recorder.state.forward import Forward
from ...recorder.state.history import (
    ROW_END,
    ROW_EVENT,
    ROW_FAILED,
    ROW_PREFIX,
    ROW_SAMPLED_END,
    ROW_VERIFY,
    SAMPLE_POSITION,
    SAMPLE_REQUEST,
    STATUS_EVENT,
    STATUS_GIVEN,
    STATUS_REQUEST,
)
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, register
from .history import ForwardView, History

# A forward that is no such may compute the same positions again and again, as diffusion models do.
_DECODES: Final = ("decode", "target_verify")


@register
class RowReassigned(HistoryCheck):
    """A forward reads a row for a request that the row was not given to, or two entries of a batch have one row.

    A row that is taken back and given to another while a launched forward still reads it shows here; overlap's one extra
    forward of a finished request is recorded before the row is taken back. A row that stands twice is judged in every trace, and one
    that was taken back from the very request; the rest only if the trace promises to report every request's status.
    """

    kind = "row_reassigned"
    finds = "a forward reads a row for a request that the row was not given to"
    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._reported: dict[int, tuple[int, int]] = {}  # by row: the status event and the request reported last

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        yield from self._twice(view)
        yield from self._given_away(view)

    def _twice(self, view: ForwardView) -> Iterator[Finding]:
        """Yield a finding for each further entry of a batch that has a row which another has; a draft may have several."""
        rows = view.forward.req_pool_indices.tolist()
        if view.forward.runner or len(set(rows)) == len(rows):
            return
        for r, row in enumerate(rows):
            if row > 0 and row in rows[:r]:
                detail = f"has row {row}, which another entry of the same forward has"
                position = int(view.forward.prefix_lens[r])
                yield self.of_request(view.forward, r, detail, position=position, cause=Cause("same_forward"))

    def _given_away(self, view: ForwardView) -> Iterator[Finding]:
        forward, owners = view.forward, self.history.rows
        inside = owners.inside(forward) & (forward.request_ids >= 0)
        status = owners.status[np.where(inside, forward.req_pool_indices, 0)]
        wrong = inside & (status[:, STATUS_EVENT] > 0) & ~owners.given(forward)
        if not self.history.complete:
            wrong &= (status[:, STATUS_GIVEN] == 0) & (status[:, STATUS_REQUEST] == forward.request_ids)
        for r in np.flatnonzero(wrong).tolist():
            event, holder = int(status[r, STATUS_EVENT]), int(status[r, STATUS_REQUEST])
            row, key = int(forward.req_pool_indices[r]), (event, int(forward.request_ids[r]))
            if self._reported.get(row) == key:
                continue
            self._reported[row] = key
            verb, cause = "took back from", Cause("row_taken_back", holder)
            if status[r, STATUS_GIVEN]:
                verb, cause = "gave to", Cause("row_given_away", holder)
            detail = (
                f"reads row {row}, which event {event - 1} {verb} request {self.history.request_table.name(holder)}"
            )
            position = int(forward.prefix_lens[r])
            yield self.of_request(forward, r, detail, position=position, events=[event - 1], cause=cause)

    def forget(self) -> None:
        self._reported.clear()


@register
class SeqLenBackwards(HistoryCheck):
    """A target's forward starts behind the end of the request's last one without its having started over.

    A draft goes back to verify, and what a target-verify forward drafted and rejected was never length, nor is what a forward
    computed that failed. Who computes its last
    token once more, over itself, when nothing was sampled behind it, has lost nothing: a step's result was thrown away. If the trace does not
    promise to report retractions, a request may start over unseen: then a decode is judged whose request was reported to
    have its row, and else only two forwards that both sampled are compared, since a request has all its tokens when it samples.
    """

    kind = "seq_len_backwards"
    finds = "a request's length went back without its being retracted"
    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        history, forward = self.history, view.forward
        if forward.runner != 0 or not len(forward.req_pool_indices):
            return
        last, same = history.rows.same(forward)
        same = same & (forward.request_ids >= 0)
        end = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        least = np.where(last[:, ROW_VERIFY] == 0, last[:, ROW_END], last[:, ROW_PREFIX] + 1)
        least = np.where(last[:, ROW_VERIFY] == ROW_FAILED, last[:, ROW_PREFIX], least)
        back = same & (forward.prefix_lens < least)
        if not history.complete:
            sampled = forward.sampled_lens > 0 if len(forward.sampled_lens) else np.zeros(len(end), np.bool_)
            shorter = same & sampled & (end < last[:, ROW_SAMPLED_END]) & (last[:, ROW_VERIFY] == 0)
            back = shorter | (back & history.rows.given(forward) & (forward.mode in _DECODES))
        for r in np.flatnonzero(back).tolist():
            prefix = int(forward.prefix_lens[r])
            if prefix == least[r] - 1 and not self._sampled(forward, r, int(least[r])) and _once_more(view, r):
                continue
            detail = f"goes on from a prefix of {prefix} to {end[r]}; its forward before went from "
            detail += f"{last[r, ROW_PREFIX]} to {last[r, ROW_END]}"
            yield self.of_request(forward, r, detail, position=prefix, events=[int(last[r, ROW_EVENT]) - 1])

    def _sampled(self, forward: Forward, r: int, position: int) -> bool:
        """Say whether a token was sampled for a position of a request, and so taken."""
        known, row = self.history.samples.last, int(forward.req_pool_indices[r])
        mine = known[row] if 0 < row < len(known) else None
        return mine is not None and mine[SAMPLE_REQUEST] == forward.request_ids[r] and mine[SAMPLE_POSITION] >= position


def _once_more(view: ForwardView, r: int) -> bool:
    """Say whether request r of a forward computes first the very token that it computed last, into the slot that holds it."""
    forward, token = view.forward, int(np.maximum(view.forward.extend_lens[:r], 0).sum())
    if forward.extend_lens[r] < 1 or not view.groups or token >= len(forward.input_ids):
        return False
    for group in view.groups:
        slot = int(group.written[token]) if token < len(group.written) else -1
        if not 0 < slot < group.pool.num_slots:
            return False
        record = record_words(group.pool.pool.tail[group.pool.group.halves[0]], written=False)[slot]
        writer = int(group.pool.last_writers(np.array([slot]))[0][2])
        mine = int(record[RECORD_TOKEN]), int(record[RECORD_POSITION]), writer
        if mine != (int(forward.input_ids[token]), int(forward.prefix_lens[r]), int(forward.request_ids[r])):
            return False
    return True
