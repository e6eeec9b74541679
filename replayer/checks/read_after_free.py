"""A forward reads a slot that is free.

Invariant: every prefix slot that a forward reads is held by a request or by the prefix cache. Evidence: the
allocation, the event that freed the slot, its last write, and the forward. Legitimate exceptions: none where events
stand in the order of their launches: a forward launched before a free (overlap's one extra forward of a finished
request) is told before it. Judged only where the trace promises to tell of every slot, since an untold allocation
would excuse it.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.ledger import LEFT, OWNER, READ_FREE
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import Repeats, happened, read_findings
from .view import ForwardView


class ReadAfterFree(HistoryCheck):
    """Looks at every prefix slot."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._repeats = Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that reads free slots it was not reported for already."""

        def explain(row: npt.NDArray[np.int64], _: int) -> tuple[str, Iterable[int], Cause]:
            if not row[LEFT]:
                return "reads a slot that was never given out", happened(row), Cause("never_given_out")
            owner = f" by request {history.request_table.name(int(row[OWNER]))}" if row[OWNER] >= 0 else ""
            return (
                f"reads a slot that is free since event {row[LEFT] - 1}, held before{owner or ' by nobody'}",
                happened(row),
                Cause("free", max(-1, int(row[OWNER]))),
            )

        history, findings = self._history, []
        for judged in history.judge(view):
            findings += read_findings("read_after_free", view, judged, READ_FREE, history, self._repeats, explain)
        return findings

    def forget(self) -> None:
        """Forget what was reported."""
        self._repeats.forget()
