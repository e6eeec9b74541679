"""What transformers' attention is given, on the real engine: lengths and read indices, held against the block table."""

from pathlib import Path
from typing import Any

import pytest
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import ATTENTION_LENS, ATTENTION_SLOTS
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
    assert watched == {ATTENTION_LENS | ATTENTION_SLOTS if name == "llama" else ATTENTION_LENS}


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
