"""The chosen checks as one: each event is read once, judged by those whom it concerns, and only then moves the ledger."""

from collections.abc import Sequence

from ...recorder.trace.reader import EventView
from ..report.findings import Finding
from .check import HistoryCheck, Repeats
from .history import History
from .view import ForwardView


class CheckSet(HistoryCheck):
    """Asks each check about the forwards and the kinds of event that it judges; `checks` are they, `history`
    is what they share.
    """

    def __init__(self, history: History, checks: Sequence[type[HistoryCheck]]) -> None:
        super().__init__(history)
        self.checks = [check(history) for check in checks if history.complete or not check.needs_complete]
        self._of_forwards = [check for check in self.checks if type(check).forward is not HistoryCheck.forward]
        kinds = {kind for check in self.checks for kind in check.events}
        self._of_events = {kind: [check for check in self.checks if kind in check.events] for kind in kinds}

    def forward(self, view: ForwardView) -> list[Finding]:
        """Judge a forward, then move on by it."""
        findings = [finding for check in self._of_forwards for finding in check.forward(view)]
        self.history.apply_view(view)
        return findings

    def event(self, view: EventView) -> list[Finding]:
        """Judge another event, then move on by it; raise `UnusableEventError` before anything has changed."""
        self.history.open(view)
        findings = [finding for check in self._of_events.get(view.kind, ()) for finding in check.event(view)]
        self.history.apply_event(view)
        return findings

    def pending(self) -> bool:
        """Say whether a check remembers something that whatever comes next may contradict, and no keyframe holds."""
        return any(check.pending() for check in self.checks)

    def requests_reported(self) -> set[int]:
        """Return the requests of which a check remembers that their last forward was reported."""
        repeats = [part for check in self.checks for part in vars(check).values() if isinstance(part, Repeats)]
        return set[int]().union(*(one.requests for one in repeats))

    def finish(self) -> list[Finding]:
        """Judge what is left at the whole end of a complete trace."""
        return [finding for check in self.checks for finding in check.finish()]

    def forget(self) -> None:
        """Take all that was remembered for unknown."""
        self.history.forget()
        for check in self.checks:
            check.forget()
