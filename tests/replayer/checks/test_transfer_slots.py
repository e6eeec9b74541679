"""Slots under a transfer: freed before it ended, landed where nobody holds them, failed and read all the same."""

import json

import pytest
from kvcanary.recorder.state.apply import RecordedState
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.trace.schema import SLOT_HISTORIES

from .scene import Part, Scene, told

CHECKS = ("freed_during_transfer", "transfer_not_held", "hit_never_written")


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_slots_given_back_while_they_are_on_their_way_are_found(scene: Scene, direction: str) -> None:
    scene.alloc(7, [5, 4, 3, 6])
    start = scene.transfer("start", direction, [5, 4, 3], request=7)
    freed = scene.free(7, [4, 6], note="aborted")
    rows = scene.judge("freed_during_transfer")
    assert told(rows) == [(-1, 7, 4, 1, json.dumps([start, freed]))]
    assert "given back" in rows[0]["detail"]


def test_a_slot_given_to_another_under_a_transfer_is_found_though_its_free_was_not_told(scene: Scene) -> None:
    scene.alloc(7, [3, 4])
    start = scene.transfer("start", "receive", [3, 4], request=7)
    given = scene.alloc(8, [4])
    assert told(scene.judge("freed_during_transfer")) == [(-1, 8, 4, 1, json.dumps([start, given]))]


@pytest.mark.parametrize("end", ["end", "failed"])
def test_after_the_end_the_slots_may_go(scene: Scene, end: str) -> None:
    scene.alloc(7, [3, 4])
    scene.transfer("start", "send", [3, 4], request=7)
    scene.alloc(7, [3], "cached")
    scene.transfer(end, "send", [3, 4], request=7)
    scene.free(7, [4])
    scene.evict([3])
    assert scene.judge(*CHECKS) == []


def test_what_lands_in_free_slots_or_in_anothers_is_found(scene: Scene) -> None:
    alloc = scene.alloc(7, [3, 4, 5])
    scene.transfer("start", "receive", [3, 4, 5], request=7)
    freed = scene.free(7, [3, 4])
    given = scene.alloc(8, [4])
    landed = scene.transfer("end", "receive", [3, 4, 5], request=7)
    rows = scene.judge("transfer_not_held")
    assert told(rows) == [
        (-1, 7, 3, 1, json.dumps([alloc, freed, landed])),
        (-1, 7, 4, 1, json.dumps([freed, given, landed])),
    ]
    assert "that is free" in rows[0]["detail"]
    assert "of request 8" in rows[1]["detail"]


def test_a_transfer_that_begins_on_free_slots_is_found(scene: Scene) -> None:
    alloc = scene.alloc(7, [3])
    freed = scene.free(7, [3])
    start = scene.transfer("start", "send", [3], request=7)
    assert told(scene.judge("transfer_not_held")) == [(-1, 7, 3, 1, json.dumps([alloc, freed, start]))]


def test_what_lands_was_written_by_the_transfer(scene: Scene) -> None:
    landed = scene.transfer("end", "receive", [3], request=7)
    scene.recorder.close()
    with TraceReader(scene.path) as reader:
        recorded = RecordedState(reader.header)
    for view in read_trace(scene.path):
        recorded.apply(view)
    assert recorded.state.pools[0].pool.writers[3].tolist() == [landed + 1, -1, 7]


def test_landing_counts_as_writing_and_failing_does_not(make_scene) -> None:
    for status in ("end", "failed"):
        scene = make_scene()
        alloc = scene.alloc(7, [3, 4, 5])
        scene.transfer("start", "receive", [3, 4], request=7)
        scene.transfer(status, "receive", [3, 4], request=7)
        scene.table[1, :2] = [3, 4]
        found = scene.forward(Part(request=7, row=1, prefix=2, slots=(5,)))
        rows = scene.judge("hit_never_written")
        assert told(rows) == ([] if status == "end" else [(0, 7, 3, 2, json.dumps([alloc, found]))])


def test_a_gap_silences_them(scene: Scene) -> None:
    scene.alloc(7, [3, 4])
    scene.transfer("start", "receive", [3, 4], request=7)
    scene.lose()
    scene.free(7, [3])
    scene.transfer("end", "receive", [4], request=7)
    assert scene.judge(*CHECKS) == []


def test_without_the_promise_what_goes_back_to_the_pool_is_found_and_no_more(make_scene) -> None:
    scene = make_scene(told="")
    scene.alloc(7, [3, 4])
    start = scene.transfer("start", "receive", [3, 4], request=7)
    scene.alloc(8, [3])
    freed = scene.free(7, [4])
    scene.transfer("end", "receive", [3, 4], request=7)
    scene.free(7, [3])
    assert told(scene.judge(*CHECKS)) == [(-1, 7, 4, 1, json.dumps([start, freed]))]


