"""Behind which layers of an engine a probe is launched: by turns, one in each graph, and none once something has failed."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.kernels.capture import attention_probe
from kvcanary.recorder.engines.common.probing import ProbeTurns
from kvcanary.recorder.engines.sglang.attention import probed as sglang
from kvcanary.recorder.engines.vllm.attention import probed as vllm

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 8, 64


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_probe, "PROGRAMS", 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Probe:
    """A probe that takes down behind which layers it would be launched."""

    def __init__(self, numbers: list[int]) -> None:
        self.layers = dict.fromkeys(numbers)
        self.is_on, self.layer = False, numbers[0]


def run(turns: ProbeTurns, *numbers: int) -> list[int]:
    launched: list[int] = []
    for number in numbers:
        assert turns.run(lambda: "output", number, lambda _, output, n=number: launched.append(n)) == "output"
    return launched


def test_each_graph_has_a_launch_behind_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, capturing = ProbeTurns(), [True]
    turns.probe = Probe([2, 3, 7])  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert [run(turns, 1, 2, 3, 5, 7) for _ in range(4)] == [[2], [3], [7], [2]]
    capturing[0] = False
    assert run(turns, 2, 3, 7) == []  # a warm-up
    turns.probe.is_on, turns.probe.layer = True, 3  # type: ignore[union-attr]
    assert run(turns, 1, 2, 3, 5, 7) == [3]


def test_what_fails_is_said_once_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    turns = ProbeTurns()
    turns.probe = Probe([2])  # type: ignore[assignment]
    turns.probe.is_on = True  # type: ignore[union-attr]

    def fails(*_: object) -> None:
        raise RuntimeError("unknown form")

    with caplog.at_level(logging.WARNING, "kvcanary"):
        assert [turns.run(lambda: 5, 2, fails) for _ in range(3)] == [5, 5, 5]
    assert [record.message for record in caplog.records] == [
        "kvcanary: what comes out of attention is not looked at: RuntimeError: unknown form"
    ]
    with pytest.raises(ZeroDivisionError):
        turns.run(lambda: 1 // 0, 2, fails)


def wanted(probe: Any, layer: int) -> None:
    probe.is_on, probe.layer = True, layer
    probe._memory.wanted[:] = torch.tensor([1, 1, 1, 3, 0])


def laid_aside(probe: Any) -> Any:
    """Return the layer, the token and the length of what was laid aside, and its query and output."""
    _, layer, _, _, token, length = probe._memory.found.tolist()
    return layer, token, length, *probe._memory.rows[:2]


class FlashAttentionImpl:
    """Under vLLM's name for one."""

    num_heads, num_kv_heads, scale, logits_soft_cap, sliding_window = HEADS, KV_HEADS, 0.5, 0, (-1, -1)

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, given: Any, output: Any) -> Any:
        output.copy_(query + 1)
        return output


def vllm_runner() -> Any:
    layers = {
        f"model.layers.{n}.attn": SimpleNamespace(
            impl=FlashAttentionImpl(), kv_cache=torch.randn(SLOTS // 16, KV_HEADS, 16, 2 * DIM)
        )
        for n in range(3)
    }
    layers["model.layers.1.attn"].impl.sinks = torch.zeros(HEADS)  # type: ignore[attr-defined]
    spec = SimpleNamespace(block_size=16, head_size=DIM)
    block_table = SimpleNamespace(block_table=SimpleNamespace(gpu=torch.arange(8).reshape(2, 4).int()), block_size=16)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers),
            model_config=SimpleNamespace(max_model_len=48),
        ),
        kv_cache_config=SimpleNamespace(
            num_blocks=SLOTS // 16, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=[*layers])]
        ),
        input_batch=SimpleNamespace(block_table=[block_table]),
        layers=layers,
    )


