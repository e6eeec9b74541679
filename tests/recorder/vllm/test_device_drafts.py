"""A draft's forwards captured on the device, by its kernels in Triton's interpreter: the same as the host's recorder has them."""

from pathlib import Path
from typing import Any

import pytest
from kvcanary.kernels.constants import UNKNOWN_TOKEN
from kvcanary.recorder.engines.vllm import recording
from kvcanary.recorder.engines.vllm.layout import DRAFT_DERIVED, WRITES_ALONE

from .fake_drafts import DraftModelProposer, EagleProposer, EagleSpeculator, StandaloneARSpeculator
from .fake_engine import BLOCK, FullAttentionSpec, SlidingWindowSpec
from .gpu_stand_in import COLUMNS, pass_for_gpu
from .test_drafts import block_table, next_token, positions, run, seq_lens, slot_mapping

pytestmark = pytest.mark.usefixtures("process_goes_on")
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"caching": False},
    "few blocks": {"caching": False, "num_blocks": 14},
    "small steps": {"caching": False, "budget": 5},
    "shared": {"budget": 40},
}


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_for_gpu(monkeypatch)


def rows(events: list[Any]) -> list[dict[str, Any]]:
    """Return what is said of each forward with tokens, in order."""
    return [
        {name: event.ints(name).tolist() for name in COLUMNS}
        | {"out_cache_loc": _own_slots(event)}
        | {name: event.scalar(name) for name in ("runner", "mode", "attention_watched", "note")}
        | {"content": event.bytes("kv_bytes").tobytes()}
        for event in events
        if event.kind == "forward" and len(event.ints("extend_lens"))
    ]


def _own_slots(event: Any) -> list[int]:
    """Return the slots in the one table of the forward's runner: of others the two recorders may say otherwise."""
    own: list[int] = event.ints("out_cache_loc").reshape(2, -1)[event.scalar("runner")].tolist()
    return own


# Of each shape both ways to draft, one of them with rejections: in the interpreter a case takes seconds. EAGLE's K and V of a block's
# last token depend on the token behind it: a hit must leave out the last block.
OF_BOTH = [
    (kind, 2 * ((number + at) % 2), shape)
    for at, kind in enumerate((EagleProposer, DraftModelProposer))
    for number, shape in enumerate(SHAPES)
    if kind is DraftModelProposer or shape != "shared"
]


@pytest.mark.one_in(14)
@pytest.mark.parametrize(("kind", "rejected", "shape"), OF_BOTH)
@pytest.mark.long
def test_both_recorders_say_the_same_of_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[EagleProposer], rejected: int, shape: str
) -> None:
    found = {}
    for device in (True, False):
        monkeypatch.setattr(recording, "on_gpu", lambda _, device=device: device)
        drafter = kind(rejected=rejected, last_of_all=shape == "small steps")
        summary, header, events = run(tmp_path / str(device), drafter, **SHAPES[shape])
        assert (summary.verdict.value, summary.findings_by_kind) == ("clean", {})
        assert not any("waits" in note for note in header.notes)
        found[device] = rows(events)
    assert len(found[True]) == len(found[False])
    for mine, other in zip(found[True], found[False], strict=True):
        assert mine == other
    drafts = [row for row in found[True] if row["runner"] == 1]
    assert {row["mode"] for row in drafts} == {"draft_extend", "decode"}
    assert any(len(row["req_pool_indices"]) > 1 for row in drafts)
    unknown = [token for row in drafts for token in row["input_ids"]].count(UNKNOWN_TOKEN)
    assert bool(unknown) == (shape == "small steps")


V2 = {
    "eager": {},
    "eager, rejected": {"rejected": 2},
    "eager, apart": {"together": False},
    "graphs": {"graphs": True},
    "graphs, apart": {"graphs": True, "together": False},
}


# A model of its own has no graphs. Of each way one shape, of both kinds the other one.
OF_V2 = [
    (kind, how, ("few blocks", "small steps")[(number + at) % 2])
    for at, kind in enumerate((EagleSpeculator, StandaloneARSpeculator))
    for number, how in enumerate(V2)
    if kind is EagleSpeculator or "graphs" not in how
]


