"""Events that name slots beyond the pool: a finding, and the history of all other slots goes on."""

import json

import pytest

from .scene import SLOTS, Part, Scene


@pytest.mark.parametrize("kind", ["alloc", "free", "evict"])
def test_a_slot_beyond_the_pool_is_a_finding_and_the_others_keep_their_history(scene: Scene, kind: str) -> None:
    first = scene.start(7, 1, [3, 4])
    if kind == "alloc":
        event = scene.alloc(7, [5, SLOTS, SLOTS + 9])
    else:
        scene.alloc(7, [5])
        event = scene.free(7 if kind == "free" else -1, [5, SLOTS, SLOTS + 9], kind=kind)
    again = scene.alloc(8, [3, 5] if kind == "alloc" else [3])
    summary, rows = scene.report("slot_out_of_pool", "slot_double_allocated")
    assert not summary.gaps
    assert [(r["kind"], r["slot"], r["count"], json.loads(r["evidence"])) for r in rows if r["event"] == event] == [
        ("slot_out_of_pool", SLOTS, 2, [event])
    ]
    doubled = [r for r in rows if r["kind"] == "slot_double_allocated"]
    assert sum(r["count"] for r in doubled) == (2 if kind == "alloc" else 1)
    assert {r["event"] for r in doubled} == {again}
    assert first < event


def test_a_write_beyond_the_pool_leaves_the_history_as_it_was(scene: Scene) -> None:
    scene.start(7, 1, [3, 4])
    scene.forward(Part(request=7, row=1, prefix=2, slots=(SLOTS + 1,)))
    scene.alloc(8, [3])
    summary, rows = scene.report("slot_out_of_pool", "slot_double_allocated")
    assert not summary.gaps
    assert [(r["kind"], r["slot"]) for r in rows] == [("slot_out_of_pool", SLOTS + 1), ("slot_double_allocated", 3)]


def test_runs_that_no_engine_tells_still_contradict_themselves(scene: Scene) -> None:
    scene.start(7, 1, [3, 4])
    scene.recorder.slots("alloc", group=0, runs=([0], [1 << 40]), request_id=7)
    scene.recorder.slots("alloc", group=0, runs=([SLOTS] * 9, [SLOTS] * 9), request_id=7)
    summary, rows = scene.report("slot_out_of_pool")
    assert len(summary.gaps) == 2
    assert rows == []
