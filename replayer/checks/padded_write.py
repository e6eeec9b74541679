"""A padding token writes a slot that is in use.

Invariant: padding rows and tokens behind the last request write slot 0, or a slot that nobody uses. Padded rows that
keep the slots of the step before show here; a padding slot -1 that wraps to the last slot on the device does not, since
-1 is what the engine tells, and shows in the KV hash. Evidence: the slot's allocation and the forward. Legitimate
exceptions: none; where the trace does not promise to tell of every slot, only slots that the same forward reads or
writes count as in use.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.ledger import CACHED, HELD, PADDED, PADDED_LIVE, PADDED_WRITTEN, SHARED, STATE
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import Repeats, happened, held_by, holder, read_findings, write_findings
from .view import ForwardView


class PaddedWrite(HistoryCheck):
    """Looks at the tokens behind those of the last request."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._writes = Repeats()
        self._reads = Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding where padding writes slots in use that were not reported already."""
        history, findings = self._history, []
        bits = PADDED_WRITTEN | (PADDED_LIVE if history.complete else 0)
        for judged in history.judge(view):
            findings += write_findings("padded_write", view, judged, bits, history, self._writes, self._written)
            if not history.complete:
                findings += read_findings("padded_write", view, judged, PADDED, history, self._reads, _read)
        return findings

    def _written(self, row: npt.NDArray[np.int64], _: int) -> tuple[str, Iterable[int], Cause]:
        in_use = self._history.complete and row[STATE] in (HELD, SHARED, CACHED)
        whose = holder(row, self._history) if in_use else "a request of the same forward"
        return f"padding writes a slot of {whose}", happened(row), held_by(row) if in_use else Cause("same_forward")

    def forget(self) -> None:
        """Forget what was reported."""
        self._writes.forget()
        self._reads.forget()


def _read(row: npt.NDArray[np.int64], _: int) -> tuple[str, Iterable[int], Cause]:
    return "reads a slot that padding of the same forward writes", happened(row), Cause("same_forward")