@pytest.mark.one_in(14)
@pytest.mark.parametrize(("kind", "how", "shape"), OF_V2)
def test_a_draft_of_the_v2_runner_replays_clean(
    tmp_path: Path, kind: type[EagleSpeculator], shape: str, how: str
) -> None:
    summary, header, events = run(tmp_path, kind(**V2[how]), **SHAPES[shape])
    assert (summary.verdict.value, summary.findings_by_kind) == ("clean", {})
    assert not any("waits" in note for note in header.notes)
    assert (header.runners[1].token_offset, header.runners[1].derived) == (kind.ahead, ())
    drafts = [row for row in rows(events) if row["runner"] == 1]
    in_one_graph = how == "graphs"
    assert {row["mode"] for row in drafts} == {"draft_extend", *(() if in_one_graph else ("decode",))}
    assert any("behind its first" in one.name for one in header.not_watched) == in_one_graph
    assert {row["attention_watched"] for row in drafts} == {3}
    assert 1000 not in {token for row in drafts for token in row["input_ids"]}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [EagleProposer, DraftModelProposer, EagleSpeculator, StandaloneARSpeculator])
@pytest.mark.long
def test_with_several_groups_each_keeps_its_table(tmp_path: Path, kind: type[EagleProposer]) -> None:
    specs = [FullAttentionSpec(), SlidingWindowSpec()]
    summary, header, events = run(tmp_path, kind(), specs=specs, num_blocks=40, caching=False, budget=7)
    assert (summary.verdict.value, summary.findings_by_kind) == ("clean", {})
    assert [group.name for group in header.groups] == ["full", "swa", "draft"]
    assert {event.scalar("runner") for event in events if event.kind == "forward"} == {0, 1}


@pytest.mark.parametrize("kind", [EagleProposer, EagleSpeculator])
@pytest.mark.one_in(28)
def test_a_step_without_the_drafter_leaves_its_slots_unknown(tmp_path: Path, kind: type[EagleProposer]) -> None:
    steps: list[int] = []

    def skip() -> bool:
        steps.append(1)
        return len(steps) in (3, 7, 8)

    summary, _, events = run(tmp_path, kind(), skip=skip, caching=False)
    assert summary.verdict.value != "corrupt"
    left_out = [event for event in events if event.kind == "transfer"]
    assert len(left_out) == 3
    assert {event.ints("slot_group").tolist()[0] for event in left_out} == {1}


def test_where_the_v2_runner_waits_its_drafts_writes_alone_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "why_it_waits", lambda *_: "of a reason")
    summary, header, events = run(tmp_path, EagleSpeculator(), caching=False)
    assert "every forward waits for the device: of a reason" in header.notes
    assert header.runners[1].derived == DRAFT_DERIVED
    assert not header.groups[1].streams
    assert WRITES_ALONE in {one.reason for one in header.not_watched}
    assert summary.verdict.value == "clean"
    assert {tuple(row["input_ids"]) for row in rows(events) if row["runner"] == 1} <= {(-1,) * n for n in range(99)}


def test_a_drafter_that_is_told_nothing_of_rejected_tokens_is_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = EagleSpeculator()
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *given: propose(*given))
    _, header, _ = run(tmp_path, drafter, caching=False)
    assert any("recorded as they store" in note for note in header.notes)
    assert header.runners[1].derived == DRAFT_DERIVED


FAULTS = {
    ("first", positions): "WRITE_POSITION",
    ("step 0", positions): "WRITE_POSITION",
    ("step 1", seq_lens): "attention_lens",
    ("first", seq_lens): "attention_lens",
    ("step 0", slot_mapping): "VERIFY",
    ("step 0", block_table): "VERIFY",
    ("first", next_token): "VERIFY_TOKEN",
}


@pytest.mark.one_in(14)
@pytest.mark.parametrize(("at", "fault"), FAULTS, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.parametrize("kind", [EagleProposer, EagleSpeculator])
def test_a_fault_of_the_draft_is_found(tmp_path: Path, kind: type[EagleProposer], at: str, fault: Any) -> None:
    done: list[int] = []

    def spoil(call: Any) -> None:
        decoding = len(call.runner.ends) > 1 and len(call.tokens) == len(call.runner.ends)
        if not done and call.stage == at and decoding and min(call.seq_lens) > BLOCK:
            done.append(1)
            fault(call)

    summary, _, _ = run(tmp_path, kind(spoil), caching=False)
    assert done
    found = {*summary.findings_by_kind, *(row for row in summary.violations_by_reason if row)}
    assert any(FAULTS[at, fault] in one for one in found), found
