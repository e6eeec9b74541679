"""All that a replay holds at one point of a trace: state tables, pools, requests, what ran, and the history of slots."""

from dataclasses import dataclass
from typing import Final

from ..trace.header import TraceHeader
from .forward import Forward
from .history import SlotHistory
from .pools import GroupPool
from .requests import RequestTable
from .tables import StateTables

DECODING: Final = frozenset({"decode", "target_verify", "mixed"})


class RunnerActivity:
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


@dataclass(slots=True, kw_only=True)
class ReplayState:
    """The parts that a keyframe holds; `history` is None for a replay without history checks."""

    header: TraceHeader
    tables: StateTables
    pools: list[GroupPool]
    request_table: RequestTable
    activity: RunnerActivity
    history: SlotHistory | None
