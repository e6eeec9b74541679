"""Recurrent state that is not the reader's own: found in every way of replaying, and nothing unknown judged."""

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kvcanary.recorder.capture.recurrent import StateAccess
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import RECURRENT_OPS
from kvcanary.replayer.checks import CHECK_NAMES
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ...support.raw_traces import cut, read_raw, write_raw
from .scene import Part, Scene, told

CHECKPOINT, OTHER = 6, 7


def healthy(scene: Scene) -> Scene:
    """Request 1 computes four tokens in two chunks and leaves a checkpoint, which request 2 goes on from; each decodes."""
    scene.clear_state(1)
    scene.forward(Part(request=1, row=1, prefix=0, slots=(1, 2), state=1))
    scene.forward(Part(request=1, row=1, prefix=2, slots=(3, 4), state=1))
    scene.copy_state(1, CHECKPOINT)
    scene.forward(Part(request=1, row=1, prefix=4, slots=(5,), state=1), mode="decode")
    scene.tokens[2] = scene.token(1).copy()
    scene.tokens[2][4:] += 50
    scene.table[2, :4] = (1, 2, 3, 4)
    return scene


def hit(scene: Scene, checkpoint: int = CHECKPOINT) -> Scene:
    scene.copy_state(checkpoint, 2)
    scene.forward(Part(request=2, row=2, prefix=4, slots=(6, 7), state=2))
    scene.forward(
        Part(request=1, row=1, prefix=5, slots=(8,), state=1),
        Part(request=2, row=2, prefix=6, slots=(9,), state=2),
        mode="decode",
    )
    return scene


def wrong_checkpoint(scene: Scene) -> None:
    """Another prompt of four tokens has one, too."""
    healthy(scene)
    scene.forward(Part(request=3, row=3, prefix=0, slots=(10, 11, 12, 13), state=3))
    scene.copy_state(3, OTHER)
    hit(scene, OTHER)


def late_checkpoint(scene: Scene) -> None:
    """What is kept for four tokens is copied once the fifth is in, which the two prompts have in common."""
    healthy(scene)
    scene.tokens[2] = scene.token(1)
    scene.copy_state(1, CHECKPOINT)
    hit(scene)


def freed_early(scene: Scene) -> None:
    """Request 3 gets the slot that request 1 goes on with."""
    healthy(scene)
    scene.clear_state(1)
    scene.forward(Part(request=3, row=3, prefix=0, slots=(10, 11), state=1))
    hit(scene)


def freed_early_in_slot_0(scene: Scene) -> None:
    """The first slot is one like the others."""
    scene.forward(Part(request=1, row=1, prefix=0, slots=(1, 2), state=0))
    scene.forward(Part(request=3, row=3, prefix=0, slots=(10, 11), state=0))
    scene.forward(Part(request=1, row=1, prefix=2, slots=(3, 4), state=0))


def damaged(scene: Scene) -> None:
    healthy(scene)
    scene.states[CHECKPOINT] += 1
    hit(scene)


def shared(scene: Scene) -> None:
    healthy(scene)
    scene.copy_state(CHECKPOINT, 1)
    parts = (Part(request=r, row=r, prefix=4, slots=(4 + r,), state=1) for r in (1, 2))
    scene.forward(*parts)


def saves(scene: Scene, tokens: int = 4, other: int = 0) -> Scene:
    """As `healthy`, but the second chunk is longer, and its forward saves the state behind four tokens itself; beside it
    another prompt's may be saved.
    """
    scene.forward(Part(request=1, row=1, prefix=0, slots=(1, 2), state=1))
    parts = [Part(request=1, row=1, prefix=2, slots=(3, 4, 5), state=1, saves=(CHECKPOINT, tokens))]
    if other:
        parts.append(Part(request=3, row=3, prefix=0, slots=(10, 11, 12, 13), state=3, saves=(OTHER, 4)))
    scene.forward(*parts)
    scene.tokens[2] = scene.token(1).copy()
    scene.tokens[2][4:] += 50
    scene.table[2, :4] = (1, 2, 3, 4)
    return scene


def saved_for_another_prefix(scene: Scene) -> None:
    hit(saves(scene, other=1), OTHER)


def saved_behind_another_token(scene: Scene) -> None:
    hit(saves(scene, tokens=3))


def saved_and_damaged(scene: Scene) -> None:
    saves(scene)
    scene.states[CHECKPOINT] += 1
    hit(scene)


def saved_over(scene: Scene) -> None:
    """What one decode has saved another saves over before it is read."""
    saves(scene)
    scene.forward(Part(request=3, row=3, prefix=0, slots=(10, 11, 12, 13), state=3, saves=(CHECKPOINT, 4)))
    hit(scene)


