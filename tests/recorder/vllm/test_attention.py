"""What attention is given, and what a draft model's layers write, as the adapter records it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.engines.vllm.attention.given import AttentionReader
from kvcanary.recorder.process.settings import RecordingSettings

from ...support.one_trace import replayed
from .fake_engine import BLOCK, CONTEXT, DIM, HEADS, FullAttentionSpec, GPUModelRunner, SlidingWindowSpec, hooked, serve

SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "few blocks": {"num_blocks": 14},
    "waves": {"budget": 40},
    "hybrid": {"specs": [FullAttentionSpec(), SlidingWindowSpec()], "num_blocks": 60},
    "v2": {"v2": True, "specs": [SlidingWindowSpec(), FullAttentionSpec()]},
}


pytestmark = pytest.mark.usefixtures("process_goes_on")


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_a_healthy_engine_gets_what_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path), v2=shape == "v2")
    serve(**SHAPES[shape])
    summary, _, events = replayed(tmp_path)
    assert summary.verdict.value == "clean"
    forwards = [event for event in events if event.kind == "forward"]
    assert {event.scalar("attention_watched") for event in forwards} == {3}
    for event in forwards:
        ends = event.ints("prefix_lens") + event.ints("extend_lens")
        assert event.ints("attention_seq_lens").tolist() == ends.tolist()
        assert event.ints("attention_query_lens").tolist() == event.ints("extend_lens").tolist()
        assert not len(event.ints("attention_slots"))


def test_layers_that_are_run_for_the_last_tokens_of_prompts_alone_are_not_read() -> None:
    def given(starts: list[int], **more: Any) -> SimpleNamespace:
        lens, table = torch.tensor([15, 9], dtype=torch.int32), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
        return SimpleNamespace(seq_lens=lens, query_start_loc=torch.tensor(starts), block_table=table, **more)

    groups: Any = [SimpleNamespace(gid=0, name="full", layers=("first", "shares"), window=0)]
    reader = AttentionReader(SimpleNamespace(), groups, 1)
    metadata = {"first": given([0, 15, 20]), "shares": given([0, 1, 2], num_logits_indices=2)}
    found = reader.read(metadata, np.array([0, 4]), np.array([15, 5]), [BLOCK])
    assert [np.asarray(one.query_lens).tolist() for one in found] == [[15, 5]]
    metadata["shares"].num_logits_indices = None  # in steps that it is run for all tokens of
    assert len(reader.read(metadata, np.array([0, 4]), np.array([15, 5]), [BLOCK])) == 2


@pytest.mark.parametrize("fault", ["lost prefix", "table", "table in flight"])
def test_what_attention_gets_wrong_stands_in_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    done: list[int] = []
    changes: list[Any] = []

    def break_it(runner: GPUModelRunner, metadata: dict[str, Any]) -> None:
        (given,) = metadata.values()
        ends = given.seq_lens.tolist()
        if done or len(ends) < 3 or max(ends) <= 2 * BLOCK:
            return
        row = ends.index(max(ends))
        done.append(ends[row])
        if fault == "lost prefix":
            given.seq_lens[row] = 1
        elif fault == "table":
            given.block_table[row, 0] = 39
        else:
            changes.append((given, row))

    forward = GPUModelRunner._model_forward

    def overwritten(runner: GPUModelRunner, *args: Any, **kwargs: Any) -> None:
        forward(runner, *args, **kwargs)
        while changes:
            given, row = changes.pop()
            given.block_table[row, 1] = 39

    monkeypatch.setattr(GPUModelRunner, "_model_forward", overwritten)
    monkeypatch.setattr(GPUModelRunner, "on_attention", break_it)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve()
    assert done
    _, _, events = replayed(tmp_path)
    lens = [
        (a, p + e)
        for event in events
        if event.kind == "forward"
        for a, p, e in zip(
            event.ints("attention_seq_lens"), event.ints("prefix_lens"), event.ints("extend_lens"), strict=True
        )
    ]
    wrong = [event for event in events if event.kind == "forward" and len(event.ints("attention_slots"))]
    if fault == "lost prefix":
        assert [pair for pair in lens if pair[0] != pair[1]] == [(1, done[0])]
    else:
        (event,) = wrong
        first = 0 if fault == "table" else BLOCK
        assert event.ints("attention_start").tolist() == [first]
        assert event.ints("attention_slots").tolist() == [39 * BLOCK + i for i in range(BLOCK)]


def draft(runner: GPUModelRunner) -> None:
    """Store something of every token of the step, as a draft model does behind its target."""
    slots = runner.input_batch.block_table[0].slot_mapping.gpu
    computed = runner.input_batch.num_computed_tokens_cpu
    starts = torch.tensor([0, *(int(end - computed[row]) for _, row, end in runner.ends)]).cumsum(0)
    slots = slots[: int(starts[-1])].clone()
    if runner.drafter.spoil is not None:
        runner.drafter.spoil(runner, slots)
    layer = runner.layers["draft.0.attn"]
    CONTEXT.attn_metadata = {"draft.0.attn": SimpleNamespace(query_start_loc=starts)}
    key = torch.ones(len(slots), HEADS, DIM)
    layer.impl.do_kv_cache_update(layer, key, key, layer.kv_cache, slots)
    CONTEXT.attn_metadata = None


def with_a_drafter(monkeypatch: pytest.MonkeyPatch, spoil: Any = None) -> None:
    sample = GPUModelRunner.sample_tokens

    def drafting(runner: GPUModelRunner, grammar: Any) -> Any:
        draft(runner)
        return sample(runner, grammar)

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", drafting)
    drafter = SimpleNamespace(_draft_attn_layer_names={"draft.0.attn"}, spoil=spoil)
    monkeypatch.setattr(GPUModelRunner, "drafter", drafter, raising=False)


@pytest.mark.parametrize("shape", ["full", "few blocks", "waves", "hybrid"])
def test_what_a_draft_model_writes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    with_a_drafter(monkeypatch)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path, sweep_every=3))
    serve(**SHAPES[shape])
    summary, header, events = replayed(tmp_path)
    assert summary.verdict.value == "clean"
    assert [(group.name, group.runner) for group in header.groups][-1] == ("draft", 1)
    drafts = [event for event in events if event.kind == "forward" and event.scalar("runner") == 1]
    assert drafts
    assert any((event.ints("slot_group") == len(header.groups) - 1).any() for event in events if event.kind == "alloc")
    assert header.runners[1].derived == ("prefix_lens", "positions", "input_ids")


def test_a_draft_model_that_writes_a_shared_prefix_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def spoil(runner: GPUModelRunner, slots: Any) -> None:
        if not done and len(runner.ends) > 2 and runner.ends[0][2] > 12:
            blocks = runner.requests[runner.ends[0][0]].blocks[0]
            slots[0] = blocks[0] * BLOCK + 1  # of the prefix that others read too
            done.append(int(slots[0]))

    with_a_drafter(monkeypatch, spoil)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve()
    assert done
    summary, _, _ = replayed(tmp_path)
    assert set(summary.findings_by_kind) == {"write_to_foreign_slot"}
