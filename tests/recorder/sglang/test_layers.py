"""Forwards of a model on the CPU are looked at around its layers: what it was called with, and what it left behind."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.engines.sglang.layers import ROW_READERS, backend_of
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.trace.schema import ATTENTION_LENS, ATTENTION_SLOTS
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .fake_engine import MHATokenToKVPool, ModelRunner, hooked, serve

Backend = type(ROW_READERS[0], (), {})


class Layers:
    """The fake runner's own forward becomes its model's, called with a copy of the batch; `break_at` damages a forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before = self.inside = self.after = lambda runner, batch: None
        self.count = 0
        self.calls_model = True
        self.recurrent = False
        self.backend = Backend
        compute, init = ModelRunner._forward_raw, ModelRunner.__init__

        def built(runner: Any) -> None:
            init(runner)
            runner.device = "cpu"
            runner.attn_backend = self.backend()
            runner.attn_backend.req_to_token_pool = runner.req_to_token_pool
            if self.recurrent:
                runner.attn_backend = SimpleNamespace(full_attn_backend=runner.attn_backend)

            def forward(input_ids: Any, positions: Any, forward_batch: Any) -> Any:
                self.inside(runner, forward_batch)
                return compute(runner, forward_batch)

            runner.model = SimpleNamespace(forward=forward)
            self.attachment.on_load(runner)(None, None)

        def forward_raw(runner: Any, batch: Any) -> Any:
            self.count += 1
            own = copy.copy(batch)
            for name in ("input_ids", "positions", "seq_lens"):
                setattr(own, name, getattr(batch, name).clone())
            self.before(runner, own)
            result = runner.model.forward(own.input_ids, own.positions, own) if self.calls_model else None
            if result is None:
                result = compute(runner, own)
            self.after(runner, own)
            return result

        monkeypatch.setattr(ModelRunner, "__init__", built)
        monkeypatch.setattr(ModelRunner, "_forward_raw", forward_raw)

    def serve(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
        self.attachment = hooked(monkeypatch, RecordingSettings(folder=folder))
        serve()
        self.attachment.close()
        (trace,) = folder.glob("*.arrow")
        return trace


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Layers:
    monkeypatch.setattr(sglang_attachment.SglangAttachment, "end_with_process", lambda _: None)
    monkeypatch.setattr(sglang_attachment, "not_applied", list)
    return Layers(monkeypatch)


def _judged(trace: Path) -> Any:
    return replay(trace, settings=ReplaySettings(), report=None)


@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent layers too"])
def test_a_healthy_engine_is_clean_and_its_attention_is_watched(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recurrent: bool
) -> None:
    layers.recurrent = recurrent
    trace = layers.serve(monkeypatch, tmp_path)
    forwards = [event for event in read_trace(trace) if event.kind == "forward"]
    assert len(forwards) == layers.count > 8
    assert {event.scalar("attention_watched") for event in forwards} == {ATTENTION_LENS | ATTENTION_SLOTS}
    assert {event.scalar("note") for event in forwards} == {""}
    with TraceReader(trace) as reader:
        assert not reader.header.not_watched
    assert {event.scalar("submitted_watched") for event in forwards} == {2}
    assert _judged(trace).verdict.value == "clean"


@pytest.mark.parametrize("lost", [False, True])
def test_what_a_pool_stores_otherwise_than_it_is_given_is_found(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: bool
) -> None:
    store = MHATokenToKVPool.set_kv_buffer

    def stores(pool: Any, layer: Any, loc: Any, cache_k: Any, cache_v: Any) -> None:
        if layers.count != 8:
            store(pool, layer, loc, cache_k, cache_v)
        elif not lost:
            store(pool, layer, loc, cache_k + pool.k_buffer[0][loc] + 1.0, cache_v)

    monkeypatch.setattr(MHATokenToKVPool, "set_kv_buffer", stores)
    summary = _judged(layers.serve(monkeypatch, tmp_path))
    assert summary.findings_by_kind.get("write_damaged")
    assert summary.first_finding["forward"] == 7


def test_pools_that_store_otherwise_are_not_watched(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(MHATokenToKVPool, "store_dtype", torch.uint8)
    trace = layers.serve(monkeypatch, tmp_path)
    with TraceReader(trace) as reader:
        assert [(entry.what, entry.name) for entry in reader.header.not_watched] == [("submitted", "target")]


def test_what_the_model_was_called_with_is_what_is_judged(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong_copy(runner: Any, batch: Any) -> None:
        if layers.count == 8:
            batch.input_ids[0] += 1

    layers.before = wrong_copy
    assert _judged(layers.serve(monkeypatch, tmp_path)).findings_by_kind.get("input_not_truth") == 1


def test_damage_behind_the_last_layer_is_no_write(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def flip(runner: Any, batch: Any) -> None:
        if layers.count == 8:
            runner.token_to_kv_pool.k_buffer[0][batch.out_cache_loc[-1], 0, 0] += 1.0

    layers.after = flip
    summary = _judged(layers.serve(monkeypatch, tmp_path))
    assert summary.violations > 0


def test_a_table_that_is_wrong_only_inside_the_forward_is_seen(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: list[Any] = []

    def swap(runner: Any, batch: Any) -> None:
        if layers.count == 8:
            table = runner.req_to_token_pool.req_to_token
            kept.extend((int(batch.req_pool_indices[0]), int(table[batch.req_pool_indices[0], 1])))
            table[kept[0], 1] = table[kept[0], 2]

    def back(runner: Any, batch: Any) -> None:
        if layers.count == 8:
            runner.req_to_token_pool.req_to_token[kept[0], 1] = kept[1]

    layers.before, layers.after = swap, back
    summary = _judged(layers.serve(monkeypatch, tmp_path))
    assert kept
    assert summary.violations > 0


@pytest.mark.parametrize("off", [-1, 1])
def test_a_wrong_length_of_a_decode_is_found(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, off: int
) -> None:
    def wrong(runner: Any, batch: Any) -> None:
        if layers.count == 8:
            batch.seq_lens[0] += off

    layers.before = wrong
    assert _judged(layers.serve(monkeypatch, tmp_path)).findings_by_kind == {"attention_lens": 1}


def test_a_backends_own_table_is_found_also_if_it_is_overwritten_between_the_layers(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def overwrite(runner: Any, batch: Any) -> None:
        if layers.count == 8:
            table = runner.req_to_token_pool.req_to_token.clone()
            table[batch.req_pool_indices[0], 1] = 77
            runner.attn_backend.req_to_token_pool = SimpleNamespace(req_to_token=table)

    def back(runner: Any, batch: Any) -> None:
        runner.attn_backend.req_to_token_pool = runner.req_to_token_pool

    layers.inside, layers.after = overwrite, back
    assert _judged(layers.serve(monkeypatch, tmp_path)).findings_by_kind == {"attention_slots": 1}


def test_an_unknown_backend_is_named_and_not_read(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers.backend = type("FancyBackend", (), {})
    trace = layers.serve(monkeypatch, tmp_path)
    assert {e.scalar("attention_watched") for e in read_trace(trace) if e.kind == "forward"} == {0}
    with TraceReader(trace) as reader:
        assert [entry.name for entry in reader.header.not_watched] == ["target: FancyBackend"]
    assert _judged(trace).verdict.value == "clean"


def test_a_model_that_is_never_called_is_told_from_outside(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers.calls_model = False
    trace = layers.serve(monkeypatch, tmp_path)
    summary = _judged(trace)
    assert summary.forwards == layers.count


def test_a_model_that_raises_ends_its_forward(layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(runner: Any, batch: Any) -> None:
        if layers.count == 8:
            raise RuntimeError("the model failed")

    layers.inside = fail
    with pytest.raises(RuntimeError, match="the model failed"):
        layers.serve(monkeypatch, tmp_path)
    layers.attachment.close()
    (trace,) = tmp_path.glob("*.arrow")
    notes = [event.scalar("note") for event in read_trace(trace) if event.kind == "forward"]
    assert len(notes) == 8
    assert "the model failed" in notes[-1]


def test_a_hybrid_backend_is_asked_which_part_runs() -> None:
    part = object()
    hybrid = SimpleNamespace(_select_backend=lambda mode: part if mode == "decode" else None)
    batch = SimpleNamespace(forward_mode="decode", attn_backend=hybrid)
    assert backend_of(SimpleNamespace(), batch) is part
