"""The chosen checks as one: each event is read once, judged by those whom it concerns, and only then moves the ledger."""

from collections.abc import Sequence

from ...recorder.trace.reader import EventView
from ..report.findings import Finding
from .check import HistoryCheck
from .history import History
from .reporting import Repeats
from .view import ForwardView


class Panel(HistoryCheck):
    """Asks each check about the forwards and the kinds of event that it judges; `history` is what they share."""

    def __init__(self, history: History, checks: Sequence[HistoryCheck]) -> None:
        super().__init__(history)
        self.history = history
        self._checks = checks
        self._of_forwards = [check for check in checks if type(check).forward is not HistoryCheck.forward]
        kinds = {kind for check in checks for kind in check.judges}
        self._of_events = {kind: [check for check in checks if kind in check.judges] for kind in kinds}

    def forward(self, view: ForwardView) -> list[Finding]:
        """Judge a forward, then move on by it."""
        findings: list[Finding] = []
        for check in self._of_forwards:
            findings += check.forward(view)
        self.history.take_view(view)
        return findings

    def event(self, view: EventView) -> list[Finding]:
        """Judge another event, then move on by it; raise `UnusableEventError` before anything has changed."""
        self.history.open(view)
        findings: list[Finding] = []
        for check in self._of_events.get(view.kind, ()):
            findings += check.event(view)
        self.history.take_event(view)
        return findings

    def pending(self) -> bool:
        """Say whether a check remembers something that whatever comes next may contradict, and no keyframe holds."""
        return any(check.pending() for check in self._checks)

    def requests_told(self) -> set[int]:
        """Return the requests of which a check remembers that their last forward was reported."""
        return {
            request
            for check in self._checks
            for part in vars(check).values()
            if isinstance(part, Repeats)
            for request in part.requests_told
        }

    def finish(self) -> list[Finding]:
        """Judge what is left at the whole end of a complete trace."""
        return [finding for check in self._checks for finding in check.finish()]

    def forget(self) -> None:
        """Take all that was remembered for unknown."""
        self.history.forget()
        for check in self._checks:
            check.forget()
