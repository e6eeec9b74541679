"""What a forward reads and writes: free, foreign, unwritten and differing slots, padding."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.capture.forward_input import BlockTable, ForwardInput, TruthTokens
from kvcanary.recorder.capture.reading_order import in_reading_order
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.schema import SLOT_HISTORIES, TIER_HOST
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .scene import Part, Scene, decode, told


def test_a_read_of_a_freed_slot_is_told_once_and_again_when_it_comes_back(scene: Scene) -> None:
    scene.status(7, "admitted", 1)
    alloc = scene.alloc(7, [3, 4, 5, 6, 7, 8])
    written = scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4, 5)))
    freed = scene.free(7, [3, 4])
    first = scene.forward(decode(7, 1, 3, 6))
    scene.forward(decode(7, 1, 4, 7))
    again = scene.alloc(7, [3, 4])  # comes to an end ...
    copied = scene.copy(5, 3, 2)
    scene.forward(decode(7, 1, 5, 8))
    freed_again = scene.free(7, [4])  # ... and back, for one of them
    last = scene.forward(decode(7, 1, 5, 8))
    rows = scene.judge("read_after_free")
    assert told(rows) == [
        (1, 7, 3, 2, json.dumps([alloc, written, freed, first])),
        (4, 7, 4, 1, json.dumps([again, copied, freed_again, last])),
    ]
    assert [row["position"] for row in rows] == [0, 1]
    assert rows[0]["req_pool_idx"] == 1


def test_a_launched_forward_is_told_before_the_free_that_follows_it(scene: Scene) -> None:
    """Overlap's one extra forward of a request that has just finished."""
    scene.start(7, 1, [3, 4, 5])
    scene.forward(decode(7, 1, 2, 5))
    scene.free(7, [3, 4, 5])
    scene.status(7, "finished", 1)
    checks = ("read_after_free", "read_of_foreign_slot", "write_to_foreign_slot", "row_reassigned", "slot_leaked")
    assert scene.judge(*checks) == []


