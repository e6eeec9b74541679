"""A draft model's forwards, as the adapter records them: what they are fed, what they read, and what is wrong with it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.kernels.constants import UNKNOWN_TOKEN
from kvcanary.recorder.engines.vllm.layout import draft_offset
from kvcanary.recorder.process.settings import RecordingSettings

from ...support.one_trace import replayed
from .fake_drafts import LAYER, DraftLayers, DraftModelProposer, EagleProposer, EagleSpeculator
from .fake_engine import BLOCK, DIM, HEADS, GPUModelRunner, GPUModelRunnerV2, hooked, serve, serve_session

pytestmark = pytest.mark.usefixtures("process_goes_on")


def run(folder: Path, drafter: EagleProposer, *, skip: Any = None, serving: Any = serve, **options: Any) -> Any:
    """Serve with a drafter, and return the replay's summary, the header and the events."""
    v2 = isinstance(drafter, EagleSpeculator)
    kind = GPUModelRunnerV2 if v2 else GPUModelRunner
    sample = kind.sample_tokens

    def drafting(runner: Any, grammar: Any) -> Any:
        result = sample(runner, grammar)
        if skip is None or not skip():
            drafter.draft(runner)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "sample_tokens", drafting)
        patch.setattr(kind, "speculator" if v2 else "drafter", drafter, raising=False)
        attachment = hooked(patch, RecordingSettings(folder=folder), v2=v2)
        serving(**options, v2=v2)
        assert not attachment.off
    return replayed(folder)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", ["plain", "few blocks", "small steps", "shared"])
@pytest.mark.parametrize("kind", [EagleProposer, DraftModelProposer])
def test_a_healthy_draft_replays_clean(tmp_path: Path, kind: type[EagleProposer], shape: str) -> None:
    # EAGLE's K and V of a block's last token depend on the token behind it: a hit must leave out the last block.
    options: dict[str, Any] = {"caching": shape == "shared" and kind is DraftModelProposer}
    options |= {"few blocks": {"num_blocks": 14}, "small steps": {"budget": 5}, "shared": {"budget": 40}}.get(shape, {})
    summary, header, events = run(tmp_path, kind(), **options)
    assert (summary.verdict.value, summary.findings_by_kind) == ("clean", {})
    assert (header.runners[1].token_offset, header.runners[1].derived) == (kind.ahead, ())
    drafts = [event for event in events if event.kind == "forward" and event.scalar("runner") == 1]
    assert {event.scalar("mode") for event in drafts} == {"draft_extend", "decode"}
    assert {event.scalar("attention_watched") for event in drafts} == {3}
    assert all((event.ints("input_ids") != UNKNOWN_TOKEN).all() for event in drafts)
    assert max(int(event.ints("prefix_lens").max()) for event in drafts) > BLOCK
    assert sum(len(event.ints("req_pool_indices")) for event in drafts if event.scalar("mode") == "decode")


def positions(call: Any) -> None:
    call.positions += 1


def seq_lens(call: Any) -> None:
    call.seq_lens[0] -= 1


def slot_mapping(call: Any) -> None:
    call.slots[0] += 1


def block_table(call: Any) -> None:
    call.blocks[0, 0] = call.blocks[1, 0]


def next_token(call: Any) -> None:
    call.tokens[-1] += 1


FAULTS = {
    ("first", positions): "WRITE_POSITION",
    ("step 0", positions): "WRITE_POSITION",
    ("step 1", seq_lens): "attention_lens",
    ("first", seq_lens): "attention_lens",
    ("step 0", slot_mapping): "attention_slots",
    ("step 0", block_table): "attention_slots",
    ("first", next_token): "VERIFY_TOKEN",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("at", "fault"), FAULTS, ids=lambda one: getattr(one, "__name__", one))
def test_a_fault_of_the_draft_is_found(tmp_path: Path, at: str, fault: Any) -> None:
    done: list[int] = []

    def spoil(call: Any) -> None:
        decoding = len(call.runner.ends) > 1 and len(call.tokens) == len(call.runner.ends)
        if not done and call.stage == at and decoding and min(call.seq_lens) > BLOCK:
            done.append(1)
            fault(call)

    summary, _, _ = run(tmp_path, EagleProposer(spoil), caching=False)
    assert done
    found = {*summary.findings_by_kind, *(row for row in summary.violations_by_reason if row)}
    assert any(FAULTS[at, fault] in one for one in found), found


def test_a_step_without_the_drafter_leaves_its_slots_unknown(tmp_path: Path) -> None:
    steps: list[int] = []

    def skip() -> bool:
        steps.append(1)
        return len(steps) in (3, 7, 8)

    summary, _, events = run(tmp_path, EagleProposer(), skip=skip, caching=False)
    assert summary.verdict.value != "corrupt"
    left_out = [event for event in events if event.kind == "transfer"]
    assert len(left_out) == 3
    assert {event.ints("slot_group").tolist()[0] for event in left_out} == {1}


