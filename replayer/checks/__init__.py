"""History checks: faults that no canary record shows, found in the order of events. One check a module."""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from ..findings import Finding
from ..forward import Forward
from ..requests import RequestBook
from ..tables import StateTables
from .input_not_sampled import InputNotSampled
from .input_not_truth import InputNotTruth


class HistoryCheck(Protocol):
    """Looks at every forward, in order, and says what contradicts what came before."""

    def forward(self, forward: Forward, tables: StateTables) -> list[Finding]:
        """Judge a forward; `tables` are as the forward saw them."""
        ...

    def forget(self) -> None:
        """Take all that was remembered for unknown, after a gap in the trace."""
        ...


_CHECKS: Final[dict[str, Callable[..., HistoryCheck]]] = {
    "input_not_sampled": InputNotSampled,
    "input_not_truth": InputNotTruth,
}

CHECK_NAMES: Final = tuple(_CHECKS)


def make_checks(names: Iterable[str], *, token_offsets: tuple[int, ...], book: RequestBook) -> list[HistoryCheck]:
    """Return the named checks, in their own order; `token_offsets` holds one value a runner."""
    chosen = set(names)
    return [make(token_offsets=token_offsets, book=book) for name, make in _CHECKS.items() if name in chosen]
