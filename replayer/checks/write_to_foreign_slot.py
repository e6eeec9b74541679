"""A forward writes a slot that is not the writing request's.

Invariant: a token is written to a slot that its request holds, and no two requests of a forward write one slot.
Evidence: the event that freed the slot, handed it to the prefix cache or gave it to another request, and the forward.
Legitimate exceptions: the owner of a page goes on writing into it after a fork has joined it. Two requests writing
one slot in one forward is judged in every trace; the rest only where the trace promises to tell of every slot.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.ledger import (
    CACHED,
    FREE,
    OWNER,
    STATE,
    WRITE_CACHED,
    WRITE_FOREIGN,
    WRITE_FREE,
    WRITTEN_TWICE,
)
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import Repeats, changed_hands, held_by, write_findings
from .view import ForwardView


class WriteToForeignSlot(HistoryCheck):
    """Looks at every written slot."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._repeats = Repeats()
        self._bits = WRITTEN_TWICE
        if history.complete:
            self._bits |= WRITE_FREE | WRITE_CACHED | WRITE_FOREIGN

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that writes slots which are not its own."""

        def explain(row: npt.NDArray[np.int64], token: int) -> tuple[str, Iterable[int], Cause]:
            flags = int(current.write_bits[np.searchsorted(current.writes, token)])
            if not flags & ~WRITTEN_TWICE or not history.complete:
                return (
                    "writes a slot that another request of the same forward writes",
                    changed_hands(row),
                    Cause("same_forward"),
                )
            if row[STATE] == FREE:
                return "writes a slot that is free", changed_hands(row), Cause("free")
            if row[STATE] == CACHED:
                return "writes a slot that the prefix cache holds", changed_hands(row), held_by(row)
            return (
                f"writes a slot of request {history.request_table.name(int(row[OWNER]))}",
                changed_hands(row),
                held_by(row),
            )

        history, findings = self._history, []
        for current in history.judge(view):
            findings += write_findings(
                "write_to_foreign_slot", view, current, self._bits, history, self._repeats, explain
            )
        return findings

    def forget(self) -> None:
        """Forget what was reported."""
        self._repeats.forget()
