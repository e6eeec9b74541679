"""Which runners ran, whether anything was decoded, and how long ago the prefix cache was walked."""

from typing import Final

from .forward import Forward

DECODING: Final = frozenset({"decode", "target_verify", "mixed"})


class Pulse:
    """`ran` counts each runner's forwards with requests; `since_sweep` those of the first since the last walk."""

    def __init__(self, num_runners: int) -> None:
        self.ran = [0] * num_runners
        self.decoded = False
        self.since_sweep = 0

    def forward(self, forward: Forward) -> None:
        """Count a forward that has requests."""
        self.ran[forward.runner] += 1
        if forward.runner == 0:
            self.decoded |= forward.mode in DECODING
            self.since_sweep += 1

    def sweep(self, runner: int) -> None:
        """Count a walk of the prefix cache."""
        if runner == 0:
            self.since_sweep = 0

    def forget(self) -> None:
        """After a gap nobody knows how long ago the last walk was."""
        self.since_sweep = 0
