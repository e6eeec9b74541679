"""What whoever sends a request may choose, and objects of the engine's that misbehave: the engine goes on, so does the trace."""

import threading
from pathlib import Path
from typing import Any

import pytest
from kvcanary.recorder.engines.sglang import recording as sglang_recording
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from ...support.subject import SilentError
from .fake_engine import SLOTS, ModelRunner, Request, Scheduler, TokenToKVPoolAllocator, hooked, serve

pytestmark = pytest.mark.usefixtures("process_goes_on")


def served(rid: str, room: int | None) -> list[list[int]]:
    """Run a plain request, one with this name and room, and another plain one."""
    scheduler = Scheduler(ModelRunner(), TokenToKVPoolAllocator(SLOTS - 1, 1))
    requests = [Request(name, [i + 3, 5, 40], new_tokens=4) for i, name in enumerate(("first", rid, "last"))]
    requests[1].bootstrap_room = room
    for request in requests:
        scheduler.step([request])
    while running := [request for request in requests if not request.finished()]:
        scheduler.step(running)
    return [request.output_ids for request in requests]


NAMES = ["", "a\0b", "\ud800", "naïve ☃", "r" * 1_000_000]
ROOMS = [0, 2**63 - 1, 2**63, 2**64, -(2**70), -5]


@pytest.mark.parametrize(
    ("rid", "room"), [*((rid, None) for rid in NAMES), *(("a", room) for room in ROOMS)], ids=lambda it: ascii(it)[:9]
)
def test_any_name_and_any_room_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rid: str, room: int | None
) -> None:
    expected = served(rid, room)
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    assert served(rid, room) == expected
    assert attachment.recording is not None
    attachment.recording.recorder.close()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    (path,) = tmp_path.glob("*.arrow")
    names = [event.scalar("name") for event in read_trace(path) if event.kind == "request"]
    assert [names[0], names[2]] == ["first", "last"]
    assert len(names[1]) <= 1024
    rooms = [event.scalar("room") for event in read_trace(path) if event.kind == "request"]
    assert (rooms[1] == -1) == (room is None)
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert (summary.verdict.value, summary.num_losses, summary.forwards) == ("clean", 0, 6)


@pytest.mark.parametrize("name", ["on_model", "on_run", "on_result", "on_rows"])
def test_an_error_that_cannot_be_told_does_not_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    expected, _ = serve()
    others = threading.enumerate()

    def fail(*_: Any) -> None:
        raise SilentError

    fails = {"on_model": "before_model", "on_run": "runs", "on_result": "takes", "on_rows": "got_row"}[name]
    owner = sglang_recording.StepResults if fails == "takes" else sglang_recording.SglangRecording
    monkeypatch.setattr(owner, fails, fail)
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    output, _ = serve()
    assert output == expected
    if attachment.recording is not None:
        attachment.recording.recorder.close()
    for thread in threading.enumerate():  # one that was switched off ends its file by itself
        if thread.name == "kvcanary-writer" and thread not in others:
            thread.join()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "SilentError" in line
    (path,) = tmp_path.glob("*.arrow")
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict.value == "inconclusive"
    assert summary.num_losses >= 1


def test_two_processes_may_have_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_recording, "trace_name", lambda *_: "sglang-20261122T020000-dp0-pp0-tp0-7.arrow")
    for options in ({}, {}, {"segment_ns": 10**12}, {"segment_ns": 10**12}):
        with monkeypatch.context() as patch:
            attachment = hooked(patch, RecordingSettings(folder=tmp_path, **options))
            serve()
            assert attachment.recording is not None
            attachment.recording.recorder.close()
    name = "sglang-20261122T020000-dp0-pp0-tp0-7"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{name}-1.000000.arrow",
        f"{name}-1.arrow",
        f"{name}.000000.arrow",
        f"{name}.arrow",
    ]
    for path in tmp_path.iterdir():
        assert replay(path, settings=ReplaySettings(), report=None).verdict.value == "clean"
        assert path.stat().st_mode & 0o777 == 0o600