def test_vllms_layers_are_looked_at_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "whole_half", lambda kv, _, half: (kv[..., DIM:] if half == "V" else kv[..., :DIM], AXES))
    runner = vllm_runner()
    probed = vllm.ProbedAttention(runner)
    probe = probed._turns.probe
    assert probe is not None
    assert [*probe.layers] == [0, 2]
    query = torch.randn(4, HEADS, DIM)
    given = SimpleNamespace(
        seq_lens=torch.tensor([9, 30], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        causal=True,
    )
    wanted(probe, 2)

    def forward(number: int) -> Any:
        layer, output = runner.layers[f"model.layers.{number}.attn"], torch.zeros(4, HEADS, DIM)
        return layer.impl.forward(layer, query, query, query, layer.kv_cache, given, output=output)

    for number in range(3):
        output = forward(number)
    layer, token, length, own, came = laid_aside(probe)
    assert (layer, token, length) == (2, 3, 30)
    assert torch.equal(own, query[3, 3]) and torch.equal(came, output[3, 3])
    given.causal = False
    probe._memory.found.zero_()
    forward(2)
    assert not probe._memory.found.any()
    probed.undo()
    assert "forward" not in vars(runner.layers["model.layers.0.attn"].impl)


AXES = "block head slot dim"


class RadixAttention(torch.nn.Module):
    """Under SGLang's name for one."""

    def __init__(self, number: int, window: int = -1) -> None:
        super().__init__()
        self.layer_id, self.sliding_window_size, self.scaling, self.logit_cap = number, window, 0.5, 0.0
        self.tp_q_head_num, self.tp_k_head_num, self.qk_head_dim, self.v_head_dim = HEADS, KV_HEADS, DIM, DIM


class TritonAttnBackend:
    """Under SGLang's name for one."""

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Any:
        return q + 1

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Any:
        return q + 2


@pytest.mark.parametrize("mode", ["EXTEND", "DECODE"])
@pytest.mark.parametrize("begun", [False, True])
def test_sglangs_layers_are_looked_at_in_either_mode(mode: str, begun: bool) -> None:
    pool = SimpleNamespace(**{name: [torch.randn(SLOTS, KV_HEADS, DIM) for _ in range(2)] for name in "kv"})
    pool.get_key_buffer, pool.get_value_buffer = pool.k.__getitem__, pool.v.__getitem__
    backend, model = TritonAttnBackend(), torch.nn.ModuleList([RadixAttention(0), RadixAttention(1, 7)])
    table = torch.arange(2 * 20).reshape(2, 20).int()
    runner = SimpleNamespace(
        model=model, token_to_kv_pool=pool, attn_backend=backend, req_to_token_pool=SimpleNamespace(req_to_token=table)
    )
    probed: Any = sglang.ProbedAttention()
    recorder: Any = SimpleNamespace(capture=SimpleNamespace(probe=None))
    own: Any = SimpleNamespace(groups={"full": 4})
    if begun:
        probed.begin(recorder, own, 2)
    probed.before_model(runner, capturing=True)
    assert probed._turns.probe is None
    probed.before_model(runner, capturing=False)
    if not begun:
        probed.begin(recorder, own, 2)
    probe = recorder.capture.probe
    assert probe._places == {0: (4, (0,)), 1: (4, (7,))}
    decode = mode == "DECODE"
    lens = torch.tensor([3, 6])
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        seq_lens=lens,
        req_pool_indices=torch.tensor([1, 0]),
        extend_seq_lens=torch.tensor([2, 1]),
        encoder_lens=None,
    )
    query = torch.randn(2 if decode else 3, HEADS * DIM)
    wanted(probe, 1)
    attend = backend.forward_decode if decode else backend.forward_extend
    outputs = [attend(query, None, None, layer, batch, save_kv_cache=True) for layer in model]
    layer, token, length, asked, came = laid_aside(probe)
    last = len(query) - 1
    assert (layer, token, length) == (1, last, 6)
    assert torch.equal(asked, query.view(-1, HEADS, DIM)[last, 3])
    assert torch.equal(came, outputs[1].view(-1, HEADS, DIM)[last, 3])
    assert torch.equal(probe._memory.rows[2:8], pool.k[1][:6, 1])
