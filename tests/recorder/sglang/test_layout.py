"""Pools become groups and streams; what is unknown is named, not guessed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.recorder.engines.sglang.layout import SglangLayout, _scale_of, ranks_of
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.header import NotWatched

from .fake_engine import SLOTS, MHATokenToKVPool, MLATokenToKVPool, ModelRunner, SWAKVPool


def settings(**values: Any) -> RecordingSettings:
    return RecordingSettings(folder=None, **values)  # type: ignore[arg-type]


def test_a_hybrid_pool_has_two_groups_and_a_draft_its_own() -> None:
    target, draft = ModelRunner(), ModelRunner()
    full, swa = target.token_to_kv_pool, draft.token_to_kv_pool
    lut = torch.zeros(97, dtype=torch.int64)
    target.token_to_kv_pool = SWAKVPool(full_kv_pool=full, swa_kv_pool=swa, full_to_swa_index_mapping=lut)
    target.sliding_window_size = 16
    draft.is_draft_worker = True
    draft.req_to_token_pool = target.req_to_token_pool
    layout = SglangLayout([target, draft], settings())
    shown = [(g.name, g.kind, g.window, g.runner, g.table, g.lut, len(g.streams)) for g in layout.groups]
    assert shown == [
        ("full", "full", 0, 0, 0, -1, 4),
        ("swa", "swa", 16, 0, 0, 0, 4),
        ("draft_full", "full", 0, 1, 0, -1, 4),
    ]
    assert [(r.name, r.token_offset) for r in layout.names] == [("target", 0), ("draft", 1)]
    assert (len(layout.tables), len(layout.luts), layout.not_watched) == (1, 1, [])
    assert [group.num_layers for group in layout.groups] == [1, 1, 1]


def test_bytes_that_are_no_aligned_rows_are_not_captured_and_that_is_said() -> None:
    runner = ModelRunner()
    runner.token_to_kv_pool = MLATokenToKVPool(kv_buffer=[torch.zeros(20, 1, 73, dtype=torch.float64)], page_size=1)
    layout = SglangLayout([runner], settings())
    assert (layout.groups[0].halves, layout.groups[0].streams, layout.sources) == (("K",), (), {})
    reason = "target full: bytes of K: a token is no row of aligned bytes"
    assert layout.not_watched == [NotWatched(what="bytes", name="MLATokenToKVPool", reason=reason)]
    runner.token_to_kv_pool = MLATokenToKVPool(kv_buffer=[torch.zeros(20, 1, 72, dtype=torch.float64)], page_size=1)
    layout = SglangLayout([runner], settings(capture_bytes=1024))
    first, sampled = layout.groups[0].streams
    assert (first.half, first.bytes_per_token, first.capture_bytes, first.samples) == ("K", 576, 576, False)
    assert (sampled.layers, sampled.bytes_per_token, sampled.dtype) == ((0,), 576, "float64")
    layout = SglangLayout([runner], settings(all_layers="off"))
    assert len(layout.groups[0].streams) == 1


def test_positions_of_several_dimensions_are_said_not_to_be_read() -> None:
    runner = ModelRunner()
    runner.model_config.model_is_mrope = True
    assert [(one.what, one.name) for one in SglangLayout([runner], settings()).not_watched] == [
        ("other", "mrope_positions")
    ]


def test_a_pool_of_an_unknown_class_is_named_and_not_guessed() -> None:
    class PageMajorMHATokenToKVPool(MHATokenToKVPool):
        """Derived from one that is known, and laid out otherwise."""

    for pool in (object(), PageMajorMHATokenToKVPool(**vars(ModelRunner().token_to_kv_pool))):
        runner = ModelRunner()
        runner.token_to_kv_pool = pool
        layout = SglangLayout([runner], settings())
        assert layout.groups == []
        assert [(entry.what, entry.name) for entry in layout.not_watched] == [("pool", type(pool).__name__)]


def test_of_a_hybrid_linear_pool_the_full_attention_is_recorded() -> None:
    class HybridLinearKVPool(SimpleNamespace):
        """Has no buffers of its own."""

    runner = ModelRunner()
    full = MHATokenToKVPool(**vars(runner.token_to_kv_pool), size=SLOTS - 4, model_layer_ids=(3, 7))
    full.page_size = 4
    runner.token_to_kv_pool = HybridLinearKVPool(size=SLOTS - 4, page_size=4, full_kv_pool=full)
    layout = SglangLayout([runner], settings())
    (group,) = layout.groups
    assert (group.num_slots, group.page_size, group.halves) == (SLOTS, 4, ("K", "V"))
    assert [(stream.layer, stream.samples) for stream in group.streams] == [(3, False)] * 2 + [(3, True)] * 2
    assert [(entry.what, entry.name) for entry in layout.not_watched] == [("pool", "MambaPool")]


def test_bytes_beside_a_pools_own_are_named() -> None:
    class DSATokenToKVPool(MLATokenToKVPool):
        """Has an index of its own beside the latent rows."""

    runner = ModelRunner()
    runner.token_to_kv_pool = DSATokenToKVPool(kv_buffer=[torch.zeros(20, 1, 72, dtype=torch.float64)], page_size=1)
    layout = SglangLayout([runner], settings())
    assert len(layout.groups) == 1
    assert [(entry.what, entry.name) for entry in layout.not_watched] == [("bytes", "DSATokenToKVPool")]


def test_ranks_are_found_wherever_a_version_keeps_them() -> None:
    class Raising:
        def __getattr__(self, name: str) -> int:
            raise RuntimeError("not published")

    target = SimpleNamespace(tp_rank=2, server_args=SimpleNamespace(tp_size=4, dp_size=2))
    ranks = ranks_of(SimpleNamespace(pp_rank=1, dp_rank=None, ps=Raising()), target)
    assert (ranks.tp_rank, ranks.tp_size, ranks.pp_rank, ranks.dp_rank, ranks.dp_size) == (2, 4, 1, 0, 2)


@pytest.mark.parametrize(
    ("module", "scales"),
    [
        ({"k_scale": None, "v_scale": None}, (1.0, 1.0)),
        ({"k_scale": object(), "k_scale_float": 0.5, "v_scale": object(), "v_scale_float": None}, (0.5, 0.0)),
        ({"k_scale": 0.25, "v_scale": 0.5, "k_scale_float": None}, (0.25, 0.5)),  # read from a file of scales
        ({"layer_id": 4, "k_scale": None}, (0.0, 0.0)),
    ],
)
def test_scales_of_a_cache_of_8_bits_are_those_of_its_layer_s_attention(module: Any, scales: Any) -> None:
    attention = type("RadixAttention", (), {"layer_id": 3, **module})()
    runner = SimpleNamespace(model=SimpleNamespace(modules=lambda: iter([object(), attention])))
    assert tuple(_scale_of(runner, 3, half) for half in "KV") == scales
    assert _scale_of(SimpleNamespace(), 3, "K") == 0.0
