"""A request starts from slots that hold other tokens or positions than its own.

Invariant: where a request reads a position for the first time and somebody else wrote the slot (prefix hit, fork,
load-back, a table row that points elsewhere), the slot's record has the position and the token that the scheduler has
there. Evidence: the event that wrote the slot and the forward. A prefix node whose tokens were cut while its hash was
kept shows here. Legitimate exceptions: KV bytes may differ, since equal prefixes computed twice do; positions that the
request has read before are the canary's own business; without truth tokens only positions are compared.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import record_words
from ...kernels.constants import RECORD_POSITION, RECORD_TOKEN
from ...kernels.replay_pass.ledger import DIFFERS
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import Repeats, read_findings
from .view import ForwardView


class HitDiffers(HistoryCheck):
    """Looks at the prefix slots that are new to their reader."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._repeats = Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that starts from slots which differ from what it expects."""

        def explain(_: npt.NDArray[np.int64], entry: int) -> tuple[str, Iterable[int], Cause]:
            pool, plan = current.group.pool, current.group.plan
            slot = int(plan.slots[entry])
            record = record_words(pool.pool.tail[pool.group.halves[0]], written=False)[slot]
            event, forward, writer = pool.last_writers(np.array([slot]))[0].tolist()
            expected = f"position {int(plan.expected_positions[entry])}"
            if plan.expected_tokens[entry] != -1:
                expected = f"token {int(plan.expected_tokens[entry])}, {expected}"
            detail = (
                f"starts from a slot with token {int(record[RECORD_TOKEN])}, position {int(record[RECORD_POSITION])}, "
                f"written by request {history.request_table.name(writer)} in forward {forward}; expected {expected}"
            )
            cause = Cause("", writer, int(record[RECORD_TOKEN]), int(plan.expected_tokens[entry]))
            return detail, [event], cause

        history, findings = self._history, []
        for current in history.judge(view):
            findings += read_findings("hit_differs", view, current, DIFFERS, history, self._repeats, explain)
        return findings

    def forget(self) -> None:
        """Forget what was reported."""
        self._repeats.forget()
