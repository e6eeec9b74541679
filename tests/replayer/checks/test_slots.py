"""Who holds which slot: double allocation, double free, frees of what is another's, leaks."""

import json
from pathlib import Path

import pytest
from kvcanary.recorder.trace.schema import LET_GO, NOBODYS, STILL_USED

from ...support.both_ways import check
from .scene import Part, Scene, told


def test_a_slot_given_out_twice_is_found_with_both_allocations(scene: Scene) -> None:
    scene.status(7, "admitted", 1)
    first = scene.alloc(7, [3, 4, 5])
    scene.status(8, "admitted", 2)
    second = scene.alloc(8, [4, 5, 6])
    rows = scene.judge("slot_double_allocated")
    assert told(rows) == [(-1, 8, 4, 2, json.dumps([first, second]))]
    assert "request 7" in rows[0]["detail"]
    assert rows[0]["event"] == second


def test_a_slot_that_one_allocation_names_twice_is_given_out_twice(scene: Scene) -> None:
    event = scene.alloc(7, [3, 4, 3])
    scene.alloc(7, [3, 4], "cached")
    assert told(scene.judge("slot_double_allocated", "free_slot_shared")) == [(-1, 7, 3, 1, json.dumps([event]))]


def test_a_free_slot_is_not_to_be_handed_to_the_cache(scene: Scene) -> None:
    alloc = scene.alloc(7, [3, 4])
    freed = scene.free(7, [3])
    handed = scene.alloc(7, [3, 4], "cached")
    assert told(scene.judge("free_slot_shared")) == [(-1, 7, 3, 1, json.dumps([alloc, freed, handed]))]


def test_a_free_slot_is_not_to_be_joined(scene: Scene) -> None:
    alloc = scene.alloc(7, [3, 4])
    freed = scene.free(7, [3])
    joined = scene.alloc(8, [3, 4, 9], "shared")
    rows = scene.judge("free_slot_shared")
    assert told(rows) == [(-1, 8, 9, 1, json.dumps([joined])), (-1, 8, 3, 1, json.dumps([alloc, freed, joined]))]
    assert "was never given out" in rows[0]["detail"]


def test_a_slot_of_the_prefix_cache_is_not_to_be_given_out(scene: Scene) -> None:
    scene.start(7, 1, [3, 4])
    handed = scene.alloc(7, [3, 4], "cached")
    scene.status(7, "finished", 1)
    event = scene.alloc(8, [4])
    (row,) = scene.judge("slot_double_allocated")
    assert (row["slot"], row["request_id"], row["forward"]) == (4, 8, 0)
    assert json.loads(row["evidence"])[-2:] == [handed, event]
    assert "the prefix cache" in row["detail"]


