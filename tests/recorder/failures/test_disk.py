"""Disks that are full, gone, closed to us, slow or stuck, under a running engine."""

import dataclasses
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.writing.segments import SingleFile
from kvcanary.recorder.writing.writer import TraceWriter

from ...support.subject import assert_inconclusive, judged, logged, make_engine, serve, unrecorded
from .disks import OFTEN, PipeDisk, files_of_at_most


def assert_stopped(engine: SimulatedEngine, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    assert reason in engine.recorder.stats().off
    (line,) = logged(caplog)
    assert reason in line
    assert "the engine goes on" in line


def write_the_first_steps(step: int, engine: SimulatedEngine) -> None:
    """Wait for the writer, which a busy machine may leave behind by more than what the disk takes."""
    if step < 6:
        engine.recorder.outbox.writer.flush()


def write_each_step(step: int, engine: SimulatedEngine) -> None:
    """Have the writer begin one segment after another, which it would not where it wrote all that waits at once."""
    engine.recorder.outbox.writer.flush()


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = unrecorded(tmp_path)
    engine = make_engine(tmp_path / "t.arrow", **OFTEN)
    with files_of_at_most(100_000):
        assert serve(engine, write_the_first_steps) == expected
        engine.close()
    assert_stopped(engine, caplog, "File too large")
    summary = assert_inconclusive(tmp_path / "t.arrow")
    assert summary.forwards > 2
    assert (tmp_path / "t.arrow").stat().st_size <= 100_000


def test_a_folder_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = unrecorded(tmp_path)
    (tmp_path / "traces").mkdir()
    engine = make_engine(tmp_path / "traces" / "t.arrow", segment_bytes=30_000, **OFTEN)

    def remove(step: int, engine: SimulatedEngine) -> None:
        if step == 10:
            # At once: the writer may begin a segment while the files are deleted one by one.
            shutil.rmtree((tmp_path / "traces").rename(tmp_path / "gone"))
        write_each_step(step, engine)

    assert serve(engine, remove) == expected
    engine.close()
    assert_stopped(engine, caplog, "folder does not exist")


def test_a_trace_that_somebody_deletes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = unrecorded(tmp_path)
    engine = make_engine(tmp_path / "t.arrow", **OFTEN)

    def remove(step: int, engine: SimulatedEngine) -> None:
        if step == 10:
            (tmp_path / "t.arrow").unlink()
        write_each_step(step, engine)

    assert serve(engine, remove) == expected
    engine.close()
    assert_stopped(engine, caplog, "somebody has deleted the trace")
    assert "nothing of it is left" in logged(caplog)[0]


def test_a_folder_that_may_no_longer_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = unrecorded(tmp_path)
    folder = tmp_path / "traces"
    folder.mkdir()
    engine = make_engine(folder / "t.arrow", segment_bytes=30_000, **OFTEN)
    root = os.geteuid() == 0

    def close_it(step: int, engine: SimulatedEngine) -> None:
        if step == 10:
            folder.chmod(0o500)
            if root:  # root may write anywhere
                os.seteuid(65534)
        write_each_step(step, engine)

    try:
        assert serve(engine, close_it) == expected
        engine.close()
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)
    assert_stopped(engine, caplog, "may not be written by this user")
    segments = sorted(folder.glob("*.arrow"))
    assert segments
    for segment in segments:
        summary = judged(segment)
        assert (summary.violations, summary.findings) == (0, 0)
    assert judged(segments[-1]).verdict.value == "inconclusive"


def test_a_disk_that_goes_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = unrecorded(tmp_path)
    disk = PipeDisk(tmp_path / "pipe", at_most=100_000)
    engine = make_engine(tmp_path / "pipe", overwrite=True, **OFTEN)
    assert serve(engine, write_the_first_steps) == expected
    engine.close()
    assert_stopped(engine, caplog, "Broken pipe")
    assert assert_inconclusive(disk.save(tmp_path / "t.arrow")).forwards > 2


