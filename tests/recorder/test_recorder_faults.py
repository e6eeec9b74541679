"""Faults in the recorder, or in how it is called: switched off, said once, and nothing for the engine to notice."""

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcanary.recorder.capture import recorder as recorder_module
from kvcanary.recorder.capture import recording
from kvcanary.recorder.capture.forward_event import StateShadow
from kvcanary.recorder.capture.kv_shadow import GroupKvShadow
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.errors import MAX_ERROR_TEXT, error_text
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.writing.writer import TraceWriter

from ..support.engines.documented_engine import a_forward, judged, run_requests, toy_engine
from ..support.subject import SilentError

BAD_CALLS = {
    "before_forward, garbage": lambda r: r.before_forward("garbage"),
    "before_forward, unknown mode": lambda r: r.before_forward(a_forward(mode="sideways")),
    "before_forward, lengths": lambda r: r.before_forward(a_forward(positions=[1])),
    "before_forward, runner": lambda r: r.before_forward(a_forward(runner=3)),
    "before_forward, tables": lambda r: r.before_forward(a_forward(out_cache_loc=())),
    "before_forward, text": lambda r: r.before_forward(a_forward(input_ids=["a", "b"])),
    "after_forward, alone": lambda r: r.after_forward(),
    "request, id": lambda r: r.request(request_id="seven"),
    "slots, kind": lambda r: r.slots("lend", group=0, slots=[1]),
    "slots, nothing": lambda r: r.slots("free", group=0),
    "kv_copy, lengths": lambda r: r.kv_copy(group=0, src=[1], dst=[2, 3], count=[1]),
    "kv_copy, group": lambda r: r.kv_copy(group=7, src=[1], dst=[2], count=[1]),
    "mark, labels": lambda r: r.mark("note", 5),
}


def _one_error(caplog: pytest.LogCaptureFixture) -> str:
    errors = [r.getMessage() for r in caplog.records if r.name == "kvcanary" and r.levelno >= logging.ERROR]
    assert len(errors) == 1, errors
    return errors[0]


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_switches_off_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    engine.add(1, "one", [3, 4], 4)
    engine.step()
    BAD_CALLS[name](engine.recorder)
    BAD_CALLS[name](engine.recorder)
    before = engine.recorder.stats()
    assert name.split(",")[0] in before.off
    engine.step()
    engine.recorder.mark("unheard")
    engine.recorder.close()
    assert "switched itself off" in _one_error(caplog)
    assert engine.recorder.stats().forwards == before.forwards
    events = list(read_trace(tmp_path / "trace.arrow"))
    assert [event.kind for event in events] == ["request", "forward", "loss"]
    assert events[-1].scalar("lost_events") == -1
    assert "switched itself off" in events[-1].scalar("note")
    assert judged(tmp_path / "trace.arrow").violations == 0


INTERNALS = {
    "copy_forward": (recorder_module, "copy_forward"),
    "forward_event": (recorder_module, "forward_event"),
    "changes": (StateShadow, "changes"),
    "commit": (StateShadow, "commit"),
    "gather": (GroupKvShadow, "gather"),
    "kv changes": (GroupKvShadow, "changes"),
    "store_written": (GroupKvShadow, "store_written"),
    "append": (TraceWriter, "append"),
}


@pytest.mark.parametrize("name", INTERNALS)
def test_a_fault_inside_never_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    healthy = toy_engine(tmp_path / "healthy.arrow")
    expected = run_requests(healthy)
    healthy.recorder.close()
    owner, attribute = INTERNALS[name]
    original = getattr(owner, attribute)
    engine = toy_engine(tmp_path / "trace.arrow")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    def break_it(step: int) -> None:
        if step == 4:
            monkeypatch.setattr(owner, attribute, fail)

    assert run_requests(engine, break_it) == expected
    monkeypatch.setattr(owner, attribute, original)
    engine.recorder.close()
    assert "injected" in engine.recorder.stats().off
    messages = [record.getMessage() for record in caplog.records]
    assert sum("switched itself off" in message for message in messages) == 1
    summary = judged(tmp_path / "trace.arrow")
    assert summary.forwards in (4, 5)  # a fault after the event was taken leaves that event in
    assert summary.violations == 0


def test_a_dead_disk_stops_the_recorder_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = toy_engine(tmp_path / "trace.arrow", flush_interval_ns=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def break_it(step: int) -> None:
        if step == 3:
            engine.recorder.outbox.writer.flush()
            monkeypatch.setattr(TraceWriter, "_write", full)
        if step == 4:
            engine.recorder.outbox.writer.flush()

    run_requests(engine, break_it)
    monkeypatch.undo()
    engine.recorder.close()
    assert "No space left" in engine.recorder.stats().off
    assert "No space left" in _one_error(caplog)


def test_an_error_that_cannot_be_told_stays_inside_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __index__(self) -> int:
            raise SilentError

    engine = toy_engine(tmp_path / "trace.arrow")
    engine.recorder.request(request_id=Broken())  # type: ignore[arg-type]
    engine.recorder.close()
    assert engine.recorder.stats().off == "request: SilentError"
    assert "switched itself off: request: SilentError" in _one_error(caplog)


def test_a_long_error_is_cut() -> None:
    assert len(error_text(ValueError("x" * 1_000_000))) == MAX_ERROR_TEXT


def test_a_forked_child_does_not_wait_to_switch_off_what_is_its_parents(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    holder, over = held_by_another_thread(engine.recorder)
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that waits
        engine.recorder.switch_off("a hook failed")
        engine.recorder.mark("nobody's")
        os._exit(7)
    over.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not engine.recorder.off
    engine.recorder.close()


def held_by_another_thread(recorder: Recorder) -> tuple[threading.Thread, threading.Event]:
    """Have another thread hold a recorder's lock, as one does that waits for a device, until the event is set."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        with recorder.lock:
            begun.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    begun.wait()
    return holder, over


@pytest.mark.parametrize("first", ["mark", "close"])
def test_nobody_waits_for_ever_for_a_thread_that_does_not_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(recording, "LOCK_PATIENCE_S", 0.01)
    monkeypatch.setattr(recording, "SHORT_PATIENCE_S", 0.01)
    engine = toy_engine(tmp_path / "trace.arrow")
    engine.add(1, "one", [3, 4], 4)
    engine.step()
    holder, over = held_by_another_thread(engine.recorder)
    if first == "mark":
        engine.recorder.mark("told meanwhile")
        engine.step()
    engine.recorder.close()  # of its 30 seconds none are for that thread
    assert holder.is_alive()
    assert "has not come back from the recorder for 0.01 s" in _one_error(caplog)
    over.set()
    holder.join()
    engine.recorder.close()
    summary = judged(tmp_path / "trace.arrow")
    assert (summary.complete, summary.verdict.value, summary.num_losses) == (True, "inconclusive", 1)


def test_numbers_of_numpys_and_labels_of_any_kind_are_taken(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    nothing: list[int] = []
    engine.recorder.sweep(
        groups=nothing, slots=nothing, positions=nothing, prev_slots=nothing, locked=nothing, runner=np.int64(0)
    )
    engine.recorder.mark("labels", {1: 2, "a": 3})  # type: ignore[dict-item]
    engine.recorder.close()
    assert engine.recorder.stats().dropped_events == 0
    assert [event.kind for event in read_trace(tmp_path / "trace.arrow")] == ["sweep", "mark"]
