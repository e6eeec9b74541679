"""Where the CPU's cache keeps K and V, and what came out of its attention."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.forward_input import OutputRead
from kvcanary.recorder.engines.vllm.attention.outputs import OutputCalls, chosen_outputs, learnt_places
from kvcanary.recorder.engines.vllm.layout import CPU_ATTENTION

BLOCKS, HEADS, TOKENS, DIM = 6, 2, 4, 8


def store(key: Any, value: Any, cache: Any, slots: Any, turned: bool = True) -> None:
    """Keep K of a block value by value, all tokens of one beside one another, and V behind it as it comes."""
    both = cache.view(cache.shape[0], HEADS, 2 * TOKENS * DIM)
    for n, slot in enumerate(slots.tolist()):
        at = torch.arange(DIM) * TOKENS + slot % TOKENS if turned else torch.arange(DIM) + slot % TOKENS * DIM
        both[slot // TOKENS][:, at] = key[n]
        both[slot // TOKENS][:, TOKENS * DIM + slot % TOKENS * DIM + torch.arange(DIM)] = value[n]


class Impl:
    """Attends to blocks that `store` has filled; `damage` changes which positions of a request it reads."""

    scale, logits_soft_cap, attn_type, sliding_window, alibi_slopes, sinks = 0.3, 0, "decoder", -1, None, None

    def __init__(self, update: Any = store, damage: Any = lambda slots: slots) -> None:
        self.update, self.damage = update, damage

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        self.update(key, value, cache, slots)

    def forward(self, layer: Any, query: Any, _key: Any, _value: Any, cache: Any, given: Any, output: Any) -> Any:
        flat, at = cache.view(cache.shape[0], HEADS, -1), 0
        for table, end, new in zip(given.block_table, given.seq_lens.tolist(), given.news, strict=True):
            for token in range(new):
                slots = self.damage(torch.arange(end - new + token + 1))
                blocks, offsets = table[slots // TOKENS], slots % TOKENS
                keys = flat[blocks[:, None], :, torch.arange(DIM) * TOKENS + offsets[:, None]].permute(2, 0, 1)
                places = TOKENS * DIM + offsets[:, None] * DIM + torch.arange(DIM)
                values = flat[blocks[:, None], :, places].permute(2, 0, 1)
                for head in range(2 * HEADS):
                    weights = (keys[head // 2] @ query[at, head] * self.scale).softmax(0)
                    output[at, head] = weights @ values[head // 2]
                at += 1
        return output


def layer_of(impl: Any) -> Any:
    impl = type(CPU_ATTENTION, (type(impl),), {})(impl.update, impl.damage)
    return SimpleNamespace(impl=impl, kv_cache=torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM))


def calls(layer: Any, window: int = 0) -> OutputCalls:
    group = SimpleNamespace(
        index=0, layers=("model.layers.3.attn",), window=window, spec=SimpleNamespace(head_size=DIM)
    )
    return OutputCalls([group], {"model.layers.3.attn": layer})  # type: ignore[list-item]


def attend(layer: Any, seen: OutputCalls, **given: Any) -> tuple[list[OutputRead], int]:
    """Run a step of two requests: one has 6 tokens and gets one, the other has none and gets 3."""
    faults: list[Any] = []
    seen.attach(lambda *fault: faults.append(fault))
    torch.manual_seed(0)
    key, value = torch.randn(2, 10, HEADS, DIM)
    table = torch.tensor([[3, 1, 0], [5, 0, 0]])
    slots = torch.tensor([12, 13, 14, 15, 4, 5, 6, 20, 21, 22])
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
    step = SimpleNamespace(prefix=np.array([6, 0]), extend=np.array([1, 3]), tables=((table, TOKENS),), given=None)
    seen.begin(step)  # type: ignore[arg-type]
    said = {
        "causal": True,
        "dynamic_causal": None,
        "seq_lens": torch.tensor([7, 3]),
        "block_table": table,
        "news": [1, 3],
    }
    query = torch.randn(5, 2 * HEADS, DIM)  # one of padding
    output = torch.full_like(query, torch.nan)
    layer.impl.forward(layer, query, None, None, layer.kv_cache, SimpleNamespace(**said | given), output)
    assert not faults, faults
    return seen.take()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_places_are_learnt_of_an_update_that_keeps_each_value_somewhere(dtype: torch.dtype) -> None:
    places = learnt_places(layer_of(Impl()), torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=dtype))
    assert places is not None
    assert places[0].tolist() == [[d * TOKENS + token for d in range(DIM)] for token in range(TOKENS)]
    assert places[1].tolist() == [[(TOKENS + token) * DIM + d for d in range(DIM)] for token in range(TOKENS)]


@pytest.mark.parametrize(
    "update",
    [
        lambda k, v, cache, slots: store(2 * k, v, cache, slots),  # values are others
        lambda k, v, cache, slots: store(k[:-1], v, cache, slots[:-1]),  # a token is left out
        lambda k, v, cache, slots: store(k, k, cache, slots),  # V is not kept
    ],
)
def test_nothing_is_known_of_an_update_that_does_otherwise(update: Any) -> None:
    layer = layer_of(Impl(update))
    assert learnt_places(layer, layer.kv_cache) is None
    assert attend(layer, calls(layer)) == ([], 0)


def test_what_is_read_as_it_ought_to_be_is_right() -> None:
    layer = layer_of(Impl())
    assert attend(layer, calls(layer)) == ([], 3)


def test_what_is_read_otherwise_is_told_by_request_and_layer() -> None:
    layer = layer_of(Impl(damage=lambda slots: slots[2:] if len(slots) > 3 else slots))
    (read,), compared = attend(layer, calls(layer))
    assert read == OutputRead(group=0, layer=3, request=0, position=6, start=2, length=5)
    assert compared == 3


def test_a_window_that_a_layer_is_made_with_is_right_as_well_as_its_groups() -> None:
    layer = layer_of(Impl(damage=lambda slots: slots[-4:]))
    layer.impl.sliding_window = (3, 0)
    assert attend(layer, calls(layer))[0] == []


@pytest.mark.parametrize(
    "given", [{"causal": False}, {"dynamic_causal": torch.ones(2)}, {"num_logits_indices": torch.zeros(1)}]
)
def test_layers_that_see_more_or_less_than_the_past_are_left_alone(given: dict[str, Any]) -> None:
    layer = layer_of(Impl())
    assert attend(layer, calls(layer), **given) == ([], 0)


@pytest.mark.parametrize(
    ("name", "value"), [("sinks", torch.zeros(4)), ("alibi_slopes", torch.ones(4)), ("attn_type", "encoder")]
)
def test_layers_that_weigh_by_more_than_queries_and_keys_are_left_alone(name: str, value: Any) -> None:
    layer = layer_of(Impl())
    setattr(layer.impl, name, value)
    assert attend(layer, calls(layer)) == ([], 0)


def test_of_some_requests_of_a_step_theirs_alone_is_told() -> None:
    found = [OutputRead(0, 3, request, 6, 2, 5) for request in (0, 2)]
    given = chosen_outputs(found, 7, np.array([1, 2]))
    assert [one.request for one in given.outputs] == [1]
    assert given.outputs_compared == 7
