"""What layers with a sliding window read, by what the engine's attention hands to its kernel."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.engines.sglang.layers import ROW_READERS
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .fake_engine import DIM, HEADS, SLOTS, MHATokenToKVPool, ModelRunner, hooked, serve

WINDOW = 2
DAMAGED = 8  # which forward is damaged


class SWAKVPool(SimpleNamespace):
    """Each layer's K and V are the tokens' and positions' own."""

    def store(self, batch: Any) -> None:
        k = (batch.input_ids + 100 * batch.positions).float()[:, None, None].expand(-1, HEADS, DIM)
        for number, (at, sliding) in self.layers_mapping.items():
            part = self.swa_kv_pool if sliding else self.full_kv_pool
            slots = self.full_to_swa_index_mapping[batch.out_cache_loc] if sliding else batch.out_cache_loc
            part.set_kv_buffer(SimpleNamespace(layer_id=at), slots, k + number, -k)

    def set_kv_buffer(self, *_: Any) -> None:
        """Store nothing: it has been."""


def scaled_dot_product_attention(*_: Any, **__: Any) -> None:
    """Stands for torch's, as the backend's module has it."""


class Attention:
    """Hands to the kernel what SGLang's does: all of a request, with its window's mask."""

    wrong = staticmethod(lambda given: given)

    def __init__(self, runner: Any) -> None:
        self.req_to_token_pool, self.pool = runner.req_to_token_pool, runner
        self.count = 0

    def forward(self, _q: Any, _k: Any, _v: Any, layer: Any, batch: Any, *_: Any) -> None:
        self.count += layer.layer_id == 3
        decodes, pool = batch.forward_mode.name == "DECODE", self.pool.token_to_kv_pool
        at, sliding = pool.layers_mapping[layer.layer_id]
        part = pool.swa_kv_pool if sliding else pool.full_kv_pool
        for row, end in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            queries, keys = torch.arange(end)[-1 if decodes else 0 :, None], torch.arange(end)
            slots = self.req_to_token_pool.req_to_token[row, :end].long()
            slots = pool.full_to_swa_index_mapping[slots] if sliding else slots
            given = {"attn_mask": (keys <= queries) & (keys >= queries - layer.sliding_window_size), "slots": slots}
            given |= {"layer": layer.layer_id}
            if self.count == DAMAGED and sliding:
                given = type(self).wrong(given)
            given.pop("layer", None)
            slots = given.pop("slots")
            query = torch.zeros(1, HEADS, len(queries), DIM)
            key, value = (half[at][slots].movedim(0, 1)[None] for half in (part.k_buffer, part.v_buffer))
            key = key + given.pop("noise", 0)
            # Looked up anew, as the engine's own module does.
            vars(sys.modules[__name__])[KERNEL](query, key, value, **given)


KERNEL = "scaled_dot_product_attention"


def recorded(monkeypatch: pytest.MonkeyPatch, folder: Path, wrong: Any = None, made: int = WINDOW) -> Path:
    """Return the trace of an engine whose layer 3 is the first with a window, `made` with this one."""
    monkeypatch.setattr(sglang_attachment.SglangAttachment, "end_with_process", lambda _: None)
    monkeypatch.setattr(sglang_attachment, "not_applied", list)
    backend = type(
        ROW_READERS[0], (Attention,), {"__module__": __name__, "wrong": staticmethod(wrong or (lambda g: g))}
    )
    compute, init = ModelRunner._forward_raw, ModelRunner.__init__
    attachment = None

    def built(runner: Any) -> None:
        init(runner)
        full = runner.token_to_kv_pool
        buffers = {name: [torch.zeros(SLOTS, HEADS, DIM) for _ in range(2)] for name in ("k_buffer", "v_buffer")}
        swa = MHATokenToKVPool(**buffers, page_size=1)
        lut = torch.cat((torch.zeros(1, dtype=torch.int64), torch.arange(SLOTS - 1, 0, -1), torch.zeros(1).long()))
        runner.token_to_kv_pool = SWAKVPool(
            full_kv_pool=full,
            swa_kv_pool=swa,
            full_to_swa_index_mapping=lut,
            layers_mapping={0: (0, False), 3: (0, True), 5: (1, True)},
        )
        runner.sliding_window_size, runner.device, runner.attn_backend = WINDOW, "cpu", backend(runner)

        def forward(input_ids: Any, positions: Any, forward_batch: Any) -> Any:
            runner.token_to_kv_pool.store(forward_batch)
            for number, window in ((0, -1), (3, made), (5, made)):
                layer = SimpleNamespace(layer_id=number, sliding_window_size=window)
                runner.attn_backend.forward(None, None, None, layer, forward_batch)
            return compute(runner, forward_batch)

        runner.model = SimpleNamespace(forward=forward)
        attachment.on_load(runner)(None, None)

    monkeypatch.setattr(ModelRunner, "__init__", built)
    monkeypatch.setattr(
        ModelRunner, "_forward_raw", lambda runner, b: runner.model.forward(b.input_ids, b.positions, b)
    )
    monkeypatch.setattr(sys.modules[__name__], KERNEL, scaled_dot_product_attention)  # put back behind the test
    attachment = hooked(monkeypatch, RecordingSettings(folder=folder))
    serve()
    attachment.close()
    (trace,) = folder.glob("*.arrow")
    return trace


def windows(trace: Path) -> list[tuple[int, list[int], list[int]]]:
    return [
        (event.scalar("window_watched"), event.ints("window_start").tolist(), event.ints("window_count").tolist())
        for event in read_trace(trace)
        if event.kind == "forward"
    ]