def test_a_slow_disk_costs_events_and_neither_memory_nor_outputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = unrecorded(tmp_path)
    bound = 60_000
    disk = PipeDisk(tmp_path / "pipe", allowed=20_000)
    engine = make_engine(tmp_path / "pipe", overwrite=True, max_queued_bytes=bound, flush_bytes=8000, **OFTEN)
    queued = []

    def watch(_: int, engine: SimulatedEngine) -> None:
        queued.append(engine.recorder.outbox.writer.stats().queued_bytes)
        disk.allow(2000)

    assert serve(engine, watch) == expected
    disk.hurry()
    engine.close()
    assert max(queued) <= bound
    stats = engine.recorder.stats()
    assert stats.off == "closed"
    assert stats.dropped_events > 0
    assert logged(caplog) == []
    summary = assert_inconclusive(disk.save(tmp_path / "t.arrow"))
    assert summary.num_losses > 0
    assert 0 < summary.forwards < stats.forwards


@pytest.mark.parametrize("error", [MemoryError, SystemExit, KeyboardInterrupt])
def test_a_writer_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    expected = unrecorded(tmp_path)
    write, calls = SingleFile.write, []

    def failing(self: SingleFile, events: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise error("injected")
        write(self, events)

    monkeypatch.setattr(SingleFile, "write", failing)
    engine = make_engine(tmp_path / "t.arrow", **OFTEN)

    assert serve(engine, write_the_first_steps) == expected
    engine.close()
    assert_stopped(engine, caplog, f"{error.__name__}: injected")
    assert assert_inconclusive(tmp_path / "t.arrow").forwards > 0


def test_a_writer_that_is_stuck_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = unrecorded(tmp_path)
    go_on = threading.Event()
    write = SingleFile.write

    def stuck(self: SingleFile, events: Any) -> None:
        go_on.wait()
        write(self, events)

    monkeypatch.setattr(SingleFile, "write", stuck)
    engine = make_engine(tmp_path / "t.arrow", max_queued_bytes=50_000, **OFTEN)
    assert serve(engine) == expected
    engine.recorder.close(timeout=0.01)
    (line,) = logged(caplog)
    assert "the disk is stuck; the trace may be torn" in line
    assert assert_inconclusive(tmp_path / "t.arrow").forwards == 0
    go_on.set()
    assert engine.recorder.outbox.writer.close()
    # The writer takes from the queue once: before it is full, or behind a first loss.
    assert assert_inconclusive(tmp_path / "t.arrow").num_losses in (1, 2)


def test_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def failing(self: threading.Thread) -> None:
        if self.name == "kvcanary-writer":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises(TraceError, match=r"t\.arrow: cannot be written: can't start new thread"):
        make_engine(tmp_path / "t.arrow")


def test_a_recorder_that_switches_itself_off_ends_its_file_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = unrecorded(tmp_path)
    engine = make_engine(tmp_path / "t.arrow")
    writer: TraceWriter = engine.recorder.outbox.writer

    def fault(step: int, engine: SimulatedEngine) -> None:
        if step == 10:
            engine.recorder.slots("lend", group=0, slots=[1])

    assert serve(engine, fault) == expected
    writer.thread.join()  # nobody closed it
    (line,) = logged(caplog)
    assert "switched itself off" in line
    summary = assert_inconclusive(tmp_path / "t.arrow")
    assert summary.complete
    assert summary.num_losses == 1
    engine.close()


def test_a_full_queue_has_no_room_to_say_that_the_recorder_is_off(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "t.arrow", flush_interval_ns=3_600_000_000_000)
    writer: TraceWriter = engine.recorder.outbox.writer

    def fault(step: int, engine: SimulatedEngine) -> None:
        if step == 10:
            brim = writer.stats().queued_bytes
            writer.settings = dataclasses.replace(
                writer.settings, max_queued_bytes=brim
            )  # full to the brim, and nothing dropped so far
            engine.recorder.slots("lend", group=0, slots=[1])

    serve(engine, fault)
    engine.close()
    assert assert_inconclusive(tmp_path / "t.arrow").num_losses == 1
