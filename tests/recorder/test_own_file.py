"""Code of the engine that closes descriptors which are not its own: nothing of ours lands in the file that gets one next."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.files import tail_paths
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing import own_file
from kvcanary.recorder.writing.own_file import ForeignFileError, OwnFile
from kvcanary.recorder.writing.writer import TraceWriter


def stolen(ours: Path, theirs: Path) -> int:
    """Close what this process has open of `ours`, and have the engine's own file get the number; return it."""
    files = Path("/proc/self/fd").iterdir()
    (number,) = (int(file.name) for file in files if file.exists() and file.samefile(ours))
    os.close(number)
    opened = os.open(theirs, os.O_RDWR | os.O_CREAT)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    os.write(number, b"the engine's own" * 100)
    return number


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("end", ["write", "close"])
def test_the_trace(traces, caplog: pytest.LogCaptureFixture, tail: bool, end: str) -> None:
    path, theirs = traces.folder / "t.arrow", traces.folder / "theirs"
    writer = TraceWriter(path, traces.header(), flush_interval_ns=1 << 60, tail=tail)
    assert writer.append(traces.event(0)) and writer.flush()
    number = stolen(path, theirs)
    with caplog.at_level(logging.ERROR, "kvcanary"):
        if end == "write":
            for event in (1, 2, 3):
                writer.append(traces.event(event))
            assert not writer.flush()
        assert not writer.close()
    assert len([record for record in caplog.records if "leads to another one now" in record.message]) == 1
    assert "another one now" in (writer.failed or "")
    assert theirs.read_bytes() == b"the engine's own" * 100
    os.close(number)  # still open
    with TraceReader(path) as reader:
        assert [item.first_event for item in reader.stream() if hasattr(item, "first_event")][:1] == [0]


@pytest.mark.parametrize("size", [1, 10 << 20])
def test_the_tail(traces, caplog: pytest.LogCaptureFixture, size: int) -> None:
    path, theirs = traces.folder / "t.arrow", traces.folder / "theirs"
    writer = TraceWriter(path, traces.header(), flush_interval_ns=1 << 60)
    assert writer.append(traces.event(0))
    number = stolen(tail_paths(path)[0], theirs)
    with caplog.at_level(logging.WARNING, "kvcanary"):
        for _ in range(3):
            assert writer.append(TraceEvent(kind="mark", bytes={"kv_bytes": np.ones(size, np.uint8)}))
        assert writer.close()
    assert len([record for record in caplog.records if "leads to another one now" in record.message]) == 1
    assert theirs.read_bytes() == b"the engine's own" * 100
    os.close(number)  # still open
    assert sorted(traces.folder.iterdir()) == [path, theirs]
    batches, gaps, complete = traces.read(path)
    assert complete and not gaps and sum(map(len, batches)) == 4


@pytest.mark.parametrize("quick", [True, False])
def test_a_file_that_was_closed_or_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    if not quick:
        monkeypatch.setattr(own_file, "fstat_now", None)
    own = OwnFile(os.open(tmp_path / "ours", os.O_WRONLY | os.O_CREAT))
    own.check()
    number = own.descriptor
    os.close(number)
    with pytest.raises(OSError, match="Bad file descriptor"):
        own.check()
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    assert other == number
    with pytest.raises(ForeignFileError):
        own.check()
    own.close()
    os.close(other)  # it is still open
