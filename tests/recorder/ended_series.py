"""A recording transformers engine that comes to its end, and what must then be true of its trace."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from kvcanary.recorder.trace.batch import TraceBatch, TraceGap
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.recovery import recover
from kvcanary.replayer.run.replay import ReplayRun, ReplaySettings
from kvcanary.replayer.run.verdict import Verdict


class EndedEngines:
    """The process that makes engines; a context manager."""

    def __enter__(self) -> "EndedEngines":
        script = Path(__file__).with_name("ended_engines.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the process that makes engines is gone"
        return line

    def start(self, folder: Path, **asked: object) -> int:
        """Start an engine; return its process id."""
        asked = {"path": str(folder / "t.arrow"), "log": str(folder / "steps.log"), **asked}
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return int(self._read())

    @staticmethod
    def wait(pid: int) -> None:
        """Wait until a process is gone."""
        for _ in range(6000):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.01)
        raise AssertionError("the engine did not end")


def steps_of(folder: Path) -> int:
    """Return how many steps the engine had the result of, by its own account."""
    try:
        return int((folder / "steps.log").read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2] or 0)
    except FileNotFoundError:
        return 0


def check(folder: Path) -> int:
    """Check what an engine left; return how many of its forwards were in no batch of the trace yet."""
    path, finished = folder / "t.arrow", steps_of(folder)
    forwards, unflushed = _forwards(path)
    assert forwards[: len(forwards)] == list(range(len(forwards)))
    assert len(forwards) >= finished, "a forward whose outcome reached the host is lost"
    recovered = recover(path, folder / "whole.arrow").target
    assert _forwards(recovered)[0] == forwards
    for trace in (path, recovered):
        with ReplayRun((trace,), settings=ReplaySettings(), report=None, all_there=True) as run:
            while run.step():
                pass
            summary = run.finish()
        assert summary.forwards == len(forwards)
        assert (summary.violations, summary.findings) == (0, 0), (summary.first_violation, summary.first_finding)
        assert summary.verdict is Verdict.INCONCLUSIVE  # the recording has no end
    return unflushed


def _forwards(path: Path) -> tuple[list[int], int]:
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
    return found, unflushed
