"""The health check: launches that should have run and did not.

For each forward with requests, every half of every pool group of its runner must have had a HEAD and a TAIL endpoint: a verify and a write launch each.
Where the trace says that the prefix cache is walked every so many forwards of the first runner, a stretch of twice as
many without a walk is a stall. A runner that never ran although the first one decoded has lost its hooks.
"""

import numpy as np
import numpy.typing as npt

from ..kernels.constants import LaunchTag
from ..recorder.header import TraceHeader
from .findings import Finding
from .forward import Forward
from .pools import launch_tag
from .sweep import Sweep

_DECODING = frozenset({"decode", "target_verify", "mixed"})


class Health:
    """Counts what should have been launched."""

    def __init__(self, header: TraceHeader) -> None:
        self._header = header
        self._expected = np.zeros(len(LaunchTag), np.int64)
        self._ran = [0] * len(header.runners)
        self._decoded = False
        self._since_sweep = 0
        self._stalled = False
        self._last: Forward | None = None

    def forward(self, forward: Forward) -> list[Finding]:
        """Count a forward; return a finding when the sweeps have stalled."""
        self._last = forward
        if not len(forward.req_pool_indices):
            return []
        self._ran[forward.runner] += 1
        for group in self._header.groups:
            if group.runner == forward.runner:
                for half in group.halves:
                    self._expected[launch_tag("HEAD", half, group.kind)] += 2
                    self._expected[launch_tag("TAIL", half, group.kind)] += 2
        if forward.runner != 0:
            return []
        self._decoded |= forward.mode in _DECODING
        self._since_sweep += 1
        limit = 2 * self._header.sweep_interval
        if not limit or self._stalled or self._since_sweep <= limit:
            return []
        self._stalled = True
        return [
            _finding(
                forward,
                f"no SWEEP launch in {self._since_sweep} forwards, the prefix cache should be walked every "
                f"{self._header.sweep_interval}",
            )
        ]

    def sweep(self, sweep: Sweep) -> None:
        """Count a walk of the prefix cache."""
        if sweep.runner == 0:
            self._since_sweep = 0
            self._stalled = False

    def finish(self, kernel_counters: npt.NDArray[np.int64]) -> list[Finding]:
        """Return what was never or too seldom launched in a whole trace."""
        if self._last is None:
            return []
        findings = [
            _finding(self._last, f"{tag.name} was launched {kernel_counters[tag]} times, expected {expected}")
            for tag, expected in zip(LaunchTag, self._expected.tolist(), strict=True)
            if expected and kernel_counters[tag] != expected
        ]
        for runner, ran in zip(self._header.runners, self._ran, strict=True):
            if not ran and self._decoded:
                findings.append(_finding(self._last, f"runner {runner.name} has groups and never ran a forward"))
        return findings

    def forget(self) -> None:
        """After a gap nobody knows how long ago the last walk was."""
        self._since_sweep = 0


def _finding(forward: Forward, detail: str) -> Finding:
    return Finding(
        kind="launch_missing",
        event=forward.event,
        forward=forward.forward,
        time_ns=forward.time_ns,
        runner=forward.runner,
        group=-1,
        request_id=-1,
        request="",
        req_pool_idx=-1,
        position=-1,
        slot=-1,
        detail=detail,
    )
