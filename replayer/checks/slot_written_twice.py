"""A forward writes two tokens of a request to one slot.

Invariant: each token of a forward has a slot of its own. Evidence: the slot's allocation and the forward. Legitimate
exceptions: slot 0 and negative slots, where nothing is kept. Two requests that write one slot are
`write_to_foreign_slot`; two full slots that lead to one SWA slot are `swa_mapping_stale`. Judged in every trace.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.ledger import WRITES_AGAIN
from ..report.findings import NO_CAUSE, Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import Repeats, changed_hands, write_findings
from .view import ForwardView


class SlotWrittenTwice(HistoryCheck):
    """Looks at every written slot."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._repeats = Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that writes a slot twice."""
        findings = []
        for judged in self._history.judge(view):
            if judged.group.pool.group.lut < 0:
                findings += write_findings(
                    "slot_written_twice", view, judged, WRITES_AGAIN, self._history, self._repeats, _explain
                )
        return findings

    def forget(self) -> None:
        """Forget what was reported."""
        self._repeats.forget()


def _explain(row: npt.NDArray[np.int64], _: int) -> tuple[str, Iterable[int], Cause]:
    return (
        "two tokens of one forward are written to one slot, and the second is what is left",
        changed_hands(row),
        NO_CAUSE,
    )
