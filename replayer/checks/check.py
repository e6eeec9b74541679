"""What a history check is: something that looks at every event, in order, and says what contradicts what came before."""

from enum import IntEnum
from typing import ClassVar

from ...recorder.trace.reader import EventView
from ..report.findings import Finding
from .history import History
from .view import ForwardView


class Covered(IntEnum):
    """By which of the faster ways of replaying a check finds what it finds in stepwise replay; each includes those before.

    NOTHING: by none. INCREMENTAL: it is called for every forward, but the plans may leave out prefix entries that it was
    given before, did not mark, and to which nothing has happened since; of the records only the first half's TAIL is kept,
    without its KV hash. COMPILED: it need not be called for what the compiled pass takes, since `kernels/lane` stops in
    front of every event in which it finds or has to remember something.
    """

    NOTHING = 0
    INCREMENTAL = 1
    COMPILED = 2


class HistoryCheck:
    """A check that finds nothing; each check overrides what it looks at.

    `judges` names the kinds of event, beside forwards, that `event` looks at. `covered` says by which faster ways of
    replaying it finds the same; one that does not say has every forward of its replays stepped, with all that it reads.
    """

    judges: ClassVar[frozenset[str]] = frozenset()
    covered: ClassVar[Covered] = Covered.NOTHING

    def __init__(self, history: History) -> None:
        self._history = history

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

    def pending(self) -> bool:
        """Say whether something is remembered that whatever comes next may contradict, and no keyframe holds."""
        return False

    def finish(self) -> list[Finding]:
        """Judge what is left at the whole end of a complete trace."""
        return []

    def forget(self) -> None:
        """Take all that was remembered for unknown, after a gap in the trace."""
