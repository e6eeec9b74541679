"""A draft model's forwards, as the adapter records them: what they are fed, what they read, and what is wrong with it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.kernels.constants import UNKNOWN_TOKEN
from kvcanary.recorder.engines.vllm.layout import draft_offset
from kvcanary.recorder.process.settings import RecordingSettings

from ...support.one_trace import replayed
from .fake_engine import BLOCK, CONTEXT, DIM, HEADS, GPUModelRunner, hooked, serve

LAYER = "draft.0.attn"

pytestmark = pytest.mark.usefixtures("process_goes_on")


class DraftLayers:
    """A draft model of one layer."""

    runner: Any

    def forward(self, *, input_ids: Any, positions: Any, inputs_embeds: Any = None) -> None:
        layer, slots = self.runner.layers[LAYER], CONTEXT.slot_mapping[LAYER]
        key = torch.sin(input_ids + positions / 7)[:, None, None].expand(-1, HEADS, DIM).contiguous()
        held = slots >= 0
        layer.impl.do_kv_cache_update(layer, key[held], key[held], layer.kv_cache, slots[held])


class EagleProposer:
    """vLLM's drafter: one forward over the step's tokens, each with the token behind it, and one for each guess but one."""

    ahead = 1
    _draft_attn_layer_names = frozenset({LAYER})
    draft_attn_groups = (SimpleNamespace(layer_names=[LAYER], backend=SimpleNamespace(get_name=lambda: "CPU_ATTN")),)

    def __init__(self, spoil: Callable[[Any], None] | None = None, *, last_of_all: bool = False) -> None:
        self.model = DraftLayers()
        self.spoil = spoil
        self.last_of_all = last_of_all
        self.rounds = 0

    def propose(self, runner: GPUModelRunner, num_rejected_tokens_gpu: Any = None) -> None:
        self.model.runner = runner
        self.rounds += 1
        computed = runner.input_batch.num_computed_tokens_cpu
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, row, end in runner.ends:
            own, first = runner.requests[name].tokens, int(computed[row])
            for p in range(first, end + 1 - self.ahead):
                in_prompt = end < len(own) - 1
                tokens.append(
                    own[-1] if self.last_of_all and in_prompt and p == end - self.ahead else own[p + self.ahead]
                )
                positions.append(p)
                slots.append(self._slot(runner, name, p))
            starts.append(len(tokens))
        ends = [end + 1 - self.ahead for _, _, end in runner.ends]
        self._run("first", tokens, positions, slots, starts, ends)
        for step in range(2):
            at = [end + step for end in ends]
            slots = [self._slot(runner, name, p) for (name, _, _), p in zip(runner.ends, at, strict=True)]
            self._run(f"step {step}", [7 + step] * len(at), at, slots, list(range(len(at) + 1)), [p + 1 for p in at])

    @staticmethod
    def _slot(runner: GPUModelRunner, name: str, position: int) -> int:
        """Return where a token goes, -1 if the request has no block for it."""
        blocks = runner.requests[name].blocks[0]
        return blocks[position // BLOCK] * BLOCK + position % BLOCK if position < len(blocks) * BLOCK else -1

    def _run(self, stage: str, tokens: Any, positions: Any, slots: Any, starts: Any, ends: Any) -> None:
        call = SimpleNamespace(
            stage=stage,
            runner=self.model.runner,
            tokens=torch.tensor(tokens, dtype=torch.int32),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            starts=torch.tensor(starts, dtype=torch.int32),
            blocks=self.model.runner.input_batch.block_table[0].block_table.gpu.clone(),
        )
        if self.spoil is not None:
            self.spoil(call)
        CONTEXT.attn_metadata = {
            LAYER: SimpleNamespace(seq_lens=call.seq_lens, query_start_loc=call.starts, block_table=call.blocks)
        }
        CONTEXT.slot_mapping = {LAYER: call.slots}
        self.model.forward(input_ids=call.tokens, positions=call.positions)
        CONTEXT.attn_metadata = CONTEXT.slot_mapping = None


class DraftModelProposer(EagleProposer):
    """A model of its own: it is fed each token at its position, and the sampled one behind them."""

    ahead = 0


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, drafter: EagleProposer, *, skip: Any = None, **options: Any
) -> Any:
    """Serve with a drafter, and return the replay's summary, the header and the events."""
    sample = GPUModelRunner.sample_tokens

    def drafting(runner: GPUModelRunner, grammar: Any) -> Any:
        result = sample(runner, grammar)
        if skip is None or not skip():
            drafter.propose(runner, num_rejected_tokens_gpu=None)
        return result

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", drafting)
    monkeypatch.setattr(GPUModelRunner, "drafter", drafter, raising=False)
    hooked(monkeypatch, RecordingSettings(folder=folder))
    serve(**options)
    return replayed(folder)


