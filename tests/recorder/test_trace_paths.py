"""Where a trace is written: what paths are refused, what is replaced, and what is left alone."""

import os
import threading

import pytest
from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.writer import TraceWriter


def test_dev_full():
    from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader

    header = TraceHeader(groups=(PoolGroup(name="full", num_slots=2),), tables=(StateTable(rows=1, width=1),))
    with pytest.raises(TraceError, match="/dev/full: cannot be written: the disk is full"):
        TraceWriter("/dev/full", header, overwrite=True)


def test_a_pipe_that_nobody_empties(traces):
    path = traces.folder / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    writer = TraceWriter(
        path, traces.header(), overwrite=True, max_queued_bytes=1 << 20, flush_bytes=1, compression="none"
    )
    try:
        taken = [writer.append(traces.event(n, tokens=1000)) for n in range(200)]
        assert False in taken
        assert writer.stats().queued_bytes <= 1 << 20
    finally:
        drained = threading.Event()

        def drain():
            while not drained.is_set():
                try:
                    os.read(reading, 1 << 16)
                except BlockingIOError:
                    drained.wait(0.001)

        thread = threading.Thread(target=drain)
        thread.start()
        assert writer.close()
        drained.set()
        thread.join()
        os.close(reading)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/t.arrow", "its folder does not exist; create it first"),
        ("there.arrow", "it exists; choose another name, or have it replaced (--force, overwrite=True)"),
        ("file/t.arrow", "its folder is not a folder"),
    ],
)
def test_bad_paths(traces, name, message):
    (traces.folder / "there.arrow").write_text("mine")
    (traces.folder / "file").write_text("")
    with pytest.raises(TraceError) as caught:
        TraceWriter(traces.folder / name, traces.header())
    assert str(caught.value) == f"{traces.folder / name}: cannot be written: {message}"
    assert (traces.folder / "there.arrow").read_text() == "mine"


def test_a_folder_in_place_of_the_file(traces):
    with pytest.raises(TraceError, match="it is a folder"):
        TraceWriter(traces.folder, traces.header(), overwrite=True)


def test_a_folder_that_may_not_be_written(traces):
    header = traces.header()
    traces.folder.chmod(0o500)
    root = os.geteuid() == 0
    try:
        if root:  # root may write anywhere
            os.seteuid(65534)
        with pytest.raises(TraceError, match="may not be written by this user"):
            TraceWriter(traces.folder / "t.arrow", header)
    finally:
        if root:
            os.seteuid(0)
        traces.folder.chmod(0o700)


def test_overwrite_leaves_a_file_that_is_read_alone(traces):
    path = traces.write(batches=(3, 2), compression="none")
    with TraceReader(path) as reader:
        stream = reader.stream()
        next(stream)
        with TraceWriter(path, traces.header(), overwrite=True):
            assert [batch.first_event for batch in stream] == [3]
    assert traces.read(path)[0] == []


def test_an_overwritten_trace_is_private_too(traces):
    path = traces.folder / "t.arrow"
    path.write_text("everybody's")
    path.chmod(0o666)
    TraceWriter(path, traces.header(), overwrite=True).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    TraceWriter(path, traces.header(), overwrite=True).close()  # nothing there to overwrite
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_is_replaced_and_what_it_leads_to_left_alone(traces):
    """Written through, a longer file would keep its end behind the trace's."""
    path, longer = traces.folder / "t.arrow", traces.folder / "longer"
    longer.write_bytes(b"x" * 1_000_000)
    path.symlink_to(longer)
    TraceWriter(path, traces.header(), overwrite=True).close()
    assert not path.is_symlink() and traces.read(path)[2]
    assert longer.read_bytes() == b"x" * 1_000_000
