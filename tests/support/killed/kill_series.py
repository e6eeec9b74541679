"""A recording engine killed with SIGKILL at a random moment, and everything that must then be true of its files."""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from kvcanary.recorder.errors import UnreadableTraceError
from kvcanary.recorder.trace.batch import TraceBatch, TraceGap
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.trace.recordings import group_recordings, traces_in
from kvcanary.recorder.writing.recovery import recover
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplayRun, ReplaySettings

from .engine_process import EngineProcess, wait_until_gone

FLUSH_NS = 50_000_000
OPTIONS = {
    "single": {},
    "segments": {"segment_bytes": 40_000},
    "flight": {"segment_bytes": 40_000, "keep_segments": 2},
}
# What the writer adds to what the engine told.
OWN_KINDS = ("keyframe", "segment")


@dataclass(frozen=True, kw_only=True)
class Killed:
    """One kill: how long before it the last flush was, what the longest write took, and what was there afterwards."""

    age_ns: int
    longest_write_ns: int
    batches: int
    events: int
    files: int
    verdict: Verdict


class Victims(EngineProcess):
    """The process that makes engines; a context manager."""

    def __init__(self) -> None:
        super().__init__("kill_victims")

    def kill_one(self, folder: Path, *, mode: str, seed: int) -> Killed:
        """Start an engine, kill it at a random moment after its first flush, and check all that it left."""
        dice = random.Random(seed)
        log = folder / "flushes.log"
        traces = folder / "traces"
        traces.mkdir()
        options = {"flush_interval_ns": FLUSH_NS, **OPTIONS[mode]}
        pid = self.start(path=str(traces / "t.arrow"), seed=seed, log=str(log), options=options)
        try:
            while not (log.exists() and log.stat().st_size):
                os.kill(pid, 0)  # raises where it died by itself
                time.sleep(0.005)
            time.sleep(dice.random() * 1.2)
        finally:
            os.kill(pid, signal.SIGKILL)
        killed_ns = time.time_ns()
        wait_until_gone(pid)
        finished = int(log.with_name("finished.log").read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2] or -1)
        return _check(traces, log, killed_ns=killed_ns, flight=mode == "flight", finished=finished)


def _check(traces: Path, log: Path, *, killed_ns: int, flight: bool, finished: int) -> Killed:
    """`finished` is the last forward whose result the engine had, by its own account."""
    lines = [tuple(map(int, line.split())) for line in log.read_bytes().decode().split("\n")[:-1]]
    told = [(last_ns, count) for _, last_ns, count, _ in lines]
    paths = _with_a_header(traces_in(traces))
    batches = [batch for path in paths for batch in _batches(path)]
    _check_batches(batches, told, flight=flight)
    assert _last_forward(paths[-1]) >= finished, "a forward whose outcome reached the host is lost"
    before = _replay(traces)
    for path in paths:
        with TraceReader(path) as reader:
            whole = reader.complete
        if not whole:
            result = recover(path, path.with_name(f"{path.stem}.recovered.arrow"))
            with TraceReader(path) as reader:
                assert result.kept_batches == sum(isinstance(item, TraceBatch) for item in reader.stream())
                gaps = [item for item in reader.stream() if isinstance(item, TraceGap)]
                if path == paths[-1]:
                    assert [(gap.missing_events, gap.ends) for gap in gaps] == [(0, "cut")]
            with TraceReader(result.target) as reader:
                assert reader.complete
    after = _replay(traces)
    assert before.forwards == after.forwards
    assert (before.verified, before.written) == (after.verified, after.written)
    return Killed(
        age_ns=killed_ns - max(line[0] for line in lines),
        longest_write_ns=max(line[3] for line in lines),
        batches=len(told),
        events=sum(count for _, count in told),
        files=len(paths),
        verdict=before.verdict,
    )


def _with_a_header(paths: list[Path]) -> list[Path]:
    """Leave out a last segment that the kill met in the moment in which it was made."""
    try:
        TraceReader(paths[-1]).close()
    except UnreadableTraceError:
        assert len(paths) > 1
        return paths[:-1]
    return paths


def _batches(path: Path) -> list[tuple[int, int]]:
    """Return last time and number of the engine's events of each whole batch; batches without any are left out."""
    found = []
    with TraceReader(path) as reader:
        for item in reader.stream():
            if isinstance(item, TraceBatch) and item.end_byte:  # the tail's come from no flush
                mine = [i for i, kind in enumerate(item.kinds) if kind not in OWN_KINDS]
                if mine:
                    found.append((int(item.scalar_ints("time_ns")[mine[-1]]), len(mine)))
    return found


def _last_forward(path: Path) -> int:
    with TraceReader(path) as reader:
        batches = (item for item in reader.stream() if isinstance(item, TraceBatch))
        numbers = [
            view.scalar("forward") for batch in batches for view in batch if view.kind in ("forward", "keyframe")
        ]
    return max(numbers, default=-1)


def _check_batches(there: list[tuple[int, int]], told: list[tuple[int, int]], *, flight: bool) -> None:
    """Every batch that was flushed is there, in order; at most one more, whose line the kill forestalled."""
    if there[-1:] != told[-1:]:
        there = there[:-1]
    if flight and there:  # the oldest segments are gone, whole ones
        told = told[-len(there) :]
    assert there == told


def _replay(traces: Path):
    recordings, notes = group_recordings(traces_in(traces))
    assert len(recordings) == 1
    assert not notes
    with ReplayRun(recordings[0].paths, settings=ReplaySettings(), report=None, all_there=True) as run:
        while run.step():
            pass
        summary = run.finish()
    assert (summary.violations, summary.findings) == (0, 0), (summary.first_violation, summary.first_finding)
    assert summary.verdict is Verdict.INCONCLUSIVE  # the recording has no end
    return summary
