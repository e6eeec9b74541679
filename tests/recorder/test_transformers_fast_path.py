"""The decode fast path, whose kernel writes K and V itself, through a block table: the engine is real, the kernels are torch's."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import ReplaySettings, replay
from transformers import modeling_flash_attention_utils as flash
from transformers.generation.continuous_batching import initialization, input_outputs

from ..support.engines.tiny_models import generate, model
from .hooked_engine import assert_clean

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11], list(range(20, 60)), [4]]
CALLS: Counter[str] = Counter()

pytestmark = pytest.mark.usefixtures("engine_left_as_it_was")


def attend(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Attention of the last tokens `[Tq, heads, dim]` over all `[Tk, kv_heads, dim]`, causal."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    ahead = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, float("-inf")).softmax(-1), v)


def varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, causal: bool, window_size: Any = (-1, -1),
) -> Any:  # fmt: skip
    CALLS["varlen"] += 1
    out, starts, ends = torch.zeros_like(q), cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for r in range(len(starts) - 1):
        mine, all_of_it = slice(starts[r], starts[r + 1]), slice(ends[r], ends[r + 1])
        out[mine] = attend(q[mine], k[all_of_it], v[all_of_it], softmax_scale)
    return out


def with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cache_seqlens: Any, block_table: Any,
    softmax_scale: float, causal: bool, window_size: Any = (-1, -1),
) -> Any:  # fmt: skip
    CALLS["with_kvcache"] += 1
    out, size = torch.zeros_like(q), k_cache.shape[1]
    for r, length in enumerate(cache_seqlens.tolist()):
        if length < 0:  # padding
            continue
        page, at = int(block_table[r, length // size]), length % size
        k_cache[page, at], v_cache[page, at] = k[r, 0], v[r, 0]
        pages = block_table[r, : length // size + 1].long()
        held = (x[pages].flatten(0, 1)[: length + 1] for x in (k_cache, v_cache))
        out[r] = attend(q[r], *held, softmax_scale)
    return out


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Any:
    functions = (None, varlen, with_kvcache, None, None)
    kwargs = tuple(flash._lazy_define_process_function(function) for function in (varlen, with_kvcache))
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_a, **_k: (functions, kwargs))
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_a, **_k: None)
    CALLS.clear()
    made = model("llama")
    made.config._attn_implementation_internal = "flash_attention_2"
    return made


def run(subject: Any) -> Any:
    return generate(subject, PROMPTS, max_new_tokens=30, max_blocks_per_request=16)


def test_the_fast_path_is_clean_and_its_table_is_what_is_recorded(tmp_path: Path, subject: Any) -> None:
    expected = run(subject)
    assert CALLS["with_kvcache"] > 20
    with attach(tmp_path / "trace.arrow"):
        assert run(subject) == expected
    assert_clean(tmp_path / "trace.arrow")
    decodes = [event for event in read_trace(tmp_path / "trace.arrow") if event.scalar("mode") == "decode"]
    assert len(decodes) > 20
    assert {event.scalar("attention_watched") for event in decodes} == {3}  # lengths and slots


def _entry(io: Any) -> None:
    io.block_table[0, 2, 0] = io.block_table[0, 0, 0]


def _length(io: Any) -> None:
    io.cumulative_seqlens_k["full_attention"][io.num_request_in_batch] -= 1


@pytest.mark.parametrize(("fault", "found"), [(_entry, "attention_slots"), (_length, "attention_lens")])
def test_what_the_kernel_gets_is_what_is_judged(
    tmp_path: Path, subject: Any, monkeypatch: pytest.MonkeyPatch, fault: Any, found: str
) -> None:
    prepare, steps = input_outputs.ContinuousBatchingIOs.prepare_batch_tensors, []

    def faulty(io: Any, *args: Any, **kwargs: Any) -> None:
        prepare(io, *args, **kwargs)
        steps.append(1)
        if len(steps) == 20:
            assert io.use_block_table
            fault(io)

    monkeypatch.setattr(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors", faulty)
    with attach(tmp_path / "trace.arrow"):
        run(subject)
    summary = replay(tmp_path / "trace.arrow", settings=ReplaySettings(), report=None)
    assert found in summary.findings_by_kind
    first = min(one["forward"] for one in (summary.first_finding, summary.first_violation) if one)
    assert first == 19
