"""A forward reads a slot that nobody has written since it was given out.

Invariant: a prefix slot was written, copied to or filled by a transfer after its last allocation, by an earlier
forward. A prefix hit in the very forward that is still writing the content, a failed load-back or transfer that is
taken for done, and a prefix that counts tokens never computed show here. Evidence: the allocation, the write before it
if there was one, and the forward. Legitimate exceptions: a load-back's and a fork's copy count as writing. Where the
trace does not promise to tell of every slot, only two cases are judged: another request of the same forward writes the
slot, and a slot given out afresh to another request still has the content from before.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.ledger import ALLOC, BEING_WRITTEN, CONTENT, NEVER_WRITTEN
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import Repeats, happened, read_findings
from .view import ForwardView


class HitNeverWritten(HistoryCheck):
    """Looks at every prefix slot."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._repeats = Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that reads unwritten slots it was not reported for already."""

        def explain(row: npt.NDArray[np.int64], entry: int) -> tuple[str, Iterable[int], Cause]:
            flags = int(current.read_bits[np.searchsorted(current.reads, entry)])
            if flags & BEING_WRITTEN:
                return (
                    "reads a slot that another request of the same forward is writing",
                    happened(row),
                    Cause("same_forward"),
                )
            since = f"was written in event {row[CONTENT] - 1}" if row[CONTENT] else "was never written"
            cause = Cause("written_before" if row[CONTENT] else "never_written")
            return f"reads a slot that was given out in event {row[ALLOC] - 1} and {since}", happened(row), cause

        history, findings = self._history, []
        bits = NEVER_WRITTEN | BEING_WRITTEN
        for current in history.judge(view):
            findings += read_findings("hit_never_written", view, current, bits, history, self._repeats, explain)
        return findings

    def forget(self) -> None:
        """Forget what was reported."""
        self._repeats.forget()
