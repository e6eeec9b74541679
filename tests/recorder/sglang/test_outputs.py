"""What came out of SGLang's attention on the CPU, held against what the requests' slots hold."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.engines.sglang.attention.outputs import AttentionOutputs, with_outputs
from kvcanary.recorder.engines.sglang.layers import ROW_READERS

SLOTS, HEADS, DIM = 24, 2, 8
LAYER = {
    "layer_id": 2,
    "tp_q_head_num": 4,
    "tp_k_head_num": HEADS,
    "qk_head_dim": DIM,
    "v_head_dim": DIM,
    "scaling": 0.3,
    "logit_cap": 0.0,
    "attn_type": SimpleNamespace(name="DECODER"),
    "is_cross_attention": False,
    "sliding_window_size": -1,
}


class Pool:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.keys, self.values = torch.randn(2, SLOTS, HEADS, DIM)

    def get_key_buffer(self, layer: int) -> Any:
        return self.keys

    def get_value_buffer(self, layer: int) -> Any:
        return self.values


class Backend:
    """Attends to the rows of a table; `damage` changes which slots of a request a token reads."""

    def __init__(self, table: Any, damage: Any) -> None:
        self.table, self.damage, self.token_to_kv_pool = table, damage, Pool()

    def forward(
        self, query: Any, _k: Any, _v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> Any:
        own, at = query.view(-1, 4, DIM), 0
        output = torch.zeros_like(own)
        for row, end, new in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), batch.news, strict=True):
            for position in range(end - new, end):
                slots = self.damage(self.table[row, : position + 1].long())
                for head in range(4):
                    weights = (self.token_to_kv_pool.keys[slots, head // 2] @ own[at, head] * 0.3).softmax(0)
                    output[at, head] = weights @ self.token_to_kv_pool.values[slots, head // 2]
                at += 1
        return output.view(query.shape)


def looked_at(
    damage: Any = lambda slots: slots, mode: str = "EXTEND", window: int = 0, lut: Any = None, **layer: Any
) -> Any:
    """Return what is found in a forward of two requests: one has 6 tokens and gets one, the other has none and gets 3."""
    extra = layer.pop("extra", {})
    table = torch.zeros(3, 12, dtype=torch.int32)
    table[1, :7], table[2, :3] = torch.arange(3, 10), torch.tensor([15, 12, 20])
    part: Any = type(ROW_READERS[0], (Backend,), {})(table, damage)
    groups = [SimpleNamespace(window=0, lut=-1), SimpleNamespace(window=window, lut=0)]
    lut = torch.arange(SLOTS) if lut is None else lut
    runner = SimpleNamespace(groups={"full": 0, "swa": 1}, table=0)
    model_runner = SimpleNamespace(
        attn_backend=part, token_to_kv_pool=SimpleNamespace(layers_mapping={2: (0, window > 0)})
    )
    layout: Any = SimpleNamespace(
        runners={id(model_runner): runner}, groups=groups, tables=[table], luts=[lut], pools=[None, None]
    )
    outputs = AttentionOutputs([model_runner], layout)
    (_, _, hook), (_, name, _) = outputs.hooks()
    assert name == "forward_decode"
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens=torch.tensor([7, 3]),
        extend_prefix_lens=torch.tensor([6, 0]),
        extend_seq_lens=torch.tensor([1, 3]),
        positions=torch.tensor([6, 0, 1, 2]),
        encoder_lens=None,
        news=[1, 3],
    )
    given = (torch.randn(4, 4 * DIM), None, None, SimpleNamespace(**LAYER | layer), batch)
    done = hook(*given, **extra)
    if done is not None:
        done(part.forward(*given, **extra), None)
    attention = with_outputs(None, outputs)
    return ([], 0) if attention is None else (attention.outputs, attention.outputs_compared)


def test_what_is_read_as_it_ought_to_be_is_right() -> None:
    assert looked_at() == ([], 3)
    assert looked_at(lambda slots: slots[-4:], window=3) == ([], 3)


def test_what_is_read_otherwise_is_told() -> None:
    (read,), compared = looked_at(lambda slots: slots[1:] if len(slots) > 3 else slots)
    assert compared == 3
    assert (read.group, read.layer, read.request, read.position, read.start, read.length) == (0, 2, 0, 6, 1, 6)


def test_a_window_that_is_not_kept_to_is_told_of_its_group() -> None:
    (read,), _ = looked_at(window=3)
    assert (read.group, read.request, read.start, read.length) == (1, 0, 0, 7)


def test_of_a_pool_that_keeps_all_a_layers_own_window_is_right() -> None:
    """As Gemma's are without a sliding pool."""
    assert looked_at(lambda slots: slots[-4:], sliding_window_size=3) == ([], 3)
    assert len(looked_at(sliding_window_size=3)[0]) > 0


def test_of_a_pool_with_numbers_of_its_own_either_is_right() -> None:
    """SGLang 0.5.23 gathers K and V of layers with a window by the numbers of the pool without."""
    lut = (torch.arange(SLOTS) + 5) % SLOTS
    assert looked_at(lambda slots: slots[-4:], window=3, lut=lut)[0] == []
    assert looked_at(lambda slots: lut[slots][-4:], window=3, lut=lut)[0] == []
    assert len(looked_at(lambda slots: (slots + 1)[-4:], window=3, lut=lut)[0]) > 0


@pytest.mark.parametrize(
    "other",
    [
        {"attn_type": SimpleNamespace(name="ENCODER_ONLY")},
        {"is_cross_attention": True},
        {"xai_temperature_len": 7},
        {"extra": {"sinks": np.ones(4)}},
        {"mode": "TARGET_VERIFY"},
        {"mode": "DLLM_EXTEND"},
        {"tp_k_head_num": 4},
    ],
)
def test_layers_of_which_nothing_can_be_said_are_left_alone(other: dict[str, Any]) -> None:
    assert looked_at(**other) == ([], 0)