def saved_by_a_forward_that_failed(scene: Scene) -> None:
    saves(scene)
    part = Part(request=3, row=3, prefix=0, slots=(10, 11), state=3, saves=(CHECKPOINT, 2))
    scene.forward(part, failed=True)
    hit(scene)


def never_filled(scene: Scene) -> None:
    """A slot that nobody was seen to fill holds nobody knows what."""
    healthy(scene)
    scene.states[OTHER] += 1
    hit(scene, OTHER)


def nothing_restored(scene: Scene) -> None:
    """What a hit was to bring back was not copied, and the slot is as it was made: as one that has been zeroed."""
    healthy(scene)
    for prefix, slot in ((5, 8), (6, 9)):
        scene.forward(Part(request=1, row=1, prefix=prefix, slots=(slot,), state=1), mode="decode")
    scene.forward(Part(request=2, row=2, prefix=4, slots=(6, 7), state=2))


def zeros_are_a_state(scene: Scene) -> None:
    """Where a forward leaves nothing but zeros, a slot that holds them may have been filled."""
    scene.clear_state(1)
    scene.forward(Part(request=1, row=1, prefix=0, slots=(1, 2), state=1), leaves=0)
    healthy(scene)
    scene.forward(Part(request=2, row=2, prefix=4, slots=(6, 7), state=2))


def zeros_at_once(scene: Scene) -> None:
    """The first forward that is seen goes on from zeros and leaves zeros: its state may be nothing else."""
    scene.clear_state(1)
    scene.tokens[2], scene.table[2, :4] = scene.token(1), (1, 2, 3, 4)
    scene.forward(Part(request=2, row=2, prefix=4, slots=(6, 7), state=2), leaves=0)


def nothing_restored_behind_a_failure(scene: Scene) -> None:
    """A forward that failed has left the zeros that it found, which says nothing of those that run."""
    scene.clear_state(1)
    scene.forward(Part(request=1, row=1, prefix=0, slots=(1, 2), state=1), leaves=0, failed=True)
    nothing_restored(scene)


def begins_from_zeros(scene: Scene) -> None:
    """An engine may have a request that begins read its slot, which is as it was made."""
    healthy(scene)
    scene.forward(Part(request=3, row=3, prefix=0, slots=(10, 11), state=3, reads=3))


def zeroed_unseen(scene: Scene) -> None:
    """A slot that had another's state is zeroed by what the recorder does not see, before the next request begins there."""
    healthy(scene)
    scene.states[1] = 0
    scene.forward(Part(request=3, row=3, prefix=0, slots=(10, 11), state=1, reads=1))


def not_zeroed(scene: Scene) -> None:
    """A request begins from what nobody was seen to leave."""
    healthy(scene)
    scene.states[OTHER] += 1
    scene.forward(Part(request=3, row=3, prefix=0, slots=(10, 11), state=OTHER, reads=OTHER))


def begins_from_another_s(scene: Scene) -> None:
    healthy(scene)
    scene.forward(Part(request=3, row=3, prefix=0, slots=(10, 11), state=1, reads=1))


def begun_anew(scene: Scene) -> None:
    """A request that has a prefix is told to begin with no state."""
    healthy(scene)
    scene.copy_state(CHECKPOINT, 2)
    scene.forward(Part(request=2, row=2, prefix=4, slots=(6, 7), state=2, reads=-1))


def not_seen(scene: Scene) -> None:
    """Nobody saw which slots the second chunk went to."""
    healthy(scene)
    scene.forward(Part(request=3, row=3, prefix=0, slots=(10, 11)))
    scene.states[CHECKPOINT] += 1
    hit(scene)


def failed(scene: Scene) -> None:
    """A step fails, and is done again."""
    healthy(scene)
    for fails in (True, False):
        scene.forward(Part(request=1, row=1, prefix=5, slots=(8,), state=1), mode="decode", failed=fails)


def lost(scene: Scene) -> None:
    healthy(scene)
    scene.lose()
    scene.states[CHECKPOINT] += 1
    hit(scene)


def put_back(scene: Scene) -> None:
    """A decode leaves what it found."""
    healthy(scene)
    scene.forward(Part(request=1, row=1, prefix=5, slots=(8,), state=1), mode="decode", leaves=5)


def repeated(scene: Scene) -> None:
    """The same token again, and more than one token, may leave a state as it was."""
    scene.token(1)[5] = scene.token(1)[4]
    healthy(scene)
    scene.forward(Part(request=1, row=1, prefix=5, slots=(8,), state=1), mode="decode", leaves=5)
    scene.forward(Part(request=1, row=1, prefix=6, slots=(9, 10), state=1), leaves=5)


