"""What makes a recording keep what it has: a call, a signal, a file; and the flight recorder that it is kept from."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.process.freezing import FreezeFile, FreezeSignal
from kvcanary.recorder.process.settings import WriterSettings
from kvcanary.recorder.state import keyframe
from kvcanary.recorder.state.apply import RecordedState
from kvcanary.recorder.state.keyframe import keyframe_events
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.files import split_segment_name
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.writing.segments import Segments
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.run.replay import ReplaySettings, replay

HEADER = TraceHeader(groups=(PoolGroup(name="full", num_slots=8),), tables=(StateTable(rows=2, width=8),))


def writer_of(path: Path, **options) -> TraceWriter:
    return TraceWriter(path, HEADER, flush_interval_ns=1 << 60, **options)


def mark(number: int) -> TraceEvent:
    return TraceEvent(kind="mark", time_ns=number, scalars={"note": f"{number} {'x' * 200}"})


def write_segments(writer: TraceWriter, first: int, count: int) -> None:
    for number in range(first, first + count):
        assert writer.append(mark(number))
        assert writer.flush()


def numbers(folder: Path) -> list[int]:
    return sorted(split[1] for path in folder.glob("*.arrow") if (split := split_segment_name(path)))


def marks(folder: Path) -> list[str]:
    return [
        event.scalar("note").split(" ")[0]
        for path in sorted(folder.glob("*.arrow"))
        for event in read_trace(path)
        if event.kind == "mark"
    ]


def wait_for(what) -> None:
    while not what():
        time.sleep(0.01)


def test_only_the_last_segments_are_kept(tmp_path: Path) -> None:
    with writer_of(tmp_path / "t.arrow", segment_bytes=1, keep_segments=3) as writer:
        write_segments(writer, 0, 10)
        assert numbers(tmp_path) == [6, 7, 8, 9]
    assert marks(tmp_path) == ["6", "7", "8", "9"]
    for path in tmp_path.glob("*.arrow"):
        with TraceReader(path) as reader:
            assert reader.complete


def test_disk_use_is_bounded(tmp_path: Path) -> None:
    with writer_of(tmp_path / "t.arrow", segment_bytes=1, keep_bytes=80_000) as writer:
        for number in range(25):
            write_segments(writer, number, 1)
            sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.arrow"))]
            assert sum(sizes[:-1]) <= 80_000
    assert 1 < len(sizes) < 25


def test_one_finished_segment_stays_whatever_its_size(tmp_path: Path) -> None:
    with writer_of(tmp_path / "t.arrow", segment_ns=1, keep_bytes=1) as writer:
        write_segments(writer, 0, 4)
        assert numbers(tmp_path) == [2, 3]


def test_a_frozen_past_is_not_deleted(tmp_path: Path) -> None:
    with writer_of(tmp_path / "t.arrow", segment_bytes=1, keep_segments=2) as writer:
        write_segments(writer, 0, 5)
        assert writer.append(mark(5))
        assert writer.freeze("odd answer")
        assert writer.flush()
        wait_for(lambda: writer.stats().frozen)
        write_segments(writer, 6, 5)
        (folder,) = map(Path, writer.stats().frozen)
    assert folder.parent == tmp_path
    # What was queued when the call came is in it, the mark comes last.
    assert marks(folder)[-2:] == ["5", "frozen:"]
    assert numbers(folder) == [3, 4, 5]
    assert len(numbers(tmp_path)) == 3
    assert min(numbers(tmp_path)) > 5


def test_a_segment_that_somebody_deleted_costs_a_freeze_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with writer_of(tmp_path / "t.arrow", segment_bytes=1, keep_segments=3) as writer:
        write_segments(writer, 0, 5)
        (tmp_path / "t.000001.arrow").unlink()
        assert writer.freeze("odd answer")
        wait_for(lambda: writer.stats().frozen)
        (folder,) = map(Path, writer.stats().frozen)
    assert numbers(folder) == [2, 3, 4]
    assert "t.000001.arrow: is gone" in caplog.text


def test_what_is_frozen_is_there_before_a_full_disk_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(tmp_path / "t.arrow", segment_bytes=1, keep_segments=3)
    write_segments(writer, 0, 3)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Segments, "_keyframe_batches", full)
    assert writer.freeze("odd answer")
    wait_for(lambda: writer.failed)
    (folder,) = tmp_path.glob("t.frozen-*")
    assert numbers(folder) == [0, 1, 2]
    assert not writer.close()


def test_a_keyframe_that_cannot_be_made_ends_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(recorded: RecordedState, *, time_ns: int) -> Iterator[TraceEvent]:
        yield next(keyframe_events(recorded, time_ns=time_ns))
        raise MemoryError

    monkeypatch.setattr(keyframe, "keyframe_events", broken)
    with writer_of(tmp_path / "t.arrow", segment_bytes=1) as writer:
        write_segments(writer, 0, 3)
    assert writer.failed is None
    assert marks(tmp_path) == ["0", "1", "2"]
    for number, reason in enumerate(("", "no keyframe stands before event", "no keyframe stands before event")):
        (gap,) = replay(tmp_path / f"t.{number:06d}.arrow", settings=ReplaySettings(), report=None).gaps or [""]
        assert gap.startswith(reason)


def test_a_freeze_of_a_single_file_leaves_a_mark(tmp_path: Path) -> None:
    with writer_of(tmp_path / "t.arrow") as writer:
        assert writer.append(mark(0))
        assert writer.freeze("why")
    assert [event.scalar("note")[:11] for event in read_trace(tmp_path / "t.arrow")][-1] == "frozen: why"
    assert not writer.freeze("too late")


def test_freezes_asked_for_together_are_one(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "t.arrow", segment_bytes=1, keep_segments=2)
    write_segments(writer, 0, 1)
    with writer.changed:  # the writer's thread must wait
        writer.freeze("one")
        writer.freeze("two")
    wait_for(lambda: writer.stats().frozen)
    assert writer.close()
    assert len(writer.stats().frozen) == 1
    last = [event.scalar("note") for event in read_trace(sorted(Path(writer.stats().frozen[0]).iterdir())[-1])]
    assert "frozen: one; two" in last


def test_a_file_that_appears_freezes_once(tmp_path: Path) -> None:
    trigger = tmp_path / "freeze"
    writers = [
        writer_of(tmp_path / f"{name}.arrow", segment_bytes=1, keep_segments=2, freeze_file=trigger) for name in "ab"
    ]
    for writer in writers:
        write_segments(writer, 0, 2)
    staged = tmp_path / "staged"
    staged.write_text("request 9f2c\nand more\n")
    staged.rename(trigger)
    for writer in writers:  # each process sees it, whoever of them takes it
        wait_for(lambda writer=writer: writer.stats().frozen)
    assert not trigger.exists()
    assert (tmp_path / "freeze.seen").exists()
    trigger.touch()
    for writer in writers:
        wait_for(lambda writer=writer: len(writer.stats().frozen) == 2)
        assert writer.close()
        assert len(writer.stats().frozen) == 2
    notes = [e.scalar("note") for p in tmp_path.glob("a.0*.arrow") for e in read_trace(p) if e.kind == "mark"]
    folders = [Path(folder) for folder in writers[0].stats().frozen]
    notes += [e.scalar("note") for folder in folders for p in folder.iterdir() for e in read_trace(p)]
    assert "frozen: request 9f2c" in notes
    assert "frozen: file freeze" in notes


def test_a_file_taken_before_us_is_not_for_us(tmp_path: Path) -> None:
    (tmp_path / "freeze.seen").touch()
    assert FreezeFile(tmp_path / "freeze").asked() is None


def test_a_file_nobody_took_is_for_us(tmp_path: Path) -> None:
    (tmp_path / "freeze").write_text("left behind")
    trigger = FreezeFile(tmp_path / "freeze")
    assert trigger.asked() == "left behind"
    assert trigger.asked() is None


def test_a_signal_freezes_and_its_old_handler_is_called(tmp_path: Path) -> None:
    came = []
    before = signal.signal(signal.SIGUSR2, lambda *_: came.append("old"))
    try:
        ours = signal.getsignal(signal.SIGUSR2)
        writer = writer_of(tmp_path / "t.arrow", segment_bytes=1, keep_segments=2, freeze_signal=signal.SIGUSR2)
        write_segments(writer, 0, 2)
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for(lambda: writer.stats().frozen)
        assert came == ["old"]
        assert writer.close()
        assert signal.getsignal(signal.SIGUSR2) is ours
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_without_a_name_freezes_too() -> None:
    number = signal.SIGRTMIN + 5
    before = signal.getsignal(number)
    ours = FreezeSignal(number)
    try:
        os.kill(os.getpid(), number)
        wait_for(lambda: ours.asked() == f"signal {int(number)}")
    finally:
        ours.remove()
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_no_handler_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    made: list[FreezeSignal] = []
    thread = threading.Thread(target=lambda: made.append(FreezeSignal(signal.SIGUSR2)))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert "outside the main thread" in caplog.text
    made[0].remove()


def test_a_handler_put_over_ours_stays(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    ours = FreezeSignal(signal.SIGUSR2)

    def theirs(*_: object) -> None:
        pass

    try:
        signal.signal(signal.SIGUSR2, theirs)
        ours.remove()
        assert signal.getsignal(signal.SIGUSR2) is theirs
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    "wrong",
    [{"keep_segments": 2}, {"segment_bytes": -1}, {"keep_bytes": 5}, {"segment_bytes": 100, "keep_bytes": 99}],
)
def test_settings_that_make_no_sense(wrong: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected 0 or more|need segments|not one finished segment would fit"):
        WriterSettings(**wrong)
    with pytest.raises(ValueError, match=r"expected 0 or more|need segments|not one finished segment would fit"):
        writer_of(tmp_path / "t.arrow", **wrong)
    assert not list(tmp_path.iterdir())


def test_segments_of_another_recording_are_not_mixed_with_ours(tmp_path: Path) -> None:
    with writer_of(tmp_path / "t.arrow", segment_bytes=1) as writer:
        write_segments(writer, 0, 4)
    with pytest.raises(TraceError, match="it exists"):
        writer_of(tmp_path / "t.arrow", segment_bytes=1)
    with writer_of(tmp_path / "t.arrow", segment_bytes=1, overwrite=True) as writer:
        write_segments(writer, 0, 2)
    assert numbers(tmp_path) == [0, 1]


def test_an_old_segment_begins_another(tmp_path: Path) -> None:
    with writer_of(tmp_path / "t.arrow", segment_ns=1) as writer:
        write_segments(writer, 0, 3)
    assert numbers(tmp_path) == [0, 1, 2]
    ids = set()
    expected = 0
    for path in sorted(tmp_path.glob("*.arrow")):
        with TraceReader(path) as reader:
            ids.add(reader.header.trace_id)
            assert reader.header.first_event == expected
        expected += sum(1 for _ in read_trace(path))
        assert path.stat().st_mode & 0o777 == 0o600
    assert len(ids) == 1


def test_a_folder_of_the_files_name_freezes_nothing_and_keeps_its_own(tmp_path: Path) -> None:
    trigger = FreezeFile(tmp_path / "freeze")
    (tmp_path / "freeze").mkdir()
    assert trigger.asked() is None
    (tmp_path / "freeze").rmdir()
    (tmp_path / "freeze").write_text("odd")
    assert trigger.asked() == "odd"


def test_a_link_is_no_way_to_another_files_first_line(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a password\n")
    (tmp_path / "freeze").symlink_to(tmp_path / "secret")
    assert FreezeFile(tmp_path / "freeze").asked() == "file freeze"