def test_what_a_draft_knows_of_a_token_that_a_session_dropped_is_unknown(tmp_path: Path) -> None:
    summary, _, events = run(tmp_path, EagleProposer(), serving=serve_session)
    assert (summary.findings_by_kind, summary.violations_by_reason) == ({}, {})
    unknown = [event for event in events if event.kind == "transfer"]
    assert [event.ints("slot_count").tolist() for event in unknown] == [[1], [1]]
    assert {event.ints("slot_group").tolist()[0] for event in unknown} == {1}


def test_the_last_token_behind_a_part_of_a_prompt_is_unknown(tmp_path: Path) -> None:
    drafter = EagleProposer(last_of_all=True)
    summary, header, events = run(tmp_path, drafter, caching=False, budget=5)
    assert summary.verdict.value == "clean"
    fed = [token for event in events if event.scalar("runner") == 1 for token in event.ints("input_ids").tolist()]
    assert 0 < fed.count(UNKNOWN_TOKEN) < len(fed) // 4
    assert "the draft's last token of a part of a prompt" in {one.name for one in header.not_watched}


@pytest.mark.parametrize("why", ["another drafter", "parallel", "connector", "graphs", "compiled"])
def test_of_other_drafts_the_writes_alone_are_recorded(why: str) -> None:
    config = SimpleNamespace(kv_transfer_config=None)
    runner: Any = SimpleNamespace(vllm_config=config, drafter=EagleProposer(), input_batch=None)
    assert draft_offset(runner) == 1
    if why == "another drafter":
        runner.drafter = SimpleNamespace(model=DraftLayers())
    elif why == "parallel":
        runner.drafter.parallel_drafting = True
    elif why == "connector":
        runner.vllm_config.kv_transfer_config = object()
    elif why == "compiled":
        runner.drafter.model.do_not_compile = False
    else:
        runner.drafter.model.unwrap = lambda: None
    assert draft_offset(runner) is None


@pytest.mark.parametrize("stores", ["K and V", "K and V by name", "one tensor"])
def test_of_another_draft_the_slots_are_recorded_that_its_layer_is_called_with(tmp_path: Path, stores: str) -> None:
    class Stored:
        """Hidden states, for example: what is stored is one tensor."""

        def do_kv_cache_update(self, layer: Any, states: Any, kv_cache: Any, slot_mapping: Any) -> None:
            held = slot_mapping[slot_mapping >= 0]
            kv_cache[held // BLOCK, 0, held % BLOCK, 0] = states[slot_mapping >= 0].float()

    class Layers(DraftLayers):
        def compute(self, input_ids: Any, positions: Any, slots: Any) -> None:
            layer = self.runner.layers[LAYER]
            if stores == "one tensor":
                layer.impl.do_kv_cache_update(layer, input_ids + positions, layer.kv_cache, slots)
            elif stores == "K and V":
                super().compute(input_ids, positions, slots)
            else:
                key = torch.ones(len(slots), HEADS, DIM)
                layer.impl.do_kv_cache_update(layer, key, value=key, kv_cache=layer.kv_cache, slot_mapping=slots)

    drafter = EagleProposer()
    drafter.model, drafter.parallel_drafting = Layers(), True  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        if stores == "one tensor":
            made = GPUModelRunner.initialize_kv_cache

            def initialize(runner: Any, config: Any, is_profiling: bool = False) -> None:
                made(runner, config, is_profiling)
                runner.layers[LAYER].impl = Stored()

            patch.setattr(GPUModelRunner, "initialize_kv_cache", initialize)
        summary, _, events = run(tmp_path, drafter, caching=False)
    drafts = [event for event in events if event.kind == "forward" and event.scalar("runner") == 1]
    assert (summary.verdict.value, len(drafts) > 9) == ("clean", True)
    assert not [event for event in events if event.kind == "loss"]


def test_a_draft_whose_metadata_say_nothing_of_its_requests_is_not_watched(tmp_path: Path) -> None:
    class StatesAlone(EagleProposer):
        def _forward(self, call: Any, metadata: dict[str, Any]) -> None:
            super()._forward(call, {LAYER: SimpleNamespace(slot_mapping=call.slots)})

    drafter = StatesAlone()
    drafter.parallel_drafting = True  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        made = GPUModelRunner.__init__

        def make(runner: Any, *args: Any, **kwargs: Any) -> None:
            made(runner, *args, **kwargs)
            runner.vllm_config.speculative_config = SimpleNamespace(method="extract_hidden_states")

        patch.setattr(GPUModelRunner, "__init__", make)
        summary, header, events = run(tmp_path, drafter, caching=False)
    assert not [event for event in events if event.kind == "forward" and event.scalar("runner") == 1]
    assert header.runners[1].name in {one.name for one in header.not_watched if one.what == "runner"}
    assert (summary.verdict.value, summary.findings_by_kind) == ("clean", {})