def test_a_read_of_a_slot_given_to_another_is_found_with_its_new_allocation(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    freed = scene.free(7, [4])
    scene.status(8, "admitted", 2)
    given = scene.alloc(8, [4, 6])
    written = scene.forward(Part(request=8, row=2, prefix=0, slots=(4, 6)))
    found = scene.forward(decode(7, 1, 2, 5))
    rows = scene.judge("read_of_foreign_slot")
    assert told(rows) == [(2, 7, 4, 1, json.dumps([freed, given, written, found]))]
    assert "request 8" in rows[0]["detail"]


def test_a_slot_given_out_anew_while_it_is_read_is_found_though_the_cache_has_it_now(make_scene) -> None:
    for joined in (False, True):
        scene = make_scene()
        scene.start(7, 1, [3, 4, 5, 6])
        freed = scene.free(7, [3])
        given = scene.alloc(8, [3])
        written = scene.forward(Part(request=8, row=2, prefix=0, slots=(3,)))
        scene.alloc(8, [3], "cached")
        if joined:  # an engine that moves a row to the cache's slot says so
            scene.alloc(7, [3], "shared")
        found = scene.forward(decode(7, 1, 4, 9))
        rows = scene.judge("read_of_foreign_slot")
        evidence = [freed, given, written, written + 1, found]
        assert [(r["slot"], json.loads(r["evidence"])) for r in rows] == (
            [] if joined else [(3, [e for e in evidence if e != freed])]
        )


def test_a_request_that_resumes_reads_anew(scene: Scene) -> None:
    scene.start(7, 1, [3, 4])
    scene.free(7, [3, 4])
    scene.status(7, "retracted", 1)
    scene.start(8, 2, [3, 4])
    scene.alloc(8, [3, 4], "cached")
    scene.status(7, "admitted", 1)
    scene.alloc(7, [5])
    scene.forward(decode(7, 1, 2, 5))
    assert scene.judge("read_of_foreign_slot") == []


def test_shared_and_cached_slots_are_everybodys(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    scene.alloc(7, [3], "cached")
    scene.alloc(8, [3, 4], "shared")
    scene.status(8, "admitted", 2)
    scene.alloc(8, [6, 7])
    scene.tokens[8] = scene.token(7).copy()
    scene.table[2, :2] = [3, 4]
    scene.forward(Part(request=8, row=2, prefix=2, slots=(6,)), decode(7, 1, 2, 5))
    scene.status(7, "finished", 1)
    scene.forward(decode(8, 2, 3, 7))
    assert scene.judge("read_of_foreign_slot", "read_after_free", "hit_never_written", "hit_differs") == []


def test_writes_to_what_is_free_cached_or_anothers_are_found(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    handed = scene.alloc(7, [3], "cached")
    freed = scene.free(7, [4])
    scene.status(8, "admitted", 2)
    writes = [scene.forward(Part(request=8, row=2, prefix=0, slots=(slot,))) for slot in (3, 4, 5)]
    rows = scene.judge("write_to_foreign_slot")
    assert [(row["forward"], row["request_id"], row["slot"]) for row in rows] == [(1, 8, 3), (2, 8, 4), (3, 8, 5)]
    evidence = [json.loads(row["evidence"]) for row in rows]
    assert evidence == [[1, handed, writes[0]], [1, freed, writes[1]], [1, writes[2]]]
    for row, who in zip(rows, ("the prefix cache", "free", "request 7"), strict=True):
        assert who in row["detail"]


def test_two_requests_that_write_one_slot_are_found_in_any_trace(make_scene) -> None:
    for promised in SLOT_HISTORIES:
        scene = make_scene(told=promised)
        scene.forward(
            Part(request=7, row=1, prefix=0, slots=(3, 4)), Part(request=8, row=2, prefix=0, slots=(5, 4)), mode="mixed"
        )
        rows = [row for row in scene.judge("write_to_foreign_slot") if "another request of the same" in row["detail"]]
        assert [(row["request_id"], row["slot"], row["position"]) for row in rows] == (
            [(8, 4, 1)] if promised != "complete" else []
        )
    scene = make_scene()
    scene.alloc(8, [5, 4])
    scene.alloc(7, [3])
    scene.forward(
        Part(request=7, row=1, prefix=0, slots=(3, 4)), Part(request=8, row=2, prefix=0, slots=(5, 4)), mode="mixed"
    )
    rows = scene.judge("write_to_foreign_slot")
    assert [(row["request_id"], row["slot"]) for row in rows] == [(7, 4), (8, 4)]


@pytest.mark.parametrize("promised", SLOT_HISTORIES)
def test_two_tokens_of_a_request_in_one_slot_are_found_in_any_trace(make_scene, promised: str) -> None:
    scene = make_scene(told=promised)
    scene.alloc(7, [4, 5, 6, 7, 8])
    found = scene.forward(Part(request=7, row=1, prefix=0, slots=(4, 5, 6, 7, 8, 8)), padding=(0, 0))
    (row,) = scene.judge("slot_written_twice")
    assert (row["forward"], row["request_id"], row["slot"], row["position"]) == (0, 7, 8, 5)
    assert found in json.loads(row["evidence"])


def test_a_token_that_went_to_the_padding_slot_is_found_when_it_is_read(make_scene) -> None:
    for lossy in (False, True):
        scene = make_scene(told="")
        scene.forward(Part(request=7, row=1, prefix=0, slots=(4, 5, 0)))
        if lossy:
            scene.lose()
        first = scene.forward(decode(7, 1, 3, 6), padding=(0,))
        scene.forward(decode(7, 1, 4, 7))
        rows = scene.judge("padding_slot_read")
        assert told(rows) == ([] if lossy else [(1, 7, 0, 1, json.dumps([first]))])
        assert [row["position"] for row in rows] == ([] if lossy else [2])


@pytest.mark.parametrize(("missing", "found"), [(2, True), (1, True), (0, False)])
def test_of_a_window_with_a_table_of_its_own_padding_within_it_is_found(make_scene, missing: int, found: bool) -> None:
    scene = make_scene(told="", sliding=2)
    scene.forward(Part(request=7, row=1, prefix=0, slots=(4, 5, 6)))
    scene.table[1, missing] = 0
    scene.forward(decode(7, 1, 3, 8))
    assert [row["position"] for row in scene.judge("padding_slot_read")] == [missing] * found


def test_the_owner_of_a_page_goes_on_writing_after_a_fork_joined_it(scene: Scene) -> None:
    scene.status(7, "admitted", 1)
    scene.alloc(7, [3, 4])
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3,)))
    scene.alloc(8, [3, 4], "shared")
    scene.forward(decode(7, 1, 1, 4))
    assert scene.judge("write_to_foreign_slot") == []