def alike(scene: Scene) -> None:
    """Two prompts of two tokens each are computed together, and one's state is left for both."""
    healthy(scene)
    scene.forward(
        Part(request=2, row=2, prefix=0, slots=(6, 7), state=2),
        Part(request=3, row=3, prefix=0, slots=(10, 11), state=3),
    )


def alike_and_so_they_end(scene: Scene) -> None:
    """Prompts that end alike may have one state, as that of a short convolution."""
    scene.token(3)[1] = scene.token(1)[1]
    alike(scene)


def alike_as_all_are(scene: Scene) -> None:
    """Where no state is seen that differs, as of zeros, equal ones say nothing."""
    scene.forward(
        Part(request=1, row=1, prefix=0, slots=(1, 2), state=1),
        Part(request=3, row=3, prefix=0, slots=(10, 11), state=3),
    )


FAULTS = {
    alike: [("as_anothers", 2, 3), ("as_anothers", 3, 2)],
    wrong_checkpoint: [("other_prefix", 2, 3)],
    late_checkpoint: [("other_position", 2, 1)],
    freed_early: [("other_prefix", 1, 3)],
    freed_early_in_slot_0: [("other_prefix", 1, 3)],
    damaged: [("changed_bytes", 2, 1)],
    saved_for_another_prefix: [("other_prefix", 2, 3)],
    saved_behind_another_token: [("other_position", 2, 1)],
    saved_and_damaged: [("changed_bytes", 2, 1)],
    saved_over: [("other_prefix", 2, 3)],
    shared: [("same_forward", 2, 1)],
    put_back: [("left_as_it_was", 1, 1)],
    nothing_restored: [("cleared", 2, -1)],
    nothing_restored_behind_a_failure: [("cleared", 2, -1)],
    not_zeroed: [("not_zeroed", 3, -1)],
    begins_from_another_s: [("other_prefix", 3, 1)],
    begun_anew: [("begun_anew", 2, -1)],
}


def played(act: Callable[[Scene], object], path: Path) -> Scene:
    scene = Scene(path, told="", states=True)
    for request in (1, 2, 3):
        scene.request(request)
    act(scene)
    return scene


@pytest.mark.parametrize("act", FAULTS, ids=lambda act: act.__name__)
def test_a_state_that_is_not_the_readers_own_is_found(act: Callable[[Scene], object], tmp_path: Path) -> None:
    rows = played(act, tmp_path / "t.arrow").judge("state_differs")
    assert [(row["cause"], row["request_id"], row["other_request_id"]) for row in rows] == FAULTS[act]


@pytest.mark.parametrize(
    "act",
    [
        never_filled,
        zeros_are_a_state,
        zeros_at_once,
        begins_from_zeros,
        zeroed_unseen,
        not_seen,
        failed,
        lost,
        repeated,
        alike_and_so_they_end,
        alike_as_all_are,
        saved_by_a_forward_that_failed,
        lambda scene: hit(
            saves(scene, tokens=1)
        ),  # of tokens that the forward does not add nobody knows which they are
        lambda scene: hit(saves(scene, tokens=6)),
        lambda scene: hit(healthy(scene)),
        lambda scene: hit(saves(scene, other=1)),
    ],
)
def test_what_nobody_knows_is_judged_by_nothing(act: Callable[[Scene], object], tmp_path: Path) -> None:
    assert played(act, tmp_path / "t.arrow").judge("state_differs") == []


@pytest.mark.usefixtures("pass_from_the_start")
@pytest.mark.parametrize("act", [freed_early, shared, nothing_restored], ids=lambda act: act.__name__)
def test_every_way_of_replaying_finds_it(act: Callable[[Scene], object], tmp_path: Path) -> None:
    played(act, tmp_path / "t.arrow").recorder.close()
    found = []
    for ways in ({"executor": "stepwise"}, {"executor": "interval"}):
        folder = tmp_path / "".join(ways.values())
        folder.mkdir()
        replay(tmp_path / "t.arrow", settings=ReplaySettings(checks=CHECK_NAMES, **ways), report=folder)
        found.append(pq.read_table(folder / "findings.parquet").to_pylist())
    assert found[0] == found[1]
    assert [row["kind"] for row in found[0]].count("state_differs") == 1


@pytest.mark.parametrize(
    "act",
    [wrong_checkpoint, late_checkpoint, freed_early, nothing_restored, saved_for_another_prefix, saved_over],
    ids=lambda act: act.__name__,
)
def test_a_segment_alone_knows_what_the_slots_hold(act: Callable[[Scene], object], tmp_path: Path) -> None:
    scene = played(act, tmp_path / "t.arrow")
    whole = told(scene.judge("state_differs"))
    segments = cut(tmp_path / "t.arrow", tmp_path / "cut.arrow", seed=1, least=6, most=7)
    found = []
    for segment in segments:
        folder = segment.with_suffix(".alone")
        folder.mkdir()
        replay(segment, settings=ReplaySettings(checks=("state_differs",)), report=folder)
        found += pq.read_table(folder / "findings.parquet").to_pylist()
    assert len(segments) > 1
    assert [one[:4] for one in told(found)] == [one[:4] for one in whole]  # keyframes are events, too


