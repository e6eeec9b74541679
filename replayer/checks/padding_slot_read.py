"""A forward reads a padding slot for a position of a request.

Invariant: every position of a prefix has a slot that keeps its K and V; in a padding slot everybody's padding is written
over it, and no record of it is verified. A table entry that was never filled, or was cleared too early, and a token that
was written to the padding slot show here. Evidence: the forward. Legitimate exceptions: sliding windows, whose early
positions lead nowhere; slots of which lost events may have said something. Judged in traces that have lost nothing.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ..report.findings import NO_CAUSE, Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import Repeats, entry_findings
from .view import ForwardView


class PaddingSlotRead(HistoryCheck):
    """Looks at every prefix slot of groups that read whole prefixes."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._repeats = Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that reads a padding slot and was not reported for it already."""
        history, forward, findings = self._history, view.forward, []
        if history.had_gap:
            return []
        for group in view.groups:
            known = group.pool.group
            if known.window or known.lut >= 0 or known.reads_before_write or group.pool.any_unknown:
                continue
            slots = group.slots
            entries = np.flatnonzero(np.isin(slots, known.padding_slots))
            group.mark(entries)
            findings += entry_findings(
                "padding_slot_read",
                forward,
                group,
                requests=np.searchsorted(
                    group.plan.request_offsets[1 : len(forward.request_ids) + 1], entries, side="right"
                ),
                positions=group.positions[entries],
                slots=slots[entries],
                entries=entries,
                ledger=history.ledger.rows[group.pool.index],
                history=history,
                repeats=self._repeats,
                explain=_explain,
            )
        return findings

    def forget(self) -> None:
        """Forget what was reported."""
        self._repeats.forget()


def _explain(_: npt.NDArray[np.int64], __: int) -> tuple[str, Iterable[int], Cause]:
    return "reads a padding slot, which keeps nobody's K and V", [], NO_CAUSE