def test_joining_handing_over_and_reuse_after_free_are_no_double_allocation(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    scene.alloc(7, [3, 4], "cached")
    scene.alloc(8, [3, 4], "shared")
    scene.alloc(8, [3], note="prefix hit")  # as adapters say it that know no status
    scene.free(7, [5])
    scene.status(7, "finished", 1)
    scene.alloc(9, [5])
    scene.evict([3, 4])
    scene.alloc(9, [3, 4])
    scene.free(9, [3, 4, 5])
    scene.alloc(-1, [3])  # a load-back's
    assert scene.judge("slot_double_allocated", "slot_freed_twice", "foreign_slot_freed") == []


@pytest.mark.parametrize("kind", ["free", "evict"])
def test_a_slot_freed_twice_is_found_with_both_frees(scene: Scene, kind: str) -> None:
    alloc = scene.alloc(7, [3, 4])
    first = scene.free(7, [3, 4])
    second = scene.free(7 if kind == "free" else -1, [4], kind=kind)
    rows = scene.judge("slot_freed_twice")
    assert told(rows) == [(-1, 7 if kind == "free" else -1, 4, 1, json.dumps([alloc, first, second]))]


def test_a_slot_that_one_event_names_twice_is_freed_twice(scene: Scene) -> None:
    scene.alloc(7, [3, 4])
    event = scene.free(7, [3, 4, 3])
    assert told(scene.judge("slot_freed_twice")) == [(-1, 7, 3, 1, json.dumps([event]))]


def test_a_slot_that_was_never_given_out_cannot_be_given_back(scene: Scene) -> None:
    event = scene.free(7, [9])
    (row,) = scene.judge("slot_freed_twice")
    assert json.loads(row["evidence"]) == [event]
    assert "never given out" in row["detail"]


def test_freeing_what_the_cache_or_another_holds_is_found(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    handed = scene.alloc(7, [3, 4], "cached")
    first = scene.free(7, [3, 4, 5], note="aborted")
    given = scene.alloc(8, [6])
    second = scene.free(7, [6])
    third = scene.alloc(8, [6])
    fourth = scene.evict([6])
    rows = scene.judge("foreign_slot_freed")
    assert [(row["event"], row["slot"], row["count"]) for row in rows] == [
        (first, 3, 2),
        (second, 6, 1),
        (fourth, 6, 1),
    ]
    assert json.loads(rows[0]["evidence"])[-2:] == [handed, first]
    assert json.loads(rows[1]["evidence"]) == [given, second]
    assert third in json.loads(rows[2]["evidence"])


def test_who_lets_go_last_gives_shared_slots_back(scene: Scene) -> None:
    scene.start(7, 1, [3, 4])
    scene.alloc(8, [3, 4], "shared")
    scene.status(7, "finished", 1)
    scene.free(8, [3, 4])
    scene.status(8, "finished", 2)
    scene.free(-1, [9], note="load-back")
    assert scene.judge("foreign_slot_freed", "slot_leaked") == []


def test_what_the_cache_has_leaks_where_it_stays_in_use(
    scene: Scene, tmp_path: Path, pass_from_the_start: None
) -> None:
    scene.status(7, "admitted", 1)
    alloc = scene.alloc(7, [3, 4, 5, 6])
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4, 5, 6)))
    handed = scene.alloc(7, [3, 4, 5, 6], "cached")
    scene.alloc(7, [3, 4], "cached", note=LET_GO)
    used = scene.alloc(7, [5, 6], "cached", note=STILL_USED)
    scene.status(7, "finished", 1)
    rows = scene.judge("slot_leaked")
    assert told(rows) == [(0, 7, 5, 2, json.dumps([alloc, handed, used]))]
    assert "whom nobody knows" in rows[0]["detail"]
    (replayed,) = check([scene.path], tmp_path / "ways", incidents=False)
    assert replayed.found()["findings_by_kind"] == {"slot_leaked": 1}


@pytest.mark.parametrize("told_of", ["complete", "allocator"])
def test_what_is_nobodys_has_leaked_if_it_is_not_free(tmp_path: Path, told_of: str, pass_from_the_start: None) -> None:
    scene = Scene(tmp_path / "t.arrow", told=told_of)
    scene.status(7, "admitted", 1)
    alloc = scene.alloc(7, [3, 4])
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)))
    gone = scene.status(7, "finished", 1)
    nobodys = scene.alloc(-1, [3, 4, 9], note=NOBODYS)
    scene.alloc(8, [10])
    rows = scene.judge("slot_leaked", "slot_double_allocated")
    found = {(row["event"], row["slot"], row["count"], row["cause"]) for row in rows}
    if told_of == "complete":  # what its request still held was said when it went
        assert found == {(gone, 3, 2, "request_left"), (nobodys, 9, 1, "nobodys")}
    else:
        assert found == {(nobodys, 3, 2, "nobodys"), (nobodys, 9, 1, "nobodys")}
    assert any(alloc in json.loads(row["evidence"]) for row in rows)
    (replayed,) = check([scene.path], tmp_path / "ways", incidents=False)
    assert replayed.found()["findings_by_kind"] == {"slot_leaked": 2}


@pytest.mark.parametrize("status", ["finished", "aborted", "retracted"])
def test_what_a_request_leaves_behind_is_found_when_it_goes(scene: Scene, status: str) -> None:
    scene.status(7, "admitted", 1)
    alloc = scene.alloc(7, [3, 4, 5, 6])
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4, 5, 6)))
    scene.alloc(7, [3], "cached")
    scene.free(7, [4])
    gone = scene.status(7, status, 1)
    scene.free(7, [5, 6])  # too late, and told once already
    scene.status(7, "finished", 1)
    rows = scene.judge("slot_leaked")
    assert told(rows) == [(0, 7, 5, 2, json.dumps([alloc, gone]))]
    assert status in rows[0]["detail"]
    assert rows[0]["req_pool_idx"] == 1


def test_a_resumed_request_that_overwrites_its_tail_leaks_it(scene: Scene) -> None:
    scene.status(7, "admitted", 1)
    alloc = scene.alloc(7, [3, 4, 5])
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4, 5)))
    scene.alloc(7, [8, 9])
    overwrites = scene.forward(Part(request=7, row=1, prefix=2, slots=(8, 9)))
    found = scene.forward(Part(request=7, row=1, prefix=3, slots=(9,)))
    scene.forward(Part(request=7, row=1, prefix=3, slots=(9,)))
    assert told(scene.judge("slot_leaked")) == [(2, 7, 5, 1, json.dumps([alloc, overwrites, found]))]


