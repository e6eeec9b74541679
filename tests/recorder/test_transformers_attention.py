"""What transformers' attention is given, on the real engine: lengths and read indices, held against the block table."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.engines.transformers.returned import _found
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import ATTENTION_LENS, ATTENTION_SLOTS
from transformers.generation.continuous_batching import input_outputs
from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cache_allocators.sliding_attention import (
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from ..support.engines.documented_engine import judged
from ..support.engines.tiny_models import generate, model
from .hooked_engine import assert_clean

pytestmark = pytest.mark.usefixtures("engine_left_as_it_was")


@pytest.mark.parametrize("name", ["llama", "gemma3_hybrid", "mistral_sliding"])
def test_healthy_engines_have_their_attention_watched(tmp_path: Path, name: str) -> None:
    with attach(tmp_path / "t.arrow"):
        generate(model(name), max_new_tokens=40)
    assert_clean(tmp_path / "t.arrow")
    watched = {
        event.scalar("attention_watched") for event in read_trace(tmp_path / "t.arrow") if event.kind == "forward"
    }
    assert watched == {ATTENTION_LENS | ATTENTION_SLOTS}


def test_what_a_ring_hands_back_is_not_watched_if_nobody_looks(tmp_path: Path) -> None:
    with attach(tmp_path / "t.arrow", submitted=False):
        generate(model("mistral_sliding"), max_new_tokens=40)
    assert_clean(tmp_path / "t.arrow")
    forwards = [event for event in read_trace(tmp_path / "t.arrow") if event.kind == "forward"]
    assert {event.scalar("attention_watched") for event in forwards} == {ATTENTION_LENS}


@pytest.mark.parametrize("name", ["llama", "mistral_sliding"])
@pytest.mark.parametrize("half", [0, 1])
def test_a_row_of_another_slot_that_attention_gets_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, half: int
) -> None:
    """The index says what it should, and K or V of one position comes from the slot of another."""
    owner = SlidingAttentionCacheAllocator if name == "mistral_sliding" else FullAttentionCacheAllocator
    update, steps, wrong = owner.update, [0], [0]

    def elsewhere(own: Any, keys: Any, values: Any, layer: int, read: Any, write: Any) -> Any:
        states = update(own, keys, values, layer, read, write)
        if layer == 0:
            steps[0] += 1
            if steps[0] == 8:
                states[half][1] = states[half][3]
                row, stride = int(read[3]), own.block_physical_stride
                wrong[0] = row // stride * own.tokens_per_page + row % stride
        return states

    monkeypatch.setattr(owner, "update", elsewhere)
    with attach(tmp_path / "t.arrow"):
        generate(model(name), [[9, 10, 11, 12, 13]], max_new_tokens=20)
    assert judged(tmp_path / "t.arrow").findings_by_kind == {"attention_slots": 1}
    got = [
        event.ints("attention_slots").tolist() for event in read_trace(tmp_path / "t.arrow") if event.kind == "forward"
    ]
    assert [slots for slots in got if slots] == [[wrong[0]]]


def test_a_ring_that_is_read_behind_the_writes_of_its_own_forward_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = SlidingAttentionCacheAllocator.update

    def behind(own: Any, keys: Any, values: Any, layer: int, read: Any, write: Any) -> Any:
        made = update(own, keys, values, layer, read, write)
        cached = read != own.sentinel_index
        for rows, view in zip(made, own._kv_token_views[layer], strict=True):
            if read.numel():
                rows[cached] = view.index_select(0, read[cached])
        return made

    monkeypatch.setattr(SlidingAttentionCacheAllocator, "update", behind)
    prompt = list(range(20, 55))
    with attach(tmp_path / "t.arrow"):
        generate(model("mistral_sliding"), [prompt], max_new_tokens=3, max_batch_tokens=8)
    assert judged(tmp_path / "t.arrow").findings_by_kind.keys() == {"attention_slots"}
    got = [slot for event in read_trace(tmp_path / "t.arrow") for slot in event.ints("attention_slots").tolist()]
    assert set(got) == {-1}  # nothing held these tokens when attention was to read


def test_a_row_that_no_other_slot_alone_holds_is_of_none() -> None:
    pool = np.zeros((8, 2, 16), np.uint8)
    pool[2:, 0, 0], pool[2:, 1, 0] = [1, 2, 3, 4, 4, 5], [9, 8, 8, 7, 7, 6]
    got, differs = pool[[3, 5, 4, 2]], np.array([[True, False], [True, False], [False, True], [True, True]])
    assert _found([pool], 2, got, differs, np.array([7, 7, 7, 7])).tolist() == [3, -1, -1, 2]
    assert _found([pool], 2, got, differs, np.array([3, 7, 7, 7])).tolist() == [-1, -1, -1, 2]  # its own place
    before = np.roll(pool, 1, axis=0)
    assert _found([before, pool], 2, got, differs, np.array([7, 7, 7, 7])).tolist() == [4, -1, -1, 3]


def _break_in_step(monkeypatch: pytest.MonkeyPatch, at: int, damage: Any) -> list[int]:
    """Have `damage(io)` called once a step's tensors stand, in the first decode from step `at` on."""
    done: list[int] = []
    original = ContinuousBatchingIOs.prepare_batch_tensors

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        steps[0] += 1
        decoding = all(future.query_length == 1 for future in self.requests_in_batch)
        if steps[0] >= at and decoding and not done and self.requests_in_batch:
            done.append(steps[0])
            damage(self)
        return result

    steps = [0]
    monkeypatch.setattr(ContinuousBatchingIOs, "prepare_batch_tensors", prepare)
    return done


