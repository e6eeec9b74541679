"""The health check: launches that should have run and did not.

Each forward with requests owes every half of every pool group of its runner a verify and a write launch, HEAD and TAIL. If the
prefix cache is said to be walked every so many forwards of the first runner, twice as many without a walk are a stall, but
for those behind a loss or a gap: whether walks are still told nobody knows until the next. A runner that never ran although
the first one decoded has lost its hooks.
"""

import numpy as np
import numpy.typing as npt

from ...kernels.constants import LaunchTag
from ...recorder.state.forward import Forward
from ...recorder.state.history import DECODING, RunnerActivity
from ...recorder.state.pools import ENDPOINTS, launch_tag
from ...recorder.state.requests import RequestTable
from ...recorder.trace.header import TraceHeader
from ..report.findings import Finding, forward_finding


class Health:
    """Counts what should have been launched; `activity` is what ran so far."""

    def __init__(self, header: TraceHeader, activity: RunnerActivity) -> None:
        self._header = header
        self._expected = np.zeros(len(LaunchTag), np.int64)
        self.activity = activity
        self._stalled = False
        self._last: Forward | None = None

    @property
    def stall_limit(self) -> int:
        """How many forwards of the first runner may go by without a walk; 0 for any number, or once a stall was reported."""
        return 0 if self._stalled else 2 * self._header.sweep_interval

    def forward(self, forward: Forward) -> list[Finding]:
        """Count a forward that was applied; return a finding when the sweeps have stalled."""
        self._last = forward
        if not len(forward.req_pool_indices):
            return []
        self._expect(forward.runner, 1)
        if forward.runner != 0:
            return []
        since = self.activity.since_sweep
        if not 0 < self.stall_limit < since:
            return []
        self._stalled = True
        every = f"the prefix cache should be walked every {self._header.sweep_interval}"
        return [_finding(forward, f"no SWEEP launch in {since} forwards, {every}")]

    def take_forwards(self, runner: int, modes: list[str], last: Forward) -> None:
        """Count ordinary forwards with requests, by their modes; the caller has moved `activity.since_sweep` on."""
        self._last = last
        self.activity.ran[runner] += len(modes)
        if runner == 0:
            self.activity.decoded |= not DECODING.isdisjoint(modes)
        self._expect(runner, len(modes))

    def _expect(self, runner: int, forwards: int) -> None:
        for group in self._header.groups:
            if group.runner == runner:
                tags = [launch_tag(endpoint, half, group.kind) for endpoint in ENDPOINTS for half in group.halves]
                self._expected[tags] += 2 * forwards

    def sweep(self, runner: int) -> None:
        """Take note that the prefix cache was walked: a stall is over."""
        if runner == 0:
            self._stalled = False

    def resume(self) -> None:
        """Continue from an activity that was set: a stall that lasts was reported before."""
        limit = 2 * self._header.sweep_interval
        self._stalled = 0 < limit < self.activity.since_sweep

    def finish(self, kernel_counters: npt.NDArray[np.int64]) -> list[Finding]:
        """Return what was never or too seldom launched in a whole trace."""
        last = self._last
        if last is None:
            return []
        silent = [_finding(last, f"runner {name} has groups and never ran a forward") for name in self.silent_runners()]
        return self.missing(kernel_counters) + silent

    def silent_runners(self) -> list[str]:
        """Return the runners that did not run so far although the first one decoded, and are said to be watched."""
        if not self.activity.decoded:
            return []
        unseen = {entry.name for entry in self._header.not_watched if entry.what in ("runner", "graph")}
        runners = zip(self._header.runners, self.activity.ran, strict=True)
        return [runner.name for runner, ran in runners if not ran and runner.name not in unseen]

    def missing(self, kernel_counters: npt.NDArray[np.int64]) -> list[Finding]:
        """Return which launches there were too few of so far."""
        if self._last is None:
            return []
        return [
            _finding(self._last, f"{tag.name} was launched {kernel_counters[tag]} times, expected {expected}")
            for tag, expected in zip(LaunchTag, self._expected.tolist(), strict=True)
            if expected and kernel_counters[tag] != expected
        ]


def _finding(forward: Forward, detail: str) -> Finding:
    return forward_finding("launch_missing", forward, detail, RequestTable(), evidence="[]")
