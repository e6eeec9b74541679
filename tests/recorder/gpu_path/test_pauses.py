"""When the recorder's threads run: in the pauses of an engine's thread that says when it waits, and what does not wait for one."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from kvcanary.recorder.capture.device import background, capture
from kvcanary.recorder.capture.device import pauses as module
from kvcanary.recorder.capture.device.frame_reader import FrameReader
from kvcanary.recorder.capture.device.pauses import Pauses

from .two_recorders import Engine, follow


@pytest.fixture
def own() -> Pauses:
    return Pauses()


@pytest.fixture
def engine(tmp_path) -> Iterator[Engine]:
    yield Engine(tmp_path, np.random.default_rng(1))


def thread_of(work) -> tuple[threading.Thread, threading.Event]:
    """Run `work` on a thread of its own; the event is set at its end."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: (work(), done.set()))
    thread.start()
    return thread, done


def decode(engine, count):
    for position in range(count):
        slot = position + 1
        engine.table[1, position] = slot
        engine.truth[1].all.append(position + 7)
        engine.forward("decode", [1], [position], [1], [slot], [position], [position])


def test_nobody_waits_for_pauses_that_nobody_tells_of(own: Pauses) -> None:
    own.pace().breathe()
    own.pace().await_pause()


def test_a_thread_stops_until_the_next_pause_begins(own: Pauses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 600)
    pace = own.pace()
    own.begin()
    pace.breathe()
    own.end()
    thread, done = thread_of(pace.await_pause)
    assert not done.wait(0.05)
    own.begin()
    thread.join(60)
    assert done.is_set()


def test_who_is_in_a_hurry_waits_for_no_pause(own: Pauses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 600)
    pace, hurry = own.pace(), threading.Event()
    pace.in_hurry = hurry.is_set
    own.begin()
    own.end()
    thread, done = thread_of(pace.await_pause)
    hurry.set()
    pace.wake()
    thread.join(60)
    assert done.is_set()


def test_pauses_that_do_not_come_are_waited_for_no_longer(own: Pauses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.001)
    own.begin()
    own.end()
    own.pace().await_pause()
    assert not own.known
    own.begin()
    assert own.known


def test_several_frames_are_fetched_and_written_at_once(engine, monkeypatch):
    """The trace is the same as the host's recorder's, which writes each by itself."""
    fetch, fetched = FrameReader.fetch, []
    monkeypatch.setattr(FrameReader, "fetch", lambda self, frames: fetched.append(fetch(self, frames)) or fetched[-1])
    writer, written = engine.device.recorder.outbox.writer, []
    append = writer.append
    monkeypatch.setattr(
        writer, "append", lambda *events, **more: written.append(len(events)) or append(*events, **more)
    )
    gate = engine.hold_frames()
    engine.device.pauses.begin()
    decode(engine, 12)
    gate.set()
    engine.device.drain()
    host, device = engine.close()
    assert [event["truth"] for event in device] == [event["truth"] for event in host]
    assert follow(engine, device) == (list(range(12)), 0, 0)
    assert max(map(len, fetched)) > 1
    assert max(written) > 1


def test_a_drain_waits_for_no_pause(engine, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 600)
    engine.device.pauses.begin()
    engine.device.pauses.end()
    decode(engine, 5)
    assert engine.device.drain(timeout=60)
    decode(engine, 5)
    host, device = engine.close()
    assert len(device) == len(host) == 10


def test_frames_that_pile_up_wait_for_no_pause(engine, monkeypatch):
    """An engine that hardly waits for its device leaves no pause that is long enough for what it does meanwhile."""
    monkeypatch.setattr(module, "PATIENCE_S", 600)
    monkeypatch.setattr(capture, "MANY_IN_FLIGHT", 3)
    engine.device.pauses.begin()
    engine.device.pauses.end()
    gate = engine.hold_frames()
    decode(engine, 12)
    gate.set()
    engine.device._background.wake()  # as patience does that is up
    end = time.monotonic() + 20
    while engine.device.capture.crowded and time.monotonic() < end:
        time.sleep(0.001)
    assert not engine.device.capture.crowded
    assert engine.device.drain()
    host, device = engine.close()
    assert [event["truth"] for event in device] == [event["truth"] for event in host]


def test_the_writer_waits_for_no_pause_when_its_queue_fills(engine, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 600)
    writer = engine.device.recorder.outbox.writer
    engine.device.pauses.begin()
    engine.device.pauses.end()
    monkeypatch.setattr(writer, "has_room", lambda size: size < writer.settings.max_queued_bytes // 2)
    thread, done = thread_of(writer.file.breathe)
    thread.join(10)
    assert done.is_set()
    monkeypatch.undo()
    engine.close()


def test_what_is_queued_without_forwards_does_not_pile_up(engine, monkeypatch):
    """No forward comes, but something else does in every moment, so that the engine is never idle."""
    monkeypatch.setattr(background, "MOST_TOGETHER", 10)
    monkeypatch.setattr(background, "IDLE_NS", 600_000_000_000)
    seen = []
    for number in range(100):
        engine.device.later(seen.append, number)
    end = time.monotonic() + 20
    while len(seen) < 90 and time.monotonic() < end:
        time.sleep(0.001)
    assert seen == list(range(len(seen)))
    assert len(seen) >= 90
    engine.close()


def test_nobody_waits_for_a_pause_of_an_engine_that_goes_on_after_the_end():
    pauses = Pauses()
    pauses.begin()
    assert pauses.known
    pauses.stop()
    pauses.begin()
    pauses.end()
    assert not pauses.known
