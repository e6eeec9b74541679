"""How far back layers with a sliding window look, by what the engine's attention hands to its kernel."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.engines.sglang.layers import ROW_READERS
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .fake_engine import MHATokenToKVPool, ModelRunner, hooked, serve

WINDOW = 2
DAMAGED = 8  # which forward is damaged


class SWAKVPool(SimpleNamespace):
    """Keeps both parts alike."""

    def set_kv_buffer(self, layer: Any, *states: Any) -> None:
        for part in (self.full_kv_pool, self.swa_kv_pool):
            part.set_kv_buffer(SimpleNamespace(layer_id=0), *states)


def scaled_dot_product_attention(*_: Any, **__: Any) -> None:
    """Stands for torch's, as the backend's module has it."""


class Attention:
    """Hands to the kernel what SGLang's does: all of a request, with its window's mask."""

    wrong = staticmethod(lambda given: given)

    def __init__(self, runner: Any) -> None:
        self.req_to_token_pool = runner.req_to_token_pool
        self.count = 0

    def forward(self, _q: Any, _k: Any, _v: Any, layer: Any, batch: Any, *_: Any) -> None:
        self.count += layer.layer_id == 3
        decodes = batch.forward_mode.name == "DECODE"
        for end in batch.seq_lens.tolist():
            queries, keys = torch.arange(end)[-1 if decodes else 0 :, None], torch.arange(end)
            given = {"attn_mask": (keys <= queries) & (keys >= queries - layer.sliding_window_size), "keys": end}
            if self.count == DAMAGED:
                given = type(self).wrong(given)
            query, key = torch.zeros(1, 1, len(queries), 4), torch.zeros(1, 1, given.pop("keys"), 4)
            # Looked up anew, as the engine's own module does.
            vars(sys.modules[__name__])[KERNEL](query, key, key, **given)


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
        swa = MHATokenToKVPool(**{name: [part[0].clone()] for name, part in vars(full).items() if name != "page_size"})
        swa.page_size = 1
        lut = torch.arange(len(full.k_buffer[0]) + 1)
        runner.token_to_kv_pool = SWAKVPool(
            full_kv_pool=full,
            swa_kv_pool=swa,
            full_to_swa_index_mapping=lut,
            layers_mapping={0: (0, False), 3: (0, True), 5: (1, True)},
        )
        runner.sliding_window_size, runner.device, runner.attn_backend = WINDOW, "cpu", backend(runner)

        def forward(input_ids: Any, positions: Any, forward_batch: Any) -> Any:
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
    return {"keys": min(given["keys"], WINDOW + 2), "attn_mask": None}


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
