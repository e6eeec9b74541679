"""The writer: round trip, batches, bounds, dead and stuck disks, fork, kill -9."""

import contextlib
import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest
from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.trace.event import TraceEvent, loss_event
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.writing import trace_file
from kvcanary.recorder.writing import writer as writer_module
from kvcanary.recorder.writing.writer import TraceWriter


@contextlib.contextmanager
def stuck_disk(monkeypatch):
    """Every write from here on waits until the block ends."""
    free = threading.Event()
    began = threading.Event()
    write = os.write

    def wait(descriptor, data):
        began.set()
        free.wait()
        return write(descriptor, data)

    monkeypatch.setattr(trace_file.os, "write", wait)
    try:
        yield began
    finally:
        free.set()
        monkeypatch.undo()


@pytest.mark.parametrize("compression", ["lz4", "zstd", "none"])
def test_round_trip(traces, compression):
    path = traces.folder / "t.arrow"
    events = [traces.event(n, tokens=n % 5) for n in range(50)]
    events[7] = TraceEvent(kind="mark", scalars={"note": "x", "labels": '{"a": 1}', "prompt_len": -(1 << 63)})
    before = set(threading.enumerate())
    with TraceWriter(path, traces.header(), compression=compression) as writer:
        assert all(writer.append(event) for event in events)
        assert {thread.name for thread in threading.enumerate() if thread not in before} == {"kvcanary-writer"}
    found = [traces.plain(view) for view in read_trace(path)]
    assert found == [traces.expected(event, n) for n, event in enumerate(events)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert writer.header.capture.compression == compression
    assert set(threading.enumerate()) <= before


def test_header_only(traces):
    path = traces.write(batches=())
    assert traces.read(path) == ([], [], True)


def test_header_gets_what_only_the_writer_knows(traces):
    header = traces.header(trace_id="", created_ns=0, recorder_version="")
    with TraceWriter(traces.folder / "t.arrow", header, flush_bytes=99, compression="none") as writer:
        assert writer.header.trace_id and writer.header.created_ns and writer.header.recorder_version
        assert writer.header.capture.flush_bytes == 99


def test_flush_by_size(traces):
    with TraceWriter(traces.folder / "t.arrow", traces.header(), flush_bytes=1, flush_interval_ns=10**18) as writer:
        for number in range(5):
            writer.append(traces.event(number))
        with writer.changed:
            assert writer.changed.wait_for(lambda: writer.stats().written_events == 5)
    assert [batch.num_events for batch in traces.read(writer.path)[0]] == [1] * 5


def test_flush_by_time(traces):
    with TraceWriter(traces.folder / "t.arrow", traces.header(), flush_interval_ns=1_000_000) as writer:
        writer.append(traces.event(0))
        with writer.changed:
            assert writer.changed.wait_for(lambda: writer.stats().written_events == 1)
        batches, gaps, complete = traces.read(writer.path)
        assert [batch.num_events for batch in batches] == [1] and gaps[0].kind == "torn" and not complete


def test_many_threads_append(traces):
    path = traces.folder / "t.arrow"
    with TraceWriter(path, traces.header(), flush_bytes=4096) as writer:
        threads = [
            threading.Thread(target=lambda: [writer.append(traces.event(n)) for n in range(100)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    views = list(read_trace(path))
    assert [view.number for view in views] == list(range(400))
    assert sorted(view.scalar("forward") for view in views) == sorted([*range(100)] * 4)


def test_a_stuck_disk_bounds_memory_and_never_blocks(traces, monkeypatch):
    bound = sum(traces.event(n).nbytes for n in range(20))
    writer = TraceWriter(traces.folder / "t.arrow", traces.header(), max_queued_bytes=bound, flush_bytes=1)
    with stuck_disk(monkeypatch) as began:
        taken = [writer.append(traces.event(n)) for n in range(5)]
        assert began.wait()
        taken += [writer.append(traces.event(n)) for n in range(5, 100)]  # returns while the disk is stuck
        assert taken == [True] * 20 + [False] * 80
        assert writer.stats().queued_bytes <= bound
        assert writer.stats().dropped_events == 80
        assert not writer.flush(timeout=0.05)
        assert not writer.append(loss_event(lost_events=80, note="full"))
        assert writer.stats().dropped_events == 80, "a refused loss event comes again"
    assert writer.flush()
    assert writer.append(loss_event(lost_events=80, note="full"))
    assert writer.append(traces.event(100))
    assert writer.close()
    views = list(read_trace(writer.path))
    assert [view.kind for view in views] == ["forward"] * 20 + ["loss", "forward"], "no second loss event"
    assert [view.number for view in views] == list(range(22))


def test_unreported_drops_become_a_last_loss_event(traces):
    with TraceWriter(traces.folder / "t.arrow", traces.header(), max_queued_bytes=2000) as writer:
        assert not writer.append(traces.event(0, tokens=10_000))
        assert not writer.append(traces.event(1, tokens=10_000))
        assert writer.append(traces.event(2))
    views = list(read_trace(writer.path))
    assert [view.kind for view in views] == ["forward", "loss"]
    assert views[1].scalar("lost_events") == 2 and "dropped" in views[1].scalar("note")


def test_close_gives_up_on_a_stuck_disk(traces, monkeypatch, caplog):
    writer = TraceWriter(traces.folder / "t.arrow", traces.header())
    with stuck_disk(monkeypatch):
        writer.append(traces.event(0))
        assert not writer.close(timeout=0.05)
        assert "stuck" in caplog.text
        assert not writer.append(traces.event(1)), "closed"
    assert writer.close()
    assert [view.kind for view in read_trace(writer.path)] == ["forward", "loss"]


@pytest.mark.parametrize("cut", [0, 100])
def test_a_full_disk_keeps_what_was_flushed(traces, monkeypatch, caplog, cut):
    writer = TraceWriter(traces.folder / "t.arrow", traces.header())
    writer.append(traces.event(0))
    assert writer.flush()
    write = os.write
    tries = []

    def fail(descriptor, data):
        tries.append(len(data))
        if len(tries) == 1 and cut:
            return write(descriptor, data[:cut])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(trace_file.os, "write", fail)
    with caplog.at_level(logging.ERROR, "kvcanary"):
        assert writer.append(traces.event(1))
        assert not writer.flush()
        assert not writer.append(traces.event(2))
        assert not writer.append(traces.event(3))
        assert not writer.close()
    monkeypatch.undo()
    assert "No space left" in writer.failed
    assert writer.stats().dropped_events == 3
    assert [record.levelname for record in caplog.records] == ["ERROR"], "said once"
    batches, gaps, complete = traces.read(writer.path)
    assert [batch.num_events for batch in batches] == [1, 1], "the second from the tail"
    assert not complete
    assert [(gap.kind, gap.missing_events, gap.ends) for gap in gaps] == [("torn", None, "cut")]
    assert writer.path.stat().st_size == batches[0].end_byte, "the half batch was cut off"


def test_a_trace_that_a_full_disk_lets_nobody_begin_leaves_no_file(traces, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(TraceError, match="the disk is full"):
            TraceWriter(tmp_path / "trace.arrow", traces.header())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"flush_bytes": 0},
        {"flush_bytes": 1 << 31},
        {"max_queued_bytes": 0},
        {"flush_interval_ns": 0},
        {"compression": "x"},
    ],
)
def test_bad_settings(traces, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TraceWriter(traces.folder / "t.arrow", traces.header(), **options)
    assert not (traces.folder / "t.arrow").exists()


@pytest.mark.parametrize(
    "event",
    [
        TraceEvent(kind="nonsense"),
        TraceEvent(kind="mark", scalars={"nonsense": 1}),
        TraceEvent(kind="mark", scalars={"event": 1}),
        TraceEvent(kind="mark", scalars={"note": 1}),
        TraceEvent(kind="mark", scalars={"forward": "1"}),
        TraceEvent(kind="mark", scalars={"forward": 1 << 63}),
        TraceEvent(kind="mark", ints={"nonsense": np.zeros(1, np.int64)}),
        TraceEvent(kind="mark", ints={"input_ids": np.zeros(1, np.int32)}),
        TraceEvent(kind="mark", ints={"input_ids": np.zeros((1, 1), np.int64)}),
        TraceEvent(kind="mark", bytes={"kv_bytes": np.zeros(1, np.int8)}),
        TraceEvent(kind="mark", bytes={"kv_bytes": b"abc"}),
        None,
    ],
)
def test_an_unfit_event_is_left_out_and_counted(traces, caplog, event):
    with TraceWriter(traces.folder / "t.arrow", traces.header()) as writer:
        assert not writer.append(event)
        assert not writer.append(event)
        assert writer.append(traces.event(0))
    assert writer.failed is None
    assert [view.kind for view in read_trace(writer.path)] == ["forward", "loss"]
    assert len(caplog.records) == 1


def test_text_that_is_no_unicode(traces):
    with TraceWriter(traces.folder / "t.arrow", traces.header()) as writer:
        writer.append(TraceEvent(kind="request", scalars={"name": "a\udcff\0b", "note": "fine é"}))
    (view,) = read_trace(writer.path)
    assert (view.scalar("name"), view.scalar("note")) == ("a?\0b", "fine é")


def test_a_forked_child_never_touches_the_file(traces):
    code = f"""
import os, sys
sys.path[:] = {sys.path!r}
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.recorder.trace.header import *
from kvcanary.recorder.trace.event import TraceEvent
header = TraceHeader(groups=(PoolGroup(name="full", num_slots=2),), tables=(StateTable(rows=1, width=1),))
writer = TraceWriter({str(traces.folder / "t.arrow")!r}, header)
assert writer.append(TraceEvent(kind="mark"))
writer.changed.acquire()  # as if the writer's thread held it at the fork
child = os.fork()
if child == 0:
    assert not writer.append(TraceEvent(kind="mark"))
    assert not writer.flush() and not writer.close()
    assert "forked" in writer.failed
    sys.exit(7)  # runs atexit
writer.changed.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""  # the parent ends without close(): atexit writes the footer
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [view.kind for view in read_trace(traces.folder / "t.arrow")] == ["mark"]


def test_kill_dash_nine(traces):
    path = traces.folder / "t.arrow"
    code = f"""
import sys, itertools
sys.path[:] = {sys.path!r}
import numpy as np
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.recorder.trace.header import *
from kvcanary.recorder.trace.event import TraceEvent
header = TraceHeader(groups=(PoolGroup(name="full", num_slots=2),), tables=(StateTable(rows=1, width=1),))
writer = TraceWriter({str(path)!r}, header, flush_bytes=50_000)
for number in itertools.count():
    values = np.arange(100, dtype=np.int64) + number
    writer.append(TraceEvent(kind="forward", scalars={{"forward": number}}, ints={{"input_ids": values}}))
    if number % 1000 == 999:
        assert writer.flush()
        print(number + 1, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    flushed = 0
    for _ in range(5):
        flushed = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    flushed = max([flushed, *map(int, child.stdout.read().split())])
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    batches, gaps, complete = traces.read(path)
    numbers = [view.scalar("forward") for batch in batches for view in batch]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= flushed >= 5000
    assert all((view.ints("input_ids") == np.arange(100) + view.number).all() for batch in batches for view in batch)
    assert not complete and [gap.kind for gap in gaps] == ["torn"]


def test_a_clock_that_was_set_back_does_not_date_what_was_lost_last(traces, monkeypatch):
    path = traces.folder / "t.arrow"
    writer = TraceWriter(path, traces.header())
    writer.append(TraceEvent(kind="mark", time_ns=5_000))
    monkeypatch.setattr(writer_module.time, "time_ns", lambda: 1_000)
    assert not writer.append(TraceEvent(kind="nonsense", time_ns=6_000))
    writer.end("and nobody knows what")
    assert writer.close()
    told = [(event.kind, event.scalar("lost_events"), event.scalar("time_ns")) for event in read_trace(path)]
    assert [kind for kind, _, _ in told] == ["mark", "loss", "loss"]
    assert [lost for _, lost, _ in told] == [0, 1, -1]
    times = [time_ns for _, _, time_ns in told]
    assert times == sorted(times)
