"""A recording transformers engine that comes to its end, and what must then be true of its trace."""

from pathlib import Path

from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.trace.batch import TraceBatch, TraceGap
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.recovery import recover
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplayRun, ReplaySettings

from .engine_process import EngineProcess


class EndedEngines(EngineProcess):
    """The process that makes engines; a context manager."""

    def __init__(self) -> None:
        super().__init__("ended_engines")

    def start_in(self, folder: Path, **asked: object) -> int:
        """Start an engine that records into a folder; return its process id."""
        return self.start(**{"path": str(folder / "t.arrow"), "log": str(folder / "steps.log"), **asked})


def steps_of(folder: Path) -> int:
    """Return how many steps the engine had the result of, by its own account."""
    try:
        return int((folder / "steps.log").read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2] or 0)
    except FileNotFoundError:
        return 0


def check(folder: Path) -> int:
    """Check what an engine left, a recording for each answer; return how many of its forwards were in no batch of a trace yet."""
    recordings = sorted(folder.glob("t*.arrow"), key=lambda path: (len(path.name), path.name))  # t, t.1, ... t.10
    there = unflushed = 0
    for path in recordings:
        try:
            forwards, behind, complete = _forwards(path)
        except TraceError:  # it was ended before the header was written
            assert path is recordings[-1]
            continue
        assert forwards == list(range(len(forwards)))
        assert complete or path is recordings[-1]
        there, unflushed, whole = there + len(forwards), unflushed + behind, path
        if not complete:
            whole = recover(path, folder / "whole.arrow").target
            assert _forwards(whole)[0] == forwards
        for trace in {path, whole}:
            with ReplayRun((trace,), settings=ReplaySettings(), report=None, all_there=True) as run:
                while run.step():
                    pass
                summary = run.finish()
            assert summary.forwards == len(forwards)
            assert (summary.violations, summary.findings) == (0, 0), (summary.first_violation, summary.first_finding)
            assert summary.verdict is (Verdict.CLEAN if complete else Verdict.INCONCLUSIVE)  # which has no end
    assert there >= steps_of(folder), "a forward whose outcome reached the host is lost"
    return unflushed


def _forwards(path: Path) -> tuple[list[int], int, bool]:
    found, unflushed, gaps = [], 0, []
    with TraceReader(path) as reader:
        for item in reader.stream():
            if isinstance(item, TraceGap):
                gaps.append((item.missing_events, item.ends))
                continue
            assert isinstance(item, TraceBatch)
            numbers = [view.scalar("forward") for view in item if view.kind == "forward"]
            found += numbers
            unflushed += 0 if item.end_byte else len(numbers)
        assert gaps == ([] if reader.complete else [(0, "cut")])
    return found, unflushed, reader.complete