def test_an_entry_that_is_replaced_and_freed_leaks_nothing(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    scene.alloc(7, [8])
    scene.forward(Part(request=7, row=1, prefix=2, slots=(8,)))
    scene.free(7, [5])
    scene.forward(Part(request=7, row=1, prefix=2, slots=(8,)))
    scene.alloc(7, [5])  # the same slot again, for a position to come
    scene.forward(Part(request=7, row=1, prefix=3, slots=(5,)))
    scene.free(7, [3, 4, 8, 5])
    scene.status(7, "finished", 1)
    assert scene.judge("slot_leaked") == []


def test_slots_given_to_a_request_that_is_gone_leak_at_the_end(scene: Scene) -> None:
    scene.start(7, 1, [3])
    scene.free(7, [3])
    gone = scene.status(7, "finished", 1)
    alloc = scene.alloc(7, [4, 5])
    scene.alloc(8, [6])  # a request that runs on when the trace ends leaks nothing
    assert told(scene.judge("slot_leaked")) == [(0, 7, 4, 2, json.dumps([gone, alloc]))]


CHECKS = ("slot_double_allocated", "slot_freed_twice", "foreign_slot_freed", "slot_leaked")


def play_all_of_them(scene: Scene, *, gap: bool) -> None:
    scene.start(7, 1, [3, 4, 5, 6])
    scene.free(7, [5])
    scene.alloc(7, [6], "cached")
    if gap:
        scene.lose()
    scene.alloc(8, [3])
    scene.free(7, [5])
    scene.free(7, [6])
    scene.status(7, "finished", 1)


def test_a_gap_silences_them_and_an_incomplete_history_too(make_scene) -> None:
    whole = make_scene()
    play_all_of_them(whole, gap=False)
    assert {row["kind"] for row in whole.judge(*CHECKS)} == set(CHECKS)
    lossy = make_scene()
    play_all_of_them(lossy, gap=True)
    assert lossy.judge(*CHECKS) == []
    silent = make_scene(told="")
    play_all_of_them(silent, gap=False)
    assert silent.judge(*CHECKS) == []


def test_what_an_allocator_gives_out_and_gets_back_is_judged_where_nothing_else_is_told(make_scene) -> None:
    scene = make_scene(told="allocator")
    scene.alloc(7, [3, 4, 5])
    scene.alloc(7, [4], "cached")
    scene.free(-1, [5])
    scene.alloc(8, [5])
    again = [scene.alloc(8, [3]), scene.free(-1, [4]), scene.free(-1, [4])]
    scene.status(7, "finished", 1)
    rows = scene.judge(*CHECKS)
    assert [(row["kind"], row["event"]) for row in rows] == [
        ("slot_double_allocated", again[0]),
        ("slot_freed_twice", again[2]),
    ]


def test_after_a_gap_what_is_told_anew_is_judged_again(scene: Scene) -> None:
    scene.start(7, 1, [3, 4])
    scene.lose()
    first = scene.alloc(8, [3])
    second = scene.alloc(9, [3])
    assert told(scene.judge("slot_double_allocated")) == [(0, 9, 3, 1, json.dumps([first, second]))]


def test_after_a_gap_a_slot_that_nothing_was_said_of_may_be_anybodys(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    scene.lose()
    scene.alloc(7, [3], "cached")  # is the cache's from now on
    scene.free(7, [4])
    again = scene.free(7, [4])
    given = scene.alloc(8, [3])
    rows = scene.judge("slot_freed_twice", "slot_double_allocated")
    assert [(row["kind"], row["event"]) for row in rows] == [
        ("slot_freed_twice", again),
        ("slot_double_allocated", given),
    ]


def test_the_cache_does_not_evict_what_requests_share_and_was_never_handed_to_it(
    scene: Scene, tmp_path: Path, pass_from_the_start: None
) -> None:
    """A fork's slots; those that were handed over are the cache's, whoever reads them. The compiled pass stops there too."""
    scene.start(7, 1, [3, 4, 5])
    scene.alloc(8, [3, 4, 5], "shared")
    scene.alloc(7, [5], "cached")
    scene.evict([5])
    scene.evict([3, 4])
    scene.recorder.close()
    (replayed,) = check([scene.path], tmp_path / "ways", incidents=False)
    (row,) = replayed.table("findings").to_pylist()
    assert (row["kind"], row["slot"], row["count"]) == ("foreign_slot_freed", 3, 2)
    assert row["detail"].startswith("is evicted while request 7 shares it with another")