def test_padding_that_writes_a_live_slot_is_told_once(scene: Scene) -> None:
    scene.status(7, "admitted", 1)
    alloc = scene.alloc(7, [3, 4, 5, 63])
    first = scene.forward(Part(request=7, row=1, prefix=0, slots=(3,)), mode="decode", padding=(0, 63, 40))
    scene.forward(decode(7, 1, 1, 4), mode="decode", padding=(63,))
    rows = scene.judge("padded_write")
    assert told(rows) == [(0, -1, 63, 1, json.dumps([alloc, first]))]
    assert rows[0]["req_pool_idx"] == 0
    assert "request 7" in rows[0]["detail"]


@pytest.mark.parametrize(
    ("prefix", "token", "found"),
    [(2, 0, False), (2, 1, True), (3, 0, True)],
    ids=["same", "other tokens", "in its midst"],
)
def test_a_page_that_was_joined_to_be_computed_may_be_written_with_what_it_holds(
    make_scene, prefix: int, token: int, found: bool
) -> None:
    """Of an engine that de-duplicates what a chunk is about to compute: slots 4 and 5 are one page."""
    scene = make_scene(page_size=2)
    scene.tokens[8] = scene.token(7) + token
    for request, row, own in ((7, 1, [2, 3]), (8, 2, [6, 7])):
        scene.status(request, "admitted", row)
        scene.alloc(request, own)
        scene.forward(Part(request=request, row=row, prefix=0, slots=tuple(own)))
    scene.alloc(7, [4, 5])
    scene.forward(Part(request=7, row=1, prefix=2, slots=(4, 5)))
    scene.alloc(8, [4, 5], "shared")
    scene.forward(Part(request=8, row=2, prefix=prefix, slots=(4, 5)[prefix - 2 :]))
    assert bool(scene.judge("write_to_foreign_slot")) == found


def test_without_a_promise_padding_is_judged_by_what_the_same_forward_uses(make_scene) -> None:
    scene = make_scene(told="")
    scene.alloc(7, [3, 4, 5, 6])
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)), padding=(5,))
    scene.forward(decode(7, 1, 2, 5), mode="decode", padding=(4, 5))
    rows = scene.judge("padded_write")
    assert [(row["forward"], row["request_id"], row["slot"]) for row in rows] == [(1, -1, 5), (1, 7, 4)]


def test_a_hit_on_what_was_never_written_is_found_with_the_allocation(scene: Scene) -> None:
    scene.status(7, "admitted", 1)
    alloc = scene.alloc(7, [3, 4, 5])
    written = scene.forward(Part(request=7, row=1, prefix=0, slots=(3,)))
    scene.table[1, 1] = 4  # counted as computed, and never was
    found = scene.forward(decode(7, 1, 2, 5))
    rows = scene.judge("hit_never_written")
    assert told(rows) == [(1, 7, 4, 1, json.dumps([alloc, found]))]
    assert written not in json.loads(rows[0]["evidence"])


def test_content_from_before_the_allocation_does_not_count(scene: Scene) -> None:
    scene.start(7, 1, [3, 4])
    scene.free(7, [3, 4])
    scene.status(7, "finished", 1)
    scene.status(8, "admitted", 1)
    alloc = scene.alloc(8, [3, 4])
    scene.table[1, 0] = 3
    found = scene.forward(decode(8, 1, 1, 4))
    (row,) = scene.judge("hit_never_written")
    assert (row["slot"], row["position"]) == (3, 0)
    assert {alloc, found} <= set(json.loads(row["evidence"]))


