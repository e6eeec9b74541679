"""A forward reads a row for a request that the row was not given to.

Invariant: a forward's row belongs, by the last status told of it, to the request that the forward runs, and no two
entries of a batch have one row. A row that is
taken back and given to another while a launched forward still reads it shows here. Evidence: the status event that
gave the row away and the forward. Legitimate exceptions: overlap's one extra forward of a finished request is launched,
and so told, before the row is taken back. A row that stands twice is judged in every trace, the rest only where the trace
promises to tell of every request's status.
"""

import numpy as np

from ...recorder.state.history import STATUS_EVENT, STATUS_GIVEN, STATUS_REQUEST
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import forward_finding
from .view import ForwardView


class RowReassigned(HistoryCheck):
    """Compares each forward's rows with what the status events gave out."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._told: dict[int, tuple[int, int]] = {}  # by row: the status event and the request reported last

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request whose row is not its own."""
        history, forward = self._history, view.forward
        findings = self._twice(view)
        if not history.complete:
            return findings
        owners = history.rows
        inside = owners.inside(forward) & (forward.request_ids >= 0)
        status = owners.status[np.where(inside, forward.req_pool_indices, 0)]
        wrong = inside & (status[:, STATUS_EVENT] > 0)
        wrong &= (status[:, STATUS_GIVEN] == 0) | (status[:, STATUS_REQUEST] != forward.request_ids)
        return findings + [
            self._finding(view, int(r), status[r].tolist()) for r in np.flatnonzero(wrong) if self._new(view, r, status)
        ]

    def _twice(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each further entry of a batch that has a row which another has; a draft may have several."""
        forward = view.forward
        rows = forward.req_pool_indices.tolist()
        if forward.runner or len(set(rows)) == len(rows):
            return []
        return [
            forward_finding(
                "row_reassigned",
                forward,
                self._history.request_table,
                request=r,
                group=-1,
                position=int(forward.prefix_lens[r]),
                slot=-1,
                detail=f"has row {row}, which another entry of the same forward has",
                cause=Cause("same_forward"),
            )
            for r, row in enumerate(rows)
            if row > 0 and row in rows[:r]
        ]

    def _new(self, view: ForwardView, r: "np.intp", status: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> bool:
        row, key = (
            int(view.forward.req_pool_indices[r]),
            (int(status[r, STATUS_EVENT]), int(view.forward.request_ids[r])),
        )
        known = self._told.get(row) == key
        self._told[row] = key
        return not known

    def _finding(self, view: ForwardView, request: int, status: list[int]) -> Finding:
        forward, name = view.forward, self._history.request_table.name(status[STATUS_REQUEST])
        if status[STATUS_GIVEN]:
            detail = f"reads row {forward.req_pool_indices[request]}, which event {status[STATUS_EVENT] - 1} gave to request {name}"
        else:
            detail = (
                f"reads row {forward.req_pool_indices[request]}, which event {status[STATUS_EVENT] - 1} took back from "
                f"request {name}"
            )
        return forward_finding(
            "row_reassigned",
            forward,
            self._history.request_table,
            request=request,
            group=-1,
            position=int(forward.prefix_lens[request]),
            slot=-1,
            detail=detail,
            events=[status[STATUS_EVENT] - 1],
            cause=Cause("row_given_away" if status[STATUS_GIVEN] else "row_taken_back", status[STATUS_REQUEST]),
        )

    def forget(self) -> None:
        """Forget what was reported."""
        self._told.clear()
