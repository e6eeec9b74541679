"""What layers hand to their caches on the CPU: held against what the pool holds, and searched where the pool packs it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture.layers import watched_bytes
from kvcanary.recorder.engines.vllm import kv
from kvcanary.recorder.engines.vllm.layout import VllmLayout
from kvcanary.recorder.engines.vllm.not_watched import not_watched
from kvcanary.recorder.engines.vllm.submitted import SubmittedKv, of_tokens
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.header import KvStream
from kvcanary.recorder.trace.schema import SUBMITTED

from ...support.one_trace import events, replayed
from .fake_drafts import EagleProposer
from .fake_engine import CONTEXT, DIM, HEADS, Attention, FullAttentionSpec, GPUModelRunner, hooked, serve
from .groups import group
from .test_drafts import run

pytestmark = pytest.mark.usefixtures("process_goes_on")
DEEPER = ("model.layers.5.attn", "model.layers.6.attn")


@pytest.fixture(autouse=True)
def _three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPUModelRunner, "deeper", DEEPER)


def storing(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any, Any], None]) -> None:
    """Have `spoil(layer, slots)` change the slots that a layer stores to, out of sight of who looks at what it is handed."""
    store = Attention.do_kv_cache_update

    def update(own: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        slots = slot_mapping.clone()
        spoil(layer, slots)
        store(own, layer, key, value, kv_cache, slots)

    monkeypatch.setattr(Attention, "do_kv_cache_update", update)


@pytest.mark.parametrize("shape", [{}, {"budget": 40}, {"v2": True, "use_async": True}], ids=str)
def test_a_healthy_engine_stores_what_it_is_handed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]
) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path), v2="v2" in shape)
    serve(**shape)
    summary, header, told = replayed(tmp_path)
    assert (summary.verdict.value, summary.findings_by_kind) == ("clean", {})
    forwards = [event for event in told if event.kind == "forward"]
    assert {event.scalar("submitted_watched") for event in forwards} == {1}, "V, of the first layer"
    assert not any(len(event.bytes("kv_submitted_bytes")) for event in forwards)
    assert ("submitted", "target") not in {(one.what, one.name) for one in header.not_watched}
    samples = [(s.half, s.origin, s.layers) for s in header.groups[0].streams if s.samples]
    assert samples == [("K", "submitted", (0, 5, 6)), ("V", "stored", (0, 5, 6))]
    if "budget" in shape:
        assert any(event.scalar("status") for event in forwards), "a step of several forwards"


@pytest.mark.parametrize("deep", [False, True])
def test_a_write_that_is_lost_is_found_in_its_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    lost: list[int] = []
    runners: list[Any] = []

    def spoil(layer: Any, slots: Any) -> None:
        if CONTEXT.attn_metadata is None:  # of no forward
            return
        names, number = (
            DEEPER if deep else ("model.layers.0.attn",),
            attachment.recordings[runners[-1]].recorder.next_forward,
        )
        if (
            any(layer is runners[-1].layers[name] for name in names)
            and len(slots) > 2
            and lost in ([], [number], [number] * 2)
        ):
            lost.append(number)
            slots[:] = -1

    storing(monkeypatch, spoil)
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve(each_step=lambda runner, *_: runners.append(runner))
    summary, _, told = replayed(tmp_path)
    assert lost
    assert summary.findings_by_kind["write_damaged"]
    damaged = [event.scalar("forward") for event in told if len(event.bytes("kv_submitted_bytes"))]
    assert damaged == [lost[0] - 1]


def test_values_that_are_stored_as_others_from_the_start_on_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Attention.do_kv_cache_update

    def update(own: Any, layer: Any, key: Any, value: Any, *into: Any) -> None:
        store(own, layer, key, 2 * value, *into)

    monkeypatch.setattr(Attention, "do_kv_cache_update", update)
    monkeypatch.setattr(kv, "_KEEP_BITS", ("",))  # the fake's layers have no instruction set
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve()
    summary, _, told = replayed(tmp_path)
    assert set(summary.findings_by_kind) == {"write_damaged"}
    first = next(event for event in told if event.kind == "forward")
    assert len(first.bytes("kv_submitted_bytes"))


def test_what_a_draft_hands_in_is_held_against_its_own_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def spoil(_layer: Any, slots: Any) -> None:
        if CONTEXT.slot_mapping is not None:  # of the draft
            calls.append(len(slots))
            if len(calls) == 5:
                slots[:] = -1

    storing(monkeypatch, spoil)
    summary, _, told = run(tmp_path, EagleProposer(), caching=False)
    drafts = [event for event in told if event.kind == "forward" and event.scalar("runner") == 1]
    assert {event.scalar("submitted_watched") for event in drafts} == {1}
    assert sum(len(event.bytes("kv_submitted_bytes")) > 0 for event in drafts) == 1
    assert set(summary.findings_by_kind) == {"write_damaged"}


@pytest.mark.parametrize(("value", "cause"), [(np.nan, "nan"), (0.0, "handed_zeros")])
def test_k_that_the_pool_packs_is_searched_as_it_is_handed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, cause: str
) -> None:
    steps: list[int] = []
    forward = GPUModelRunner._model_forward

    def model_forward(runner: Any, input_ids: Any, positions: Any) -> None:
        steps.append(len(input_ids))
        if len(steps) == 15:
            layer = runner.layers[DEEPER[1]]
            update = layer.impl.do_kv_cache_update

            def once(of: Any, key: Any, *given: Any) -> None:
                layer.impl.do_kv_cache_update = update
                key[-1] = value
                update(of, key, *given)

            layer.impl.do_kv_cache_update = once
        forward(runner, input_ids, positions)

    monkeypatch.setattr(GPUModelRunner, "_model_forward", model_forward)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve(caching=False)
    summary, _, told = replayed(tmp_path)
    assert summary.findings_by_kind == {"bad_values": 1}
    (event,) = [event for event in told if len(event.ints("value_layer"))]
    assert event.ints("value_layer").tolist() == [6]
    kinds = {"nan": 0, "handed_zeros": 2}
    assert event.ints("value_kind").tolist() == [kinds[cause]]


@pytest.mark.parametrize("kept", ["as another type", "in another layout"])
def test_what_is_not_compared_is_said(tmp_path: Path, kept: str) -> None:
    runner = GPUModelRunner([FullAttentionSpec()], 8)
    layout = VllmLayout(runner, RecordingSettings(folder=tmp_path))
    assert layout.kv.compares(0)
    for layer in runner.layers.values():
        own = layer.kv_cache
        layer.kv_cache = own.half() if kept == "as another type" else torch.zeros(2, 8, own.shape[2], HEADS, DIM)
    layout = VllmLayout(runner, RecordingSettings(folder=tmp_path))
    assert "stored" in {stream.origin for stream in layout.kv.streams[0]}
    assert not layout.kv.compares(0)
    (entry,) = [one for one in not_watched(runner, layout, SimpleNamespace(not_read=()), ()) if one.what == "submitted"]
    assert entry.name == "target"


def handed_in() -> tuple[SubmittedKv, Any]:
    """Return what keeps the K that two layers hand in, and what is read from it."""
    given = SubmittedKv(group(8), 3, (3, 4))
    stream = given.sampling_stream("K", HEADS * DIM * 4, seed=5, dtype="float32")
    given.streams = (KvStream(half="V", layer=3, bytes_per_token=32, capture_bytes=16, dtype="float32"), stream)
    return given, given.source(1)


def test_rows_are_matched_by_their_slots() -> None:
    given, source = handed_in()
    key, value = torch.rand(2, 5, HEADS, DIM)
    slots = np.array([9, 10, 31, -1, 11])
    given.on_update(3, {"K": key, "V": value}, slots)
    given.on_update(4, {"K": 1 + key, "V": value}, slots[::-1].copy())
    found = given.take(slots[:3])  # what is padded behind a forward's tokens
    assert found.keys() == {(0, 0), (0, 1)}
    assert found[0, 1].keys() == {3}, "the other layer was given other slots"
    np.testing.assert_array_equal(found[0, 0].view(np.float32), value[:3, 0, :4])
    np.testing.assert_array_equal(of_tokens(found, np.array([2]))[0, 1][3].view(np.float32), key[2:3].flatten(1))
    assert given.take(slots) == {}, "each forward has its own"
    given.on_update(3, {"K": key, "V": value}, slots[:2])
    assert given.take(slots) == {}

    looked = watched_bytes(slots, seed=5, num_layers=2, num_chunks=HEADS * DIM // 4, backend="cpu")
    for token, (slot, (layer, piece)) in enumerate(zip(slots.tolist(), looked.tolist(), strict=True)):
        if slot >= 0:
            row = 1 + key[len(slots) - 1 - token] if layer else key[token]
            held = source.tensor[slot].view(np.float32)
            np.testing.assert_array_equal(held, row.flatten()[4 * piece : 4 * piece + 4])


def test_values_of_another_type_are_not_what_is_stored() -> None:
    given, source = handed_in()
    slots = np.arange(8, 40)
    for layer in (3, 4):
        given.on_update(layer, dict.fromkeys("KV", torch.rand(32, HEADS, DIM)), slots)
    assert source.tensor[8:40].any(axis=1).all()
    for layer in (3, 4):
        given.on_update(layer, dict.fromkeys("KV", torch.rand(32, HEADS, DIM).half()), slots)
    assert given.take(slots) == {}
    assert not source.tensor.any()
    assert given.streams[1].origin == SUBMITTED


def test_without_samples_the_first_layer_alone_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path, all_layers="off"))
    serve()
    header, told = events(tmp_path)
    assert not any(stream.samples for stream in header.groups[0].streams)
    assert {event.scalar("submitted_watched") for event in told if event.kind == "forward"} == {1}