@pytest.mark.parametrize("copied", [True, False])
def test_what_padding_has_is_nobodys(tmp_path: Path, copied: bool) -> None:
    scene = Scene(tmp_path / "t.arrow", told="", states=True, padding_states=(0,))
    healthy(scene)
    scene.forward(Part(request=3, row=3, prefix=0, slots=(10, 11), state=0))  # one that begins reads nothing there
    if copied:
        scene.copy_state(0, 2)
    scene.forward(Part(request=2, row=2, prefix=4, slots=(6, 7), state=2 if copied else 0))
    rows = scene.judge("state_differs")
    assert [(row["cause"], row["request_id"], row["other_request_id"]) for row in rows] == [("padding", 2, -1)]
    assert "it is padding's, which is nobody's" in rows[0]["detail"]


def test_an_unknown_token_makes_a_chain_unknown_and_positions_are_judged_still(tmp_path: Path) -> None:
    def act(scene: Scene) -> None:
        scene.forward(Part(request=1, row=1, prefix=0, slots=(1, 2), state=1), inputs={(1, 1): -1})
        scene.forward(Part(request=3, row=3, prefix=0, slots=(3, 4), state=3))
        scene.copy_state(1, 3)
        scene.forward(Part(request=3, row=3, prefix=2, slots=(5,), state=3))
        scene.copy_state(1, 3)
        scene.forward(Part(request=3, row=3, prefix=3, slots=(6,), state=3))

    rows = played(act, tmp_path / "t.arrow").judge("state_differs")
    assert [(row["cause"], row["position"]) for row in rows] == [("other_prefix", 2)]


def test_the_forward_tells_what_happened_in_order(tmp_path: Path) -> None:
    played(lambda scene: hit(healthy(scene)), tmp_path / "t.arrow").recorder.close()
    names = ("op", "source", "slot")
    rows = [
        list(zip(*(view.ints(f"recurrent_{name}").tolist() for name in names), strict=True))
        for view in read_trace(tmp_path / "t.arrow")
        if view.kind == "forward"
    ]
    clear, copy, step, _ = range(len(RECURRENT_OPS))
    assert rows[:4] == [
        [(clear, -1, 1), (step, -1, 1)],
        [(step, 1, 1)],
        [(copy, 1, CHECKPOINT), (step, 1, 1)],
        [(copy, CHECKPOINT, 2), (step, 2, 2)],
    ]


@pytest.mark.parametrize(
    "wrong", [{"pool": 1, "slots": [1]}, {"slots": [99]}, {"slots": [1], "sources": [1, 2]}], ids=str
)
def test_a_wrong_call_ends_the_recording_and_not_the_engine(tmp_path: Path, wrong) -> None:
    scene = played(healthy, tmp_path / "t.arrow")
    scene.recorder.state_changed("copy", **{"pool": 0, "sources": [1], **wrong})
    assert scene.recorder.off.startswith("state_changed: ")


def test_slots_come_one_for_each_pool(tmp_path: Path) -> None:
    scene = played(healthy, tmp_path / "t.arrow")
    access = StateAccess(reads=[1], writes=[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scene, "_state_access", lambda *_: (access, access))
        scene.forward(Part(request=1, row=1, prefix=5, slots=(6,), state=1))
    assert "states has length 2" in scene.recorder.off


@pytest.mark.parametrize(
    ("column", "value"),
    [("pool", 1), ("op", 4), ("op", -1), ("request", 7), ("source", -1), ("source", 99), ("slot", 99), ("slot", -1)],
)
def test_what_contradicts_itself_is_left_out(tmp_path: Path, column: str, value: int) -> None:
    played(late_checkpoint, tmp_path / "t.arrow").recorder.close()
    header, events = read_raw(tmp_path / "t.arrow")
    of_copies = next(event for event in events if RECURRENT_OPS.index("copy") in event.ints.get("recurrent_op", ()))
    at = 1 if column == "request" else 0  # of a step, else of a copy
    of_copies.ints[f"recurrent_{column}"][at] = value
    summary = replay(write_raw(tmp_path / "bad.arrow", header, events), settings=ReplaySettings(), report=None)
    assert summary.num_gaps == 1
    assert "recurrent_* name" in summary.gaps[0]
