"""Asynchronous batching, on the real engine: its steps overlap, and tokens of the step before are filled in when one runs.

It asks for a device with streams; here each stream does at once what it is given, so that the order is that of one stream.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import ReplaySettings, replay
from transformers.generation.continuous_batching import (
    continuous_api,
    input_outputs,
    model_runner,
    offloading_manager,
)

from ..support.engines.tiny_models import PROMPTS, generate, model
from .hooked_engine import assert_clean

MODELS = ("llama", "gemma3_hybrid", "mistral_sliding")
AsyncIOs = input_outputs.ContinuousBatchingAsyncIOs

pytestmark = pytest.mark.usefixtures("engine_left_as_it_was", "streams")


class AtOnce:
    """A stream, and an event of one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing is under way."""

    def record_event(self, _: Any) -> None:
        """It is over."""

    wait_event = record_event


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncIOs, "_supported_device_types", ("cpu",))
    monkeypatch.setattr(torch, "Event", AtOnce)
    monkeypatch.setattr(input_outputs, "create_device_stream", lambda _: AtOnce())
    for module in (input_outputs, model_runner, continuous_api, offloading_manager):
        monkeypatch.setattr(module, "stream_context", lambda _: nullcontext())
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_identical_and_the_trace_is_clean(tmp_path: Path, name: str) -> None:
    subject = model(name)
    expected = generate(subject, max_new_tokens=40)
    assert generate(subject, max_new_tokens=40, use_async_batching=True) == expected
    with attach(tmp_path / "trace.arrow") as attachment:
        assert generate(subject, max_new_tokens=40, use_async_batching=True) == expected
    assert attachment.recorder is not None
    assert attachment.recorder.stats().off == "closed"
    summary = assert_clean(tmp_path / "trace.arrow")
    assert summary.requests == len(PROMPTS)
    forwards = [event for event in read_trace(tmp_path / "trace.arrow") if event.kind == "forward"]
    fed = {token for event in forwards for token in event.ints("input_ids").tolist()}
    assert {token for answer in expected for token in answer[:-1]} <= fed


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 3, "do_sample": True},
        {"num_blocks": 20, "max_batch_tokens": 13, "safety_margin": 0.0, "max_new_tokens": 40},
        {"num_blocks": 14, "max_batch_tokens": 64, "safety_margin": 0.0, "max_new_tokens": 50, "cpu_offload_space": 0.01},
        {"eos_token_id": list(range(0, 512, 5)), "max_new_tokens": 60},
    ],
    ids=["forks", "resets", "offload", "ends"],
)  # fmt: skip
def test_what_happens_beside_the_forwards_is_clean(tmp_path: Path, options: dict[str, Any]) -> None:
    subject, prompts = model("llama"), [list(range(10 + i, 40 + i)) for i in range(4)]
    expected = generate(subject, prompts, use_async_batching=True, **options)
    with attach(tmp_path / "trace.arrow"):
        assert generate(subject, prompts, use_async_batching=True, **options) == expected
    assert_clean(tmp_path / "trace.arrow")


def test_tokens_that_are_filled_in_for_another_request_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infer, calls = AsyncIOs.infer_carry_over_ids, []

    def swapped(io: Any) -> Any:
        ids = infer(io)
        calls.append(1)
        carried = torch.nonzero(ids >= 0).flatten()
        if len(calls) == 12:
            assert len(carried) > 1
            ids[carried[:2]] = ids[carried[:2]].flip(0)
        return ids

    monkeypatch.setattr(AsyncIOs, "infer_carry_over_ids", swapped)
    with attach(tmp_path / "trace.arrow"):
        generate(model("llama"), use_async_batching=True)
    replay(tmp_path / "trace.arrow", settings=ReplaySettings(), report=tmp_path)
    rows = find_incidents(tmp_path, [tmp_path / "trace.arrow"]).rows
    assert [(row["first_forward"], row["kind"]) for row in rows] == [(11, "next_token_swap")]


def test_a_byte_that_changed_between_two_steps_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, slots = continuous_api.ContinuousBatchProcessor._generation_step, []

    def flipped(processor: Any, engine_model: Any) -> None:
        if len(slots) == 15:
            allocator = next(iter(processor.cache.cache_allocators.values()))
            block = next(iter(allocator.block_table.values()))[0]
            allocator._copy_view[block, 5] ^= 1
            slots.append(block * allocator.tokens_per_page)
        else:
            slots.append(-1)
        step(processor, engine_model)

    monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "_generation_step", flipped)
    with attach(tmp_path / "trace.arrow"):
        generate(model("llama"), use_async_batching=True)
    summary = replay(tmp_path / "trace.arrow", settings=ReplaySettings(), report=None)
    first = summary.first_violation
    assert (first["forward"], first["slot"]) == (15, slots[15])


def test_neither_oracle_nor_faults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    subject = model("llama")
    expected = generate(subject, use_async_batching=True)
    with attach(tmp_path / "trace.arrow", oracle="hash") as attachment:
        assert generate(subject, use_async_batching=True) == expected
        assert attachment.recorder is None
    errors = [record.getMessage() for record in caplog.records if record.name == "kvcanary"]
    assert len(errors) == 1
    assert "where steps overlap" in errors[0]