@pytest.mark.parametrize("promised", SLOT_HISTORIES)
def test_a_hit_in_the_forward_that_is_still_writing_is_found_in_any_trace(make_scene, promised: str) -> None:
    scene = make_scene(told=promised)
    scene.alloc(7, [3, 4])
    scene.alloc(8, [5])
    scene.alloc(8, [3, 4], "shared")
    scene.tokens[8] = scene.token(7).copy()
    scene.table[2, :2] = [3, 4]
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)), decode(8, 2, 2, 5), mode="mixed")
    rows = scene.judge("hit_never_written")
    assert [(row["forward"], row["request_id"], row["slot"], row["count"]) for row in rows] == [(0, 8, 3, 2)]
    assert "is writing" in rows[0]["detail"]


def test_a_load_back_is_written_by_its_copy_and_a_failed_one_is_not(make_scene) -> None:
    for loaded in (True, False):
        scene = make_scene()
        scene.start(7, 1, [3])
        scene.copy(3, 9, 1, dst_tier=TIER_HOST)
        scene.free(7, [3])
        scene.status(7, "finished", 1)
        scene.alloc(-1, [4])
        if loaded:
            scene.copy(9, 4, 1, src_tier=TIER_HOST)
        scene.alloc(8, [4], "shared")
        scene.alloc(8, [5])
        scene.tokens[8] = scene.token(7).copy()
        scene.table[2, 0] = 4
        scene.forward(decode(8, 2, 1, 5))
        rows = scene.judge("hit_never_written", "read_after_free", "read_of_foreign_slot")
        assert [(row["kind"], row["slot"]) for row in rows] == ([] if loaded else [("hit_never_written", 4)])


def test_without_a_promise_a_slot_given_to_another_with_old_content_is_found(make_scene) -> None:
    scene = make_scene(told="")
    alloc = scene.alloc(7, [3, 4])
    written = scene.forward(Part(request=7, row=1, prefix=0, slots=(3,)))
    given = scene.alloc(8, [3])
    found = scene.forward(decode(7, 1, 1, 4))
    assert told(scene.judge("hit_never_written")) == [(1, 7, 3, 1, json.dumps([written, given, found]))]
    assert alloc < written
    copied = make_scene(told="")  # an adapter that tells of a load-back's copy before its allocation
    copied.alloc(7, [3, 4])
    copied.forward(Part(request=7, row=1, prefix=0, slots=(3,)))
    copied.copy(3, 9, 1)
    copied.alloc(8, [9])
    copied.table[1, 0] = 9
    copied.forward(decode(7, 1, 1, 4))
    assert copied.judge("hit_never_written") == []


def test_a_hit_whose_tokens_differ_is_found_in_its_first_forward_only(scene: Scene) -> None:
    written = scene.start(7, 1, [3, 4, 5])
    scene.alloc(7, [3, 4, 5], "cached")
    scene.alloc(8, [6, 7])
    scene.tokens[8] = scene.token(7).copy()
    scene.tokens[8][1:] += 1
    scene.table[2, :3] = [3, 4, 5]
    found = scene.forward(decode(8, 2, 3, 6))
    scene.forward(decode(8, 2, 4, 7))
    rows = scene.judge("hit_differs")
    assert told(rows) == [(1, 8, 4, 2, json.dumps([written, found]))]
    assert rows[0]["position"] == 1
    assert "token 701, position 1, written by request 7" in rows[0]["detail"]
    assert "token 702" in rows[0]["detail"]


def test_a_hit_at_another_position_differs_and_an_equal_one_does_not(make_scene) -> None:
    for shift in (0, 1):
        scene = make_scene()
        scene.start(7, 1, [3, 4, 5])
        scene.tokens[8] = scene.token(7).copy()
        scene.table[2, :2] = [3 + shift, 4 + shift]
        scene.forward(decode(8, 2, 2, 6))
        assert [row["slot"] for row in scene.judge("hit_differs")] == ([4] if shift else [])


def test_what_a_request_wrote_itself_is_no_hit(scene: Scene) -> None:
    scene.start(7, 1, [3, 4])
    scene.tokens[7] = scene.token(7) + 50  # the canary's token check sees this, and it is nobody's hit
    scene.forward(decode(7, 1, 2, 5))
    assert scene.judge("hit_differs") == []


CHECKS = (
    "read_after_free",
    "read_of_foreign_slot",
    "write_to_foreign_slot",
    "padded_write",
    "hit_never_written",
    "hit_differs",
)


