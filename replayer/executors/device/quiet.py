"""Stretches of events in which the device found nothing: the host keeps its books of them in a few passes over columns.

What it must look at itself (a request's names, a note, a forward with violations, an event of its own) ends a stretch.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from ....recorder.state.forward import read_forward
from ....recorder.trace.batch import TraceBatch
from ...report.summary import Summary
from ...run.coverage import count_forwards
from ...run.health import Health
from .executor import DeviceExecutor
from .pieces import Piece
from .screening import gathered

Int64Array = npt.NDArray[np.int64]

# Kinds that change nothing that the host keeps without history checks.
_QUIET: Final = frozenset({"forward", "alloc", "free", "evict", "status", "sample"})


class QuietLane:
    """Takes stretches of events; only without history checks, comparison of ranks and merged rows."""

    def __init__(self, executor: DeviceExecutor, health: Health, summary: Summary, request_ids: set[int]) -> None:
        self._executor = executor
        self._health = health
        self._summary = summary
        self._request_ids = request_ids

    def run(self, batch: TraceBatch, at: int) -> int:
        """Take a batch's events from row `at` on; return the row of the first that was not taken."""
        if batch.kinds[at] not in _QUIET:
            return at
        piece = self._executor.piece_at(batch, at)
        if piece is None:
            return at
        end = at + next(
            (n for n, kind in enumerate(batch.kinds[at : piece.quiet_until(at)]) if kind not in _QUIET),
            piece.quiet_until(at) - at,
        )
        steps = piece.steps[at - piece.first : end - piece.first]
        events = at + np.flatnonzero((steps >= 0) & (np.diff(batch.offsets("req_pool_indices"))[at:end] > 0))
        events = events[[batch.kinds[event] == "forward" for event in events.tolist()]]
        limit = self._health.stall_limit
        if limit:  # the forward that finds the sweeps stalled is no quiet one
            first = np.flatnonzero(batch.scalar_ints("runner")[events] == 0)
            left = limit - self._health.activity.since_sweep
            if len(first) > left:
                end = int(events[first[max(left, 0)]])
                events = events[events < end]
        if end > at:
            self._take(batch, piece, at, end, events)
            self._executor.passed(batch, end - 1)
        return end

    def _take(self, batch: TraceBatch, piece: Piece, at: int, end: int, events: Int64Array) -> None:
        """Keep the books of events `at` to `end`, of which `events` are forwards with requests."""
        summary, kinds = self._summary, batch.kinds
        times = batch.scalar_ints("time_ns")[at:end]
        summary.first_time_ns = summary.first_time_ns or next((int(t) for t in times if t), 0)
        summary.last_time_ns = max(summary.last_time_ns, int(times.max()))
        for kind in kinds[at:end]:
            summary.events[kind] = summary.events.get(kind, 0) + 1
        forwards = [event for event in range(at, end) if kinds[event] == "forward"]
        if not forwards:
            return
        modes = batch.strings("mode")
        for event in forwards:
            summary.forwards_by_mode[modes[event]] = summary.forwards_by_mode.get(modes[event], 0) + 1
        summary.forwards += len(forwards)
        summary.last_forward = int(batch.scalar_ints("forward")[forwards[-1]])
        count_forwards(summary.figures, batch, np.array(forwards), summary.header)
        summary.forwards_watched += int((batch.scalar_ints("kv_watched")[forwards] != 0).sum())
        summary.tokens += int(np.diff(batch.offsets("input_ids"))[forwards].sum())
        rows, ids = (gathered(batch, name, np.array(forwards)) for name in ("req_pool_indices", "request_ids"))
        self._request_ids.update(np.unique(ids[rows != 0]).tolist())
        last = read_forward(batch.event(forwards[-1]), summary.header)
        runners = batch.scalar_ints("runner")[events]
        for runner in np.unique(runners).tolist():
            mine = events[runners == runner]
            if runner == 0:
                self._health.activity.since_sweep += len(mine)
            self._health.take_forwards(runner, [modes[event] for event in mine.tolist()], last)
            self._executor.take_quiet(piece, runner, piece.steps[mine - piece.first])
        if summary.header.lut_lens:
            self._executor.take_divergence(piece, events)
        if not len(events):
            self._health.take_forwards(int(last.runner), [], last)


def open_quiet_lane(
    executor: object, health: Health, summary: Summary, request_ids: set[int], *, alone: bool
) -> QuietLane | None:
    """Return a lane where there is one: `alone` says that nobody else wants to see each forward."""
    if not isinstance(executor, DeviceExecutor) or not alone:
        return None
    return QuietLane(executor, health, summary, request_ids)