def test_a_healthy_engine_is_clean_and_its_windows_are_watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = recorded(monkeypatch, tmp_path)
    found = windows(trace)
    assert len(found) > DAMAGED
    assert all(one == (1, [], []) for one in found)
    assert replay(trace, settings=ReplaySettings(), report=None).verdict.value == "clean"


def cut(given: dict[str, Any]) -> dict[str, Any]:
    """Hand over the keys of the last positions alone, one more than the window and the token's own."""
    return {"slots": given["slots"][-WINDOW - 2 :], "attn_mask": None}


def narrow(given: dict[str, Any]) -> dict[str, Any]:
    mask = given["attn_mask"].clone()
    mask[:, -2] = False
    return {**given, "attn_mask": mask}


@pytest.mark.parametrize(
    ("wrong", "sees"),
    [(lambda given: {**given, "attn_mask": None}, 0), (cut, WINDOW + 1), (narrow, WINDOW - 1)],
    ids=["no mask", "fewer keys, no mask", "a hole in the mask"],
)
def test_more_or_less_than_the_window_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: Any, sees: int
) -> None:
    trace = recorded(monkeypatch, tmp_path, wrong)
    watched, starts, counts = windows(trace)[DAMAGED - 1]
    assert watched == 1
    assert counts
    assert all(count == sees for count in counts) if sees else all(start == 0 for start in starts)
    summary = replay(trace, settings=ReplaySettings(), report=None)
    assert set(summary.findings_by_kind) == {"wrong_window"}
    assert summary.first_finding["forward"] == DAMAGED - 1


def oldest(given: dict[str, Any]) -> dict[str, Any]:
    """Read at the last position in front of the new token what stands at the first."""
    slots = given["slots"].clone()
    slots[-2] = slots[0]
    return {**given, "slots": slots}


def in_the_second_layer(given: dict[str, Any]) -> dict[str, Any]:
    return oldest(given) if given["layer"] == 5 else given


def shorter(given: dict[str, Any]) -> dict[str, Any]:
    """Leave out the new token."""
    return {"slots": given["slots"][:-1], "attn_mask": given["attn_mask"][:, :-1]}


def got(trace: Path, forward: int) -> list[tuple[int, int, int]]:
    """Return which position of which request got which slot, in the pool with the window."""
    (event,) = [event for event in read_trace(trace) if event.kind == "forward" and event.scalar("forward") == forward]
    names = ("group", "request", "start", "count", "slots")
    groups, requests, starts, counts, slots = (event.ints(f"attention_{name}").tolist() for name in names)
    assert set(groups) <= {1}
    cells = [(r, at) for r, s, n in zip(requests, starts, counts, strict=True) for at in range(s, s + n)]
    return [(r, at, slot) for (r, at), slot in zip(cells, slots, strict=True)]


def other_slots_seen(trace: Path) -> bool:
    """Say whether the header says that slots are seen which are not a request's, in layers with a window."""
    (entry,) = [one for one in TraceReader(trace).header.not_watched if one.name.endswith("sliding layers")]
    return "other slots than a request's are seen" in entry.reason


@pytest.mark.parametrize("wrong", [oldest, in_the_second_layer], ids=["all layers", "the second layer"])
def test_another_slot_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: Any) -> None:
    trace = recorded(monkeypatch, tmp_path, wrong)
    found = got(trace, DAMAGED - 1)
    assert other_slots_seen(trace)
    (event,) = [e for e in read_trace(trace) if e.kind == "forward" and e.scalar("forward") == DAMAGED - 1]
    assert len(found) == len(event.ints("prefix_lens")) > 1
    assert all(at == prefix - 1 for (_, at, _), prefix in zip(found, event.ints("prefix_lens").tolist(), strict=True))
    assert len({slot for *_, slot in found}) == len(found)
    summary = replay(trace, settings=ReplaySettings(), report=None)
    assert set(summary.findings_by_kind) == {"attention_slots"}
    assert summary.first_finding["forward"] == DAMAGED - 1


def by_numbers(given: dict[str, Any]) -> dict[str, Any]:
    """Read where the numbers of the pool without a window lie in the one with it, as SGLang 0.5.23 does."""
    return {**given, "slots": SLOTS - given["slots"]}


def test_by_which_pools_numbers_it_reads_is_not_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = recorded(monkeypatch, tmp_path, by_numbers)
    assert replay(trace, settings=ReplaySettings(), report=None).verdict.value == "clean"


def test_what_no_slot_holds_is_in_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = recorded(monkeypatch, tmp_path, lambda given: {**given, "noise": 0.5})
    assert {slot for *_, slot in got(trace, DAMAGED - 1)} == {-1}


def test_a_length_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = recorded(monkeypatch, tmp_path, shorter)
    summary = replay(trace, settings=ReplaySettings(), report=None)
    assert "attention_lens" in summary.findings_by_kind
    assert summary.first_finding["forward"] == DAMAGED - 1


def test_a_pool_that_stores_in_its_own_way_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(MHATokenToKVPool, "store_dtype", torch.uint8)
    trace = recorded(monkeypatch, tmp_path)
    assert not other_slots_seen(trace)
    assert replay(trace, settings=ReplaySettings(), report=None).verdict.value == "clean"


def test_a_mask_of_another_kind_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = recorded(monkeypatch, tmp_path, lambda given: {**given, "attn_mask": given["attn_mask"].float()})
    found = windows(trace)
    assert found[DAMAGED - 1] == (0, [], [])
    assert found[DAMAGED] == (1, [], [])


def test_a_layer_that_is_made_with_another_window_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = recorded(monkeypatch, tmp_path, made=WINDOW + 1)
    assert all(one == (0, [], []) for one in windows(trace))
    assert replay(trace, settings=ReplaySettings(), report=None).verdict.value == "clean"
