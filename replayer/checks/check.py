"""What a history check is: something that looks at every event, in order, and says what contradicts what came before."""

from typing import ClassVar

from ...recorder.reader import EventView
from ..findings import Finding
from .view import ForwardView


class HistoryCheck:
    """A check that finds nothing; each check overrides what it looks at.

    `judges` names the kinds of event, beside forwards, that `event` looks at.
    """

    judges: ClassVar[frozenset[str]] = frozenset()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Judge a forward that is about to run; tables and pools are as it finds them."""
        del view
        return []

    def event(self, view: EventView) -> list[Finding]:
        """Judge an event between two forwards.

        Raises:
            UnusableEventError: its columns contradict one another; nothing has been changed.
        """
        del view
        return []

    def finish(self) -> list[Finding]:
        """Judge what is left at the whole end of a complete trace."""
        return []

    def forget(self) -> None:
        """Take all that was remembered for unknown, after a gap in the trace."""
