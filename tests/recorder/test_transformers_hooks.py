"""The transformers adapter's hooks: what goes wrong on our side stays on our side, and nothing is left behind."""

import gc
import logging
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.engines.transformers.recording import TransformersRecording
from transformers.generation.continuous_batching import continuous_api, offloading_manager

from ..support.engines.documented_engine import judged
from ..support.engines.tiny_models import generate, model
from .hooked_engine import event_notes

MODELS = ("llama", "gemma3_hybrid", "mistral_sliding")

pytestmark = pytest.mark.usefixtures("engine_left_as_it_was")

FORKS = {"num_return_sequences": 2, "do_sample": True, "top_k": 1}
RECORDING_METHODS: dict[str, dict[str, Any]] = {
    "before_step": {},
    "after_step": {},
    "on_free": {},
    "on_complete": {},
    "on_evict": {"num_blocks": 20, "safety_margin": 0.0, "max_batch_tokens": 64, "max_new_tokens": 40},
    "on_fork": FORKS,
    "on_copy": FORKS,
    "on_offload": {"offload": True},
    "on_restore": {"offload": True},
}
BOTH_SIDES = [(name, late) for name in RECORDING_METHODS for late in (False, True)[: 1 + name.startswith("on_")]]


@pytest.mark.parametrize(("name", "late"), BOTH_SIDES)
@pytest.mark.one_in(3)
def test_a_fault_in_a_hook_leaves_the_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, late: bool
) -> None:
    options = dict(RECORDING_METHODS[name])
    if options.pop("offload", False):
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
        options |= {"num_blocks": 14, "safety_margin": 0.0, "max_new_tokens": 50, "cpu_offload_space": 0.01}
    subject = model("llama")
    prompts = [list(range(10 + i, 40 + i)) for i in range(4)] if "cpu_offload_space" in options else None
    expected = generate(subject, prompts, **options)
    called: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        called.append(1)
        raise RuntimeError("injected")

    monkeypatch.setattr(TransformersRecording, name, (lambda *_, **__: fail) if late else fail)
    caplog.set_level(logging.ERROR, "kvcanary")
    with attach(tmp_path / "trace.arrow") as attachment:
        assert generate(subject, prompts, **options) == expected
    assert called
    assert attachment.recorder is not None
    assert "injected" in attachment.recorder.stats().off
    errors = [record for record in caplog.records if record.name == "kvcanary"]
    assert len(errors) == 1
    assert "switched itself off" in errors[0].getMessage()
    kinds = event_notes(tmp_path / "trace.arrow")
    assert any(kind.startswith("loss the recorder switched itself off") for kind in kinds)
    summary = judged(tmp_path / "trace.arrow")
    assert summary.complete
    assert summary.verdict.value == "inconclusive"
    assert (summary.violations, summary.findings) == (0, 0)


def test_a_session_that_cannot_begin_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subject = model("llama")
    expected = generate(subject)
    with attach(tmp_path / "trace.arrow", layers=(0, 7)) as attachment:
        assert generate(subject) == expected
        assert attachment.recorder is None
    errors = [record.getMessage() for record in caplog.records if record.name == "kvcanary"]
    assert errors == ["kvcanary: not recording: ValueError: layers [7] asked for, the model has 2 cached layers"]


def test_only_one_attachment_at_a_time(tmp_path: Path) -> None:
    with attach(tmp_path / "a.arrow") as attachment:
        with pytest.raises(ValueError, match="already recording to"):
            attach(tmp_path / "b.arrow")
        attachment.detach()
        attachment.detach()
        with attach(tmp_path / "b.arrow"):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capture_bytes": 8}, "multiple of 16"),
        ({"capture_bytes": -16}, "multiple of 16"),
        ({"kv_watch_every": -1}, "-1"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attach(tmp_path / "trace.arrow", **options)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.arrow").write_text("precious")
    with pytest.raises(FileExistsError):
        attach(tmp_path / "trace.arrow")


def test_an_engine_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(offloading_manager.OffloadingManager, "_offload_to_cpu")
    with pytest.raises(ValueError, match=r"no OffloadingManager\._offload_to_cpu"):
        attach(tmp_path / "trace.arrow")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.17.0")
    with pytest.raises(ValueError, match=r"^this transformers is 5\.17\.0; recording it needs 5\.18 or later"):
        attach(tmp_path / "trace.arrow")
    monkeypatch.undo()


def test_wrapped_by_someone_else_meanwhile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    owner = continuous_api.ContinuousBatchProcessor
    original = owner._generation_step
    attachment = attach(tmp_path / "trace.arrow")
    ours = owner._generation_step
    owner._generation_step = lambda processor, subject: ours(processor, subject)
    subject = model("llama")
    expected = generate(subject)
    attachment.detach()
    assert generate(subject) == expected  # ours still lies below, and passes through
    assert len(attachment.paths) == 1
    owner._generation_step = original
    assert "was wrapped again" in caplog.text


def test_the_engines_memory_is_let_go(tmp_path: Path) -> None:
    found: list[weakref.ref[Any]] = []
    step = TransformersRecording.before_step

    def look(recording: TransformersRecording, processor: Any, model: Any) -> None:
        if not found:
            found.extend([weakref.ref(processor.cache), weakref.ref(processor)])
        step(recording, processor, model)

    with attach(tmp_path / "trace.arrow"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersRecording, "before_step", look)
        generate(model("llama"))
        gc.collect()
        assert [ref() for ref in found] == [None, None]
