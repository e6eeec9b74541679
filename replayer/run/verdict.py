"""The verdict of a replay and the exit code that stands for it, fit for `git bisect run`."""

from collections.abc import Iterable
from enum import Enum


class Verdict(Enum):
    """What a replay found."""

    CLEAN = "clean"
    CORRUPT = "corrupt"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """0 clean, 1 corrupt, 125 inconclusive (`git bisect run` skips 125)."""
        return {Verdict.CLEAN: 0, Verdict.CORRUPT: 1, Verdict.INCONCLUSIVE: 125}[self]


EXIT_UNREADABLE = 2


def combined_exit_code(codes: Iterable[int]) -> int:
    """Fold the exit codes of several traces: corrupt beats unreadable beats inconclusive beats clean."""
    seen = set(codes)
    return next((code for code in (1, EXIT_UNREADABLE, 125) if code in seen), 0)
