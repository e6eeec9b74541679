"""Who records and when: the same everywhere, within a budget, around an incident; and how an engine is left alone else."""

import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvcanary.recorder.engines.common.hooking import Wraps, wrap_method
from kvcanary.recorder.engines.transformers import attach_from_environment
from kvcanary.recorder.engines.transformers import attachment as attachment_module
from kvcanary.recorder.engines.transformers.attachment import TransformersAttachment
from kvcanary.recorder.engines.transformers.recording import TransformersRecording
from kvcanary.recorder.process.settings import RecordingSettings, hashed_place
from kvcanary.recorder.trace.inspect import inspect_trace
from kvcanary.recorder.writing.sampling import BUDGET_FILE, Budget, Windows
from kvcanary.recorder.writing.writer import TraceWriter

from ..support.engines.documented_engine import judged
from ..support.engines.tiny_models import generate, model
from ..support.hand_made import HEADER, event
from ..support.raw_traces import cut
from ..support.segment_runs import run as segments_replayed


def test_the_choice_is_the_same_everywhere_and_for_ever() -> None:
    # printf 'window\0f\0s\07' | sha256sum
    assert hashed_place("window", "f", "s", "7") == 0xA9497A894805D0DE / 2**64
    assert hashed_place("server", "f", "s") != hashed_place("server", "fs", "")


def test_shares_are_kept_and_who_is_chosen_at_one_percent_is_at_five() -> None:
    one, five = (RecordingSettings(folder=Path("/t"), server="s", sample_windows=share) for share in (0.01, 0.05))
    chosen = [{number for number in range(20_000) if settings.window_chosen(number)} for settings in (one, five)]
    assert 150 < len(chosen[0]) < 250
    assert 900 < len(chosen[1]) < 1100
    assert chosen[0] < chosen[1]
    servers = [
        RecordingSettings(folder=Path("/t"), server=f"s{i}", sample_servers=0.1).server_chosen for i in range(2000)
    ]
    assert 150 < sum(servers) < 250


def test_a_budget_is_one_for_all_who_record_there_and_outlives_them(tmp_path: Path) -> None:
    assert Budget(tmp_path).spend(10, "2026-11-22") == 10
    assert Budget(tmp_path).spend(5, "2026-11-22") == 15
    assert Budget(tmp_path).spend(0, "2026-11-23") == 0
    (tmp_path / BUDGET_FILE).write_text("nonsense")
    assert Budget(tmp_path).spend(7, "2026-11-23") == 7
    (tmp_path / BUDGET_FILE).unlink()
    (tmp_path / BUDGET_FILE).mkdir()
    own = Budget(tmp_path)
    assert [own.spend(3, "2026-11-23"), own.spend(4, "2026-11-23")] == [3, 7]


