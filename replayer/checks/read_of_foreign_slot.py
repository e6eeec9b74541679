"""A forward reads a slot that now belongs to another request alone, or was given out anew since it read it last.

Invariant: what a request reads is its own, shared with it, or the prefix cache's; and a slot that it goes on reading is
not given out meanwhile. This is the use after free once the slot has been given out again, and the table row that
points into another request. Evidence: the allocation that made it the other's, the event before it that freed it, its
last write, and the forward. Legitimate exceptions: prefix hits and forks join slots (status "shared"); what is in the
prefix cache is everybody's (status "cached"); who was retracted and resumes reads anew. Judged only where the trace
promises to tell of every slot, since an untold hand-over would excuse it.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.ledger import ALLOC, OWNER, READ_FOREIGN, READ_RECYCLED
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import Repeats, happened, held_by, read_findings
from .view import ForwardView


class ReadOfForeignSlot(HistoryCheck):
    """Looks at every prefix slot."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._repeats = Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that reads others' slots it was not reported for already."""

        def explain(row: npt.NDArray[np.int64], entry: int) -> tuple[str, Iterable[int], Cause]:
            if not judged.read_bits[np.searchsorted(judged.reads, entry)] & READ_FOREIGN:
                anew = f"goes on reading a slot that was given out anew in event {row[ALLOC] - 1}"
                return anew, happened(row), Cause("given_out_anew")
            owner = history.request_table.name(int(row[OWNER]))
            return f"reads a slot that is request {owner}'s since event {row[ALLOC] - 1}", happened(row), held_by(row)

        history, findings, bits = self._history, [], READ_FOREIGN | READ_RECYCLED
        for judged in history.judge(view):
            findings += read_findings("read_of_foreign_slot", view, judged, bits, history, self._repeats, explain)
        return findings

    def forget(self) -> None:
        """Forget what was reported."""
        self._repeats.forget()
