"""History checks: faults that no canary record shows, found in the order of events. One check a module."""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from ...recorder.header import TraceHeader
from ...recorder.reader import EventView
from ..findings import Finding
from ..requests import RequestBook
from .input_not_sampled import InputNotSampled
from .input_not_truth import InputNotTruth
from .view import ForwardView


class HistoryCheck(Protocol):
    """Looks at every event, in order, and says what contradicts what came before."""

    def forward(self, view: ForwardView) -> list[Finding]:
        """Judge a forward that is about to run."""
        ...

    def event(self, view: EventView) -> list[Finding]:
        """Judge any other event; raise `UnusableEventError` where it contradicts itself."""
        ...

    def finish(self) -> list[Finding]:
        """Judge the end of a trace that has its end."""
        ...

    def forget(self) -> None:
        """Take all that was remembered for unknown, after a gap in the trace."""
        ...


_CHECKS: Final[dict[str, Callable[..., HistoryCheck]]] = {
    "input_not_sampled": InputNotSampled,
    "input_not_truth": InputNotTruth,
}

CHECK_NAMES: Final = tuple(_CHECKS)


def make_checks(names: Iterable[str], *, header: TraceHeader, book: RequestBook) -> list[HistoryCheck]:
    """Return the named checks, in their own order."""
    chosen = set(names)
    token_offsets = tuple(runner.token_offset for runner in header.runners)
    return [make(token_offsets=token_offsets, book=book) for name, make in _CHECKS.items() if name in chosen]