def test_windows_a_budget_and_what_a_freeze_keeps(tmp_path: Path) -> None:
    settings = RecordingSettings(
        folder=tmp_path,
        server="s",
        sample_windows=0.5,
        window_seconds=60,
        bytes_a_day=1 << 17,
        freeze_file=tmp_path / "freeze",
    )
    sampler = Windows(settings)
    day = 1_000 * 86_400.0
    wanted = {}
    for number in range(10):
        sampler.look(day + 60 * number)
        wanted[number] = sampler.wanted
    assert wanted == {number: settings.window_chosen(int(day) // 60 + number) for number in range(10)}
    assert set(wanted.values()) == {True, False}
    asleep = next(number for number, want in wanted.items() if not want)
    with TraceWriter(tmp_path / "a.arrow", HEADER) as writer:
        sampler.begun(SimpleNamespace(path=writer.path, outbox=SimpleNamespace(writer=writer)))
    (tmp_path / "freeze").write_text("odd answer\n")
    sampler.look(day + 60 * asleep)
    assert (sampler.wanted, sampler.reason) == (True, "incident")
    (kept,) = tmp_path.glob("a.frozen-*/a.arrow")
    assert kept.stat().st_ino == (tmp_path / "a.arrow").stat().st_ino
    with TraceWriter(tmp_path / "b.arrow", HEADER) as writer:
        sampler.begun(SimpleNamespace(path=writer.path, outbox=SimpleNamespace(writer=writer)))
        sampler.look(day + 60 * asleep + 119)
        assert sampler.wanted
        writer.append(event("mark", {"note": os.urandom(1 << 17).hex()}))
        assert writer.flush()
        sampler.look(day + 60 * asleep + 119)
        assert not sampler.wanted, "the budget is spent"
    chosen = next(n for n in range(99) if settings.window_chosen(int(day) // 60 + n))
    sampler.look(day + 60 * chosen)
    assert sampler.reason == "window"
    sampler.look(day + 60 * asleep + 120)
    assert [*tmp_path.glob("b.frozen-*/b.arrow")], "what followed is kept as well"
    sampler.look(day + 86_400 + 60 * next(n for n in range(99) if settings.window_chosen(int(day) // 60 + 1440 + n)))
    assert sampler.wanted, "another day"


def test_what_was_wrapped_is_as_it_was() -> None:
    class Engine:
        def step(self) -> int:
            return 1

    one, two, faults = Engine(), Engine(), []
    two.step = own = lambda: 2  # type: ignore[method-assign]
    with Wraps() as wraps:
        for engine in (one, two):
            assert wrap_method(engine, "step", lambda: None, lambda *fault: faults.append(fault))
    assert (one.step(), two.step()) == (1, 2)
    assert vars(one)
    wraps.undo()
    assert (vars(one), two.step) == ({}, own)
    with wraps:
        wrap_method(one, "step", lambda: None, lambda *_: None)
    one.step = lambda: 3  # type: ignore[method-assign]  # by somebody else, around ours
    wraps.undo()
    assert one.step() == 3


def test_a_server_that_is_not_chosen_sets_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCANARY_TRACE", str(tmp_path))
    monkeypatch.setenv("KVCANARY_SAMPLE_SERVERS", "0%")
    assert attach_from_environment() is None


@pytest.mark.usefixtures("engine_left_as_it_was")
def test_windows_of_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = model("llama")
    expected = generate(subject, max_new_tokens=8)
    monkeypatch.setattr(Windows, "start", lambda _: None)  # the test says when
    for name, value in (("TRACE", str(tmp_path)), ("SAMPLE_WINDOWS", "1%"), ("FLEET", "f"), ("SERVER", "s")):
        monkeypatch.setenv(f"KVCANARY_{name}", value)
    attachment = attach_from_environment()
    assert attachment is not None
    with attachment:
        for attachment.windows.wanted in (False, True, False, True):
            assert generate(subject, max_new_tokens=8, keep_manager=True) == expected
        subject.destroy_cached_continuous_batching_manager()
    first, second = sorted(tmp_path.glob("*.arrow"), key=lambda path: path.stat().st_mtime_ns)
    for path in (first, second):
        found = inspect_trace(path)
        assert (found.state, found.num_losses) == ("complete", 0)
        sampling = found.header.sampling
        assert sampling is not None
        assert (sampling.fleet, sampling.server, sampling.windows, sampling.reason) == ("f", "s", 0.01, "window")
        summary = judged(path)
        assert (summary.violations, summary.findings, summary.num_losses, summary.doubts) == (0, 0, 0, [])
        assert "what the engine had cached before" in [row.words for row in summary.coverage]
        assert summary.to_json()["sampling"]["window_seconds"] == 300
    segments = cut(second, tmp_path / "cut.arrow", seed=1, least=2, most=4)
    assert len(segments) > 2
    verdict = segments_replayed(segments, tmp_path / "report").summary.verdict.value
    assert verdict == "clean", "what the keyframes do not know is no loss"


@pytest.mark.usefixtures("engine_left_as_it_was")
@pytest.mark.parametrize("when", ["opening", "in a step"])
def test_a_window_that_another_engine_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """What a trace has is without gaps: an engine that begins it then, or is in a step, is in no other window with it."""
    subject = model("llama")
    expected = generate(subject, max_new_tokens=8)
    monkeypatch.setattr(Windows, "start", lambda _: None)  # the test says when
    for name, value in (("TRACE", str(tmp_path)), ("SAMPLE_WINDOWS", "1%"), ("FLEET", "f"), ("SERVER", "s")):
        monkeypatch.setenv(f"KVCANARY_{name}", value)
    names = itertools.count()
    monkeypatch.setattr(time, "strftime", lambda *_: f"{next(names)}")
    attachment = attach_from_environment()
    assert attachment is not None
    place, name = {
        "opening": (attachment_module, "begin_new"),
        "in a step": (TransformersRecording, "_begin_forward"),
    }[when]
    original, calls = getattr(place, name), itertools.count()

    def and_then_the_window_ends(*args: Any) -> Any:
        result = original(*args)
        if next(calls) == (0 if when == "opening" else 3):
            attachment.windows.wanted = False
            attachment.on_step(object(), None)  # another engine's
        return result

    monkeypatch.setattr(place, name, and_then_the_window_ends)
    with attachment:
        for attachment.windows.wanted in (True, False, True):
            assert generate(subject, max_new_tokens=8, keep_manager=True) == expected
        subject.destroy_cached_continuous_batching_manager()
    traces = sorted(tmp_path.glob("*.arrow"), key=lambda path: path.stat().st_mtime_ns)
    assert len(traces) == 2
    assert not [path for path in traces if path.stem.endswith("-1")], "each window has a name of its own"
    forwards = []
    for path in traces:
        assert (inspect_trace(path).state, inspect_trace(path).num_losses) == ("complete", 0)
        summary = judged(path)
        assert (summary.violations, summary.findings) == (0, 0)
        assert "what forwards wrote that failed" not in str(summary.coverage)
        forwards.append(summary.forwards)
    assert forwards[0] == (0 if when == "opening" else 4)


class Part:
    """A processor, as far as an attachment knows it."""


@pytest.fixture
def begun(tmp_path: Path) -> Any:
    """An attachment in a window, what it records, and of which processor."""
    attachment, closed = TransformersAttachment(tmp_path / "t.arrow", {}), list[str]()
    attachment.windows, attachment._active = SimpleNamespace(wanted=True), True
    recorder: Any = SimpleNamespace(
        close=lambda **_: closed.append("closed"), switch_off=lambda *_: closed.append("off"), error_text=str
    )
    recording: Any = SimpleNamespace(recorder=recorder, in_step=False, window=0)
    processor = Part()
    attachment._recorders.append(recorder)
    attachment._recordings[processor] = recording
    yield attachment, recording, processor, closed
    for thread in attachment._closing:
        thread.join()


def test_an_engine_that_is_given_up_in_a_window_is_let_go_of(begun: Any) -> None:
    attachment, _, processor, closed = begun
    manager = SimpleNamespace(batch_processor=processor)
    finish = attachment.on_stop(manager)
    manager.batch_processor = None
    finish(None, None)
    assert closed[0] == "closed"
    assert (attachment.recorders(), list(attachment._recordings)) == ([], [])


def test_a_step_that_cannot_be_recorded_when_another_engine_has_ended_the_window(begun: Any) -> None:
    attachment, recording, processor, closed = begun

    def before_step(*_: Any) -> None:
        attachment.windows.wanted = False
        attachment.on_step(object(), None)  # another engine's
        assert closed == [], "it is in a step"
        raise ValueError("of the recorder")

    recording.before_step = before_step
    attachment._wrapped(lambda *_: None, "on_step")(processor, None)
    for thread in attachment._closing:
        thread.join()
    assert closed == ["off", "closed"]
    assert (attachment.recorders(), list(attachment._recordings)) == ([], [])