@pytest.mark.parametrize("shape", ["plain", "few blocks", "small steps", "shared"])
@pytest.mark.parametrize("kind", [EagleProposer, DraftModelProposer])
def test_a_healthy_draft_replays_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[EagleProposer], shape: str
) -> None:
    # EAGLE's K and V of a block's last token depend on the token behind it: a hit must leave out the last block.
    options: dict[str, Any] = {"caching": shape == "shared" and kind is DraftModelProposer}
    options |= {"few blocks": {"num_blocks": 14}, "small steps": {"budget": 5}, "shared": {"budget": 40}}.get(shape, {})
    summary, header, events = run(monkeypatch, tmp_path, kind(), **options)
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


@pytest.mark.parametrize(("at", "fault"), FAULTS, ids=lambda one: getattr(one, "__name__", one))
def test_a_fault_of_the_draft_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, fault: Any) -> None:
    done: list[int] = []

    def spoil(call: Any) -> None:
        decoding = len(call.runner.ends) > 1 and len(call.tokens) == len(call.runner.ends)
        if not done and call.stage == at and decoding and min(call.seq_lens) > BLOCK:
            done.append(1)
            fault(call)

    summary, _, _ = run(monkeypatch, tmp_path, EagleProposer(spoil), caching=False)
    assert done
    found = {*summary.findings_by_kind, *(row for row in summary.violations_by_reason if row)}
    assert any(FAULTS[at, fault] in one for one in found), found


def test_a_step_without_the_drafter_leaves_its_slots_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def skip() -> bool:
        steps.append(1)
        return len(steps) in (3, 7, 8)

    summary, _, events = run(monkeypatch, tmp_path, EagleProposer(), skip=skip, caching=False)
    assert summary.verdict.value != "corrupt"
    left_out = [event for event in events if event.kind == "transfer"]
    assert len(left_out) == 3
    assert {event.ints("slot_group").tolist()[0] for event in left_out} == {1}


def test_the_last_token_behind_a_part_of_a_prompt_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = EagleProposer(last_of_all=True)
    summary, header, events = run(monkeypatch, tmp_path, drafter, caching=False, budget=5)
    assert summary.verdict.value == "clean"
    fed = [token for event in events if event.scalar("runner") == 1 for token in event.ints("input_ids").tolist()]
    assert 0 < fed.count(UNKNOWN_TOKEN) < len(fed) // 4
    assert "the draft's last token of a part of a prompt" in {one.name for one in header.not_watched}


@pytest.mark.parametrize("why", ["another drafter", "parallel", "connector", "graphs"])
def test_of_other_drafts_the_writes_alone_are_recorded(why: str) -> None:
    runner: Any = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=None), drafter=EagleProposer())
    assert draft_offset(runner) == 1
    if why == "another drafter":
        runner.drafter = SimpleNamespace(model=DraftLayers())
    elif why == "parallel":
        runner.drafter.parallel_drafting = True
    elif why == "connector":
        runner.vllm_config.kv_transfer_config = object()
    else:
        runner.drafter.model.unwrap = lambda: None
    assert draft_offset(runner) is None