def play_all_of_them(scene: Scene, *, gap: bool) -> None:
    scene.start(7, 1, [3, 4, 5, 6])
    scene.free(7, [3])
    scene.alloc(8, [4, 6])
    scene.alloc(7, [9])
    if gap:
        scene.lose()
    scene.table[2, :2] = [5, 6]
    scene.forward(decode(7, 1, 4, 30), decode(8, 2, 2, 31), mode="decode", padding=(9, 0))


def test_a_gap_silences_them_all(make_scene) -> None:
    whole = make_scene()
    play_all_of_them(whole, gap=False)
    assert {row["kind"] for row in whole.judge(*CHECKS)} == set(CHECKS)
    lossy = make_scene()
    play_all_of_them(lossy, gap=True)
    assert lossy.judge(*CHECKS) == []


def test_a_corrupt_trace_makes_one_finding_a_request_not_one_a_slot(scene: Scene) -> None:
    scene.status(7, "admitted", 1)
    scene.forward(Part(request=7, row=1, prefix=0, slots=tuple(range(1, 31))))
    scene.forward(decode(7, 1, 30, 31))
    rows = scene.judge("write_to_foreign_slot", "read_after_free")
    assert [(row["kind"], row["forward"], row["count"]) for row in rows] == [
        ("write_to_foreign_slot", 0, 30),
        ("read_after_free", 1, 30),
        ("write_to_foreign_slot", 1, 1),
    ]


@pytest.mark.parametrize("shown", ["table", "blocks", "list of blocks"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_hit_in_the_same_step_is_legitimate_where_layers_store_before_they_attend(
    tmp_path: Path, declared: bool, shown: str
) -> None:
    """Request 8 begins with what 7 writes in the same step, and 9 with what 8 does; the batch has them in another order."""
    table = np.zeros((5, 16), np.int32)
    table[1, :4], table[2, :6], table[3, :7] = [4, 5, 6, 7], [4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9, 10]
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=32),),
        tables=(StateTable(rows=5, width=16),),
        truth_table=StateTable(name="truth", rows=5, width=16),
    )
    told = ForwardInput(
        mode="extend",
        req_pool_indices=[3, 2, 1, 0],
        request_ids=[9, 8, 7, -1],
        prefix_lens=[6, 4, 0, 0],
        extend_lens=[1, 2, 4, 1],
        input_ids=[106, 104, 105, 100, 101, 102, 103, 0],
        positions=[6, 4, 5, 0, 1, 2, 3, 0],
        out_cache_loc=(np.array([10, 8, 9, 4, 5, 6, 7, 0]),),
        reads=(table,),
        truth=TruthTokens(flat=[*range(100, 107), *range(100, 106), *range(100, 104)], lens=[7, 6, 4, 0]),
    )
    if shown != "table":  # an engine without rows
        blocks = table[[3, 2, 1, 0]]
        read = BlockTable(blocks=blocks if shown == "blocks" else blocks.tolist(), block_size=1)
        told = replace(told, req_pool_indices=None, reads=(read,))
    parts = in_reading_order(told) if declared else [(told, np.arange(4))]
    with Recorder(tmp_path / "t.arrow", header) as recorder:
        for part, _ in parts:
            recorder.before_forward(part)
            recorder.after_forward()
        for row, request, prefix, slot in ((1, 7, 4, 11), (2, 8, 6, 12), (3, 9, 7, 13)):
            recorder.before_forward(
                ForwardInput(
                    mode="decode",
                    req_pool_indices=[row] if shown == "table" else None,
                    request_ids=[request],
                    prefix_lens=[prefix],
                    extend_lens=[1],
                    input_ids=[100 + prefix],
                    positions=[prefix],
                    out_cache_loc=(np.array([slot]),),
                    reads=(table if shown == "table" else BlockTable(blocks=table[[row]], block_size=1),),
                )
            )
            recorder.after_forward()
    summary = replay(tmp_path / "t.arrow", settings=ReplaySettings(), report=None)
    assert summary.tokens == 11
    assert (summary.violations + summary.findings == 0) == declared
    if declared:
        assert [chosen.tolist() for _, chosen in parts] == [[2], [1], [0, 3]]
        (same,) = in_reading_order(parts[0][0])
        assert same[0] is parts[0][0]
