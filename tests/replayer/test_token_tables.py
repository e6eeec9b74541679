"""The table of tokens against the definition, which computes each: what fits the table is right by the definition, always."""

import numpy as np
import pytest
import torch
from kvcanary.kernels.ops.token_rows.reference import FILLED, FITS, Encoding
from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.trace.header import Ranks
from kvcanary.replayer.model import token_tables
from kvcanary.replayer.model.first_layer import FirstLayer, of_rank
from kvcanary.replayer.model.token_tables import TokenTables

from ..conformance.shapes import write_checkpoint

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "max_position_embeddings": 600,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MLA = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 150}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "layer_types": ["sliding_attention"], "query_pre_attn_scalar": 16}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.5}),
    "glm4": ("Glm4Config", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "cohere": ("CohereConfig", {}),
    "mla": ("DeepseekV3Config", {"num_key_value_heads": 4, "first_k_dense_replace": 1, **MLA}),
}
ROUND_ELSE = {
    "yarn",
    "cohere",
}  # scaled at position 0, too, and in float32 throughout: computed one by one where in doubt
TURN = set(MODELS) - {"mla"}


def made(name, dtype, folder):
    kind, options = MODELS[name]
    return FirstLayer(write_checkpoint(kind, {**SHAPE, **options}, folder, dtype), dtype)


def as_bytes(values, dtype):
    return (
        torch.from_numpy(values)
        .to(getattr(torch, dtype))
        .contiguous()
        .view(torch.uint8)
        .numpy()
        .reshape(len(values), -1)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(3)
def test_what_fits_the_table_is_right_by_the_definition(name, dtype, tmp_path):
    layer, rng = made(name, dtype, tmp_path), np.random.default_rng(len(name))
    with np.errstate(over="ignore", invalid="ignore"):
        for ranks in (Ranks(), Ranks(tp_rank=1, tp_size=2), Ranks(tp_rank=3, tp_size=4)):
            widths = {half: int(rng.choice([8, 16, 24, 600])) for half in "KV"}
            tables = TokenTables(layer, ranks, widths)
            assert (tables.turning is not None) == (name in TURN)
            assert dtype != "bfloat16" or name not in TURN or tables.turning.rounds == (name not in ROUND_ELSE)
            for count in (1, 37, 400):
                check(layer, tables, ranks, widths, dtype, count, rng)


def check(layer, tables, ranks, widths, dtype, count, rng):
    tokens, positions = rng.integers(0, layer.vocab_size, count), rng.integers(0, 600, count)
    for half, width in widths.items():
        width = -(-min(width, layer.width(half, ranks)) // 8) * 8
        right = layer.expected(half, tokens, positions, ranks, width)
        width = right.values.shape[1]
        engine = layer.both(tokens, positions)[dtype != "float32"]
        values = of_rank(engine[half], ranks)[:, :width].numpy().copy()  # as an engine of this dtype has it
        # Nearly right, wrong, and far off.
        spoilt, by = rng.random(count), rng.choice([0.3, 0.9, 1.1, 3.0, 50.0], count)
        column = rng.integers(0, width, count)
        some = np.flatnonzero(spoilt > 0.5)
        values[some, column[some]] = (right.values[some, column[some]] + by[some] * right.tolerance[some]).astype(
            np.float32
        )
        raw = as_bytes(values, dtype)
        empty = spoilt < 0.1
        raw[empty] = 0
        apart = -(-raw.shape[1] // 16) * 16
        data = np.zeros((count, apart), np.uint8)
        data[:, : raw.shape[1]] = raw
        begins = np.arange(count) * apart
        flags = tables.flags(half, data.ravel(), begins, tokens, positions, Encoding(dtype))
        if layer.moves == {"V"} and half == "V":  # MLA's rotary part, which no engine's pool has as V
            assert flags is None
            continue
        assert flags is not None
        got = torch.from_numpy(raw).view(getattr(torch, dtype)).float().numpy()
        fits = flags & FITS > 0
        assert not (fits & (right.differ(got, Encoding(dtype)) | ~right.known)).any()
        assert ((flags & FILLED > 0) == raw.any(axis=1)).all()
        clean = (spoilt >= 0.1) & (spoilt <= 0.5)
        if half not in layer.moves or tables.turning.rounds or dtype != "bfloat16":
            assert fits[clean].all()


def test_a_model_whose_keys_turn_by_no_pairs_is_asked_for_each(tmp_path, monkeypatch):
    layer = made("llama", "float32", tmp_path)
    plain = FirstLayer.keys
    monkeypatch.setattr(
        FirstLayer,
        "keys",
        lambda self, t, p: plain(self, t, p) * (1 + 0.1 * torch.from_numpy(p % 3 == 1))[:, None, None],
    )
    tables = TokenTables(layer, Ranks(), {"K": 8, "V": 8})
    some = np.arange(4)
    assert tables.turning is None
    assert tables.flags("K", np.zeros(64, np.uint8), some * 16, some, some, Encoding("float32")) is None


def test_a_token_of_nan_and_one_beyond_the_vocabulary_fit_nothing(checkpoint_with_nan):
    layer = FirstLayer(checkpoint_with_nan, "float32")
    tables = TokenTables(layer, Ranks(), {"K": 4, "V": 4})
    tokens, at = np.array([55, 99, -1, 5]), np.array([3, 3, 3, 3])
    for half in "KV":
        expected = layer.expected(half, np.array([5]), at[:1], Ranks(), 4).values
        data = np.tile(expected.view(np.uint8).ravel(), 4)
        flags = tables.flags(half, data, np.arange(4) * 16, tokens, at, Encoding("float32"))
        assert (flags & FITS > 0).tolist() == [False, False, False, True]


def test_too_little_memory_is_said(checkpoint, monkeypatch):
    layer = FirstLayer(checkpoint, "float32")
    tables, some = TokenTables(layer, Ranks(), {"K": 4, "V": 4}), np.arange(4)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(token_tables.TokenTable, "__new__", full)
    with pytest.raises(TraceError, match="Tried to allocate 2 GiB; free memory there"):
        tables.flags("V", np.zeros(64, np.uint8), some * 16, some, some, Encoding("float32"))


def test_of_a_gpu_that_others_use_a_part_of_what_is_free_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 << 30, 80 << 30))
    assert token_tables._room("cuda") == 1 << 30


def test_one_position_far_behind_takes_one_row_of_angles(checkpoint):
    layer = FirstLayer(checkpoint, "float32")
    tables, some = TokenTables(layer, Ranks(), {"K": 4, "V": 4}), np.arange(4)
    far = np.full(4, 200_000)
    values = layer.expected("K", some, far, Ranks(), 4).values
    flags = tables.flags("K", values.view(np.uint8).ravel(), some * 16, some, far, Encoding("float32"))
    assert flags is not None and len(tables.turning.cosines) < 1000