def _masked(monkeypatch: pytest.MonkeyPatch, kind: str, damage: Any) -> None:
    """Have `damage(block)` called with a later chunk's part of each mask of layers of a kind, `[queries, keys]`."""
    build = input_outputs.build_attention_mask

    def damaged(
        attention_mask: Any, cumulative_seqlens_q: Any, cumulative_seqlens_k: Any, sliding_window: int = 1
    ) -> None:
        build(attention_mask, cumulative_seqlens_q, cumulative_seqlens_k, sliding_window)
        for row in range(len(cumulative_seqlens_q) - 1):
            (q0, q1), (k0, k1) = cumulative_seqlens_q[row : row + 2], cumulative_seqlens_k[row : row + 2]
            if 1 < q1 - q0 < k1 - k0 and (sliding_window > 1) == (kind == "swa"):
                damage(attention_mask[0, 0, q0:q1, k0:k1])

    monkeypatch.setattr(input_outputs, "build_attention_mask", damaged)


def _forgets_the_window(block: Any) -> None:
    block.fill_(torch.finfo(block.dtype).min)
    block.triu_(block.shape[1] - block.shape[0] + 1)


def _begins_too_late(block: Any) -> None:
    block[:, 0] = torch.finfo(block.dtype).min


def _shows_what_comes(block: Any) -> None:
    block[0, -1] = 0


def _leaves_one_out(block: Any) -> None:
    block[-1, -2] = torch.finfo(block.dtype).min