@pytest.mark.parametrize("since", ["nothing", "written", "loaded"])
def test_a_slot_whose_load_failed_is_read_without_a_history(make_scene, since: str) -> None:
    scene = make_scene(told="")
    scene.start(7, 1, [3, 4])
    scene.transfer("end", "receive", [3], request=7)
    failed = scene.transfer("failed", "receive", [3], request=7)
    if since == "written":
        scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)))
    elif since == "loaded":
        scene.transfer("end", "receive", [3], request=7)
    read = scene.forward(Part(request=7, row=1, prefix=2, slots=(5,)))
    again = scene.forward(Part(request=7, row=1, prefix=3, slots=(6,)))  # said once
    assert again > read
    rows = scene.judge("failed_load_read")
    assert [(row["request_id"], row["slot"], row["position"]) for row in rows] == (
        [(7, 3, 0)] if since == "nothing" else []
    )
    assert all(str(failed) in row["detail"] for row in rows)


@pytest.mark.parametrize("lost", ["slots that were written since", "everything"])
def test_a_slot_that_was_filled_since_its_load_failed_may_be_unknown_again(make_scene, lost: str) -> None:
    scene = make_scene(told="")
    scene.start(7, 1, [3, 4])
    scene.transfer("failed", "receive", [3], request=7)
    if lost == "everything":
        scene.lose()
        scene.table[1, :2] = 0
        scene.forward(Part(request=8, row=2, prefix=0, slots=(6,)))
    else:
        scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)))
        scene.transfer("end", "receive", [5], request=8)
        scene.copy(5, 3, 1)
    scene.table[1, :2] = [3, 4]
    scene.forward(Part(request=7, row=1, prefix=2, slots=(7,)))
    assert scene.judge("failed_load_read") == []


def test_what_another_request_of_the_batch_computes_anew_is_not_what_failed(make_scene) -> None:
    scene = make_scene(told="")
    scene.start(7, 1, [3, 4])
    scene.transfer("end", "receive", [3, 4], request=7)
    scene.transfer("failed", "receive", [3, 4], request=7)
    scene.table[2, :2] = [3, 4]
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)), Part(request=8, row=2, prefix=2, slots=(5,)))
    assert scene.judge("failed_load_read") == []


@pytest.mark.parametrize("promised", SLOT_HISTORIES)
@pytest.mark.parametrize("goes", ["on", "back", "on from before", "back to the queue"])
def test_what_was_computed_from_a_load_that_fails_is_computed_anew(make_scene, promised: str, goes: str) -> None:
    scene = make_scene(told=promised)
    scene.start(7, 1, [3, 4])
    scene.alloc(7, [5, 6, 8])
    scene.transfer("end", "receive", [3], request=7)
    scene.forward(Part(request=7, row=1, prefix=2, slots=(5, 6)))
    failed = scene.transfer("failed", "receive", [3], request=7)
    another = Part(request=8, row=2, prefix=0, slots=(3,))  # computes what did not come
    if goes == "back to the queue":
        scene.status(7, "retracted", 1)
        scene.status(7, "admitted", 1)
    if goes == "back":
        scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4, 5, 6)))
    elif goes == "on from before":
        scene.forward(Part(request=7, row=1, prefix=2, slots=(5, 6)), another)
    else:
        scene.forward(Part(request=7, row=1, prefix=4, slots=(8,)), another)
    scene.forward(Part(request=7, row=1, prefix=4, slots=(8,)))
    rows = [row for row in scene.judge("failed_load_read") if "computed" in row["detail"]]
    assert [(row["forward"], row["slot"], row["position"]) for row in rows] == ([(2, 3, 2)] if goes == "on" else [])
    assert all(f"event {failed}" in row["detail"] for row in rows)


@pytest.mark.parametrize("slot", [3, 5])
def test_a_slot_that_a_window_has_left_behind_is_not_what_was_read(make_scene, slot: int) -> None:
    """The row names it still, and another request loads into it."""
    scene = make_scene(told="", sliding=2)
    scene.start(7, 1, [3, 4, 5])
    scene.forward(Part(request=7, row=1, prefix=3, slots=(6,)))
    scene.transfer("failed", "receive", [slot], request=8)
    scene.forward(Part(request=7, row=1, prefix=4, slots=(8,)), Part(request=8, row=2, prefix=0, slots=(slot,)))
    rows = [row for row in scene.judge("failed_load_read") if "computed" in row["detail"]]
    assert [row["slot"] for row in rows] == ([5] if slot == 5 else [])