@pytest.mark.parametrize(
    ("kind", "damage", "found"),
    [
        ("swa", _forgets_the_window, "wrong_window"),
        ("swa", _begins_too_late, "wrong_window"),
        ("full", _begins_too_late, "wrong_window"),
        ("full", _shows_what_comes, "attention_lens"),
        ("full", _leaves_one_out, "attention_lens"),
        ("swa", _leaves_one_out, "attention_lens"),
    ],
)
def test_a_mask_that_does_not_fit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, damage: Any, found: str
) -> None:
    _masked(monkeypatch, kind, damage)
    with attach(tmp_path / "t.arrow"):
        generate(model("gemma3_hybrid"), [list(range(20, 95))], max_new_tokens=3, max_batch_tokens=20)
    assert judged(tmp_path / "t.arrow").findings_by_kind.keys() == {found}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_of_both_kinds_of_attention_are_looked_at_as_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """A layer gets the mask of others, and all that the engine has made for the step is right."""
    engine = model("gemma3_hybrid")
    engine.set_attn_implementation(attention)
    attend = type(engine.model.layers[2].self_attn).forward

    def other(own: Any, *args: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if own.layer_idx == 3 and attention_mask is not None:
            attention_mask = torch.zeros_like(attention_mask)
        return attend(own, *args, attention_mask=attention_mask, **kwargs)

    for wrong in (False, True):
        path = tmp_path / f"{wrong}.arrow"
        if wrong:
            monkeypatch.setattr(type(engine.model.layers[2].self_attn), "forward", other)
        with attach(path):
            generate(engine, [list(range(20, 95)), [5, 6, 7]], max_new_tokens=3, max_batch_tokens=20)
        kinds = judged(path).findings_by_kind.keys()
        assert bool(kinds & {"wrong_window", "attention_lens"}) == wrong


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_window_that_is_not_read_as_it_is_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    lens, indices = SlidingAttentionCacheAllocator.get_seqlen_k, SlidingAttentionCacheAllocator.get_read_indices

    def turned(own: Any, past: int, query: int) -> bool:
        return query == 1 and past >= own.sliding_window

    def other_lens(own: Any, past: int, query: int) -> int:
        return lens(own, past, query) + extra * turned(own, past, query)

    def other_indices(own: Any, name: str, past: int, query: int) -> list[int]:
        read = indices(own, name, past, query)
        if turned(own, past, query):
            return read[1:] if extra < 0 else [*own._token_indices_to_physical_indices(name, past, 1), *read]
        return read

    monkeypatch.setattr(SlidingAttentionCacheAllocator, "get_seqlen_k", other_lens)
    monkeypatch.setattr(SlidingAttentionCacheAllocator, "get_read_indices", other_indices)
    with attach(tmp_path / "t.arrow"):
        generate(model("gemma3_hybrid"), max_new_tokens=40)
    assert judged(tmp_path / "t.arrow").findings_by_kind.keys() == {"wrong_window"}


def test_a_read_index_that_is_not_the_block_tables_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(io: Any) -> None:
        io.read_index_storage[0, 1] = io.read_index_storage[0, 3]

    done = _break_in_step(monkeypatch, 8, overwrite)
    with attach(tmp_path / "t.arrow"):
        generate(model("llama"), max_new_tokens=20)
    assert done
    assert judged(tmp_path / "t.arrow").findings_by_kind == {"attention_slots": 1}


@pytest.mark.parametrize("name", ["llama", "mistral_sliding"])
def test_wrong_lengths_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def shorten(io: Any) -> None:
        for bounds in io.cumulative_seqlens_k.values():
            bounds[len(io.requests_in_batch)] -= 1  # the last request's

    done = _break_in_step(monkeypatch, 8, shorten)
    with attach(tmp_path / "t.arrow"):
        generate(model(name), max_new_tokens=20)
    assert done
    assert judged(tmp_path / "t.arrow").findings_by_kind.get("attention_lens") == 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3_hybrid"])
def test_outputs_of_healthy_layers_are_right(tmp_path: Path, name: str, attention: str) -> None:
    engine = model(name)
    engine.set_attn_implementation(attention)
    with attach(tmp_path / "t.arrow"):
        generate(engine, [list(range(20, 95)), [5, 6, 7]], max_new_tokens=6, max_batch_tokens=20)
    assert_clean(tmp_path / "t.arrow")
    forwards = [event for event in read_trace(tmp_path / "t.arrow") if event.kind == "forward"]
    assert all(event.scalar("outputs_watched") > 0 for event in forwards)


@pytest.mark.parametrize(
    ("keep", "found"),
    [
        (lambda keys: keys >= keys.max() - 4, "wrong_window"),  # the last five alone
        (lambda keys: keys < keys.max() - 1, "attention_lens"),  # all but the last two
        (lambda keys: keys % 3 > 0, "attention_output"),  # what no run of positions is
    ],
)
def test_a_kernel_that_reads_otherwise_than_its_mask_says_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Any, found: str
) -> None:
    """The mask that a layer is given is right; what its kernel makes of it is not."""
    attend, calls = torch.nn.functional.scaled_dot_product_attention, [0]

    def kernel(query: Any, key: Any, value: Any, attn_mask: Any = None, **said: Any) -> Any:
        calls[0] += 1
        if calls[0] > 20:
            attn_mask = keep(torch.arange(key.shape[2]))[None, None, None]
        return attend(query, key, value, attn_mask=attn_mask, **said)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    with attach(tmp_path / "t.arrow"):
        generate(model("llama"), [list(range(20, 40))], max_new_tokens=20)
    summary = judged(tmp_path / "t.arrow")
    assert found in summary.findings_by_kind
    assert summary.findings_by_kind.keys() <= {"wrong_window", "attention_lens", "attention_output"}
