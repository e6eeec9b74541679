"""Rows, lengths, and tokens that were sampled: now, later, or by somebody else."""

import json

import pytest

from .scene import Part, Scene, decode, told


def test_a_row_given_to_another_while_a_launched_forward_reads_it_is_told_once(scene: Scene) -> None:
    scene.start(7, 1, [3])
    scene.status(7, "finished", 1)
    given = scene.status(8, "admitted", 1)
    found = scene.forward(decode(7, 1, 1, 4))
    scene.forward(decode(7, 1, 2, 5))
    scene.forward(Part(request=8, row=1, prefix=0, slots=(6,)))
    rows = scene.judge("row_reassigned")
    assert told(rows) == [(1, 7, -1, 1, json.dumps([given, found]))]
    assert "gave to request 8" in rows[0]["detail"]
    assert rows[0]["req_pool_idx"] == 1


@pytest.mark.parametrize("history", ["", "allocator"])
def test_without_a_promise_only_the_very_request_is_not_to_read_its_row_any_more(make_scene, history: str) -> None:
    scene = make_scene(told=history)
    scene.status(7, "admitted", 1)
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3,)))
    back = scene.status(7, "retracted", 1)
    found = scene.forward(decode(7, 1, 1, 4))
    scene.forward(decode(7, 1, 2, 5))  # which is said once
    scene.status(7, "admitted", 1)
    scene.forward(decode(7, 1, 3, 6))
    scene.status(8, "retracted", 2)
    scene.forward(decode(9, 2, 1, 7))  # nobody was told to whom it was given then
    rows = scene.judge("row_reassigned")
    assert told(rows) == [(1, 7, -1, 1, json.dumps([back, found]))]
    assert rows[0]["cause"] == "row_taken_back"


@pytest.mark.parametrize("status", ["finished", "aborted", "retracted"])
def test_a_row_that_was_taken_back_is_not_to_be_read(scene: Scene, status: str) -> None:
    scene.start(7, 1, [3])
    back = scene.status(7, status, 1)
    found = scene.forward(decode(7, 1, 1, 4))
    rows = scene.judge("row_reassigned")
    assert told(rows) == [(1, 7, -1, 1, json.dumps([back, found]))]
    assert "took back from request 7" in rows[0]["detail"]


def test_rows_that_nobody_was_told_of_and_rows_given_anew_are_silent(scene: Scene) -> None:
    scene.forward(Part(request=9, row=3, prefix=0, slots=(3,)))
    scene.start(7, 1, [4])
    scene.status(7, "retracted", 1)
    scene.status(7, "admitted", 2)
    scene.forward(Part(request=7, row=2, prefix=0, slots=(5,)), mode="extend", padding=(0,))
    assert scene.judge("row_reassigned") == []


def test_rows_are_forgotten_after_a_gap_and_not_judged_without_a_promise(make_scene) -> None:
    for options in ({"told": ""}, {}):
        scene = make_scene(**options)
        scene.start(7, 1, [3])
        scene.status(8, "admitted", 1)
        if scene.recorder.header.slot_history:
            scene.lose()
        scene.forward(decode(7, 1, 1, 4))
        assert scene.judge("row_reassigned") == []


def test_a_length_that_goes_back_is_found_with_both_forwards(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    before = scene.forward(decode(7, 1, 3, 6))
    found = scene.forward(decode(7, 1, 1, 7))
    scene.forward(decode(7, 1, 2, 8))
    rows = scene.judge("seq_len_backwards")
    assert told(rows) == [(2, 7, -1, 1, json.dumps([before, found]))]
    assert rows[0]["position"] == 1


@pytest.mark.parametrize(
    ("again", "slot", "sampled", "found"),
    [
        (2, 5, False, []),  # a step whose result was thrown away
        (2, 5, True, [2]),
        (2, 6, False, [2]),
        (1, 4, False, [2]),
    ],
)
def test_a_token_computed_twice_is_a_length_that_goes_back_unless_nothing_came_of_it(
    scene: Scene, again: int, slot: int, sampled: bool, found: list[int]
) -> None:
    scene.start(7, 1, [3, 4])
    scene.forward(decode(7, 1, 2, 5), sampled=([9], [1]) if sampled else ([], []))
    scene.forward(decode(7, 1, again, slot))
    assert [row["forward"] for row in scene.judge("seq_len_backwards")] == found


def test_another_token_in_place_of_the_last_one_is_a_length_that_goes_back(scene: Scene) -> None:
    scene.start(7, 1, [3, 4])
    scene.forward(decode(7, 1, 2, 5))
    scene.forward(decode(7, 1, 2, 5), inputs={(7, 2): 888})
    assert [row["forward"] for row in scene.judge("seq_len_backwards")] == [2]


@pytest.mark.parametrize("same", [True, False])
def test_two_requests_that_write_one_token_to_one_slot_do_no_harm(scene: Scene, same: bool) -> None:
    """As where both begin alike, and the second is given the page that the first one fills in the same step."""
    scene.alloc(7, [3, 4, 5])
    scene.forward(
        Part(request=7, row=1, prefix=0, slots=(3, 4)),
        Part(request=8, row=2, prefix=0, slots=(3, 4)),
        inputs={(request, position): 11 + position for request in (7, 8) for position in range(2)}
        | ({} if same else {(8, 1): 99}),
    )
    rows = scene.judge("write_to_foreign_slot")
    assert [(row["request_id"], row["slot"]) for row in rows] == ([] if same else [(8, 3)])


@pytest.mark.parametrize(
    ("part", "token", "found"),
    [
        (0, 12, [(1, 8, 4)]),  # a token that is computed again into a page that others read
        (1, 12, []),
        (1, 99, [(1, 8, 4)]),
        (2, 12, []),  # more than have been told: as many as there are
    ],
)
def test_a_step_that_is_told_as_several_forwards_may_write_one_token_twice(
    scene: Scene, part: int, token: int, found: list[tuple[int, int, int]]
) -> None:
    alike = {(request, position): 11 + position for request in (7, 8) for position in range(2)}
    scene.alloc(7, [3, 4, 5])
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)), inputs=alike)
    scene.alloc(8, [3, 4], "shared")
    scene.forward(Part(request=8, row=2, prefix=1, slots=(4,)), inputs=alike | {(8, 1): token}, behind=part)
    rows = scene.judge("write_to_foreign_slot")
    assert [(row["forward"], row["request_id"], row["slot"]) for row in rows] == found


@pytest.mark.parametrize("prefix", [2, 3])
def test_a_verify_forward_takes_at_least_one_token(make_scene, prefix: int) -> None:
    scene = make_scene()
    scene.start(7, 1, [3, 4])
    scene.forward(Part(request=7, row=1, prefix=2, slots=(5, 6, 7)), mode="target_verify")
    scene.forward(Part(request=7, row=1, prefix=prefix, slots=(6, 7, 8)), mode="target_verify")
    assert [row["forward"] for row in scene.judge("seq_len_backwards")] == ([2] if prefix == 2 else [])


def test_starting_over_drafting_and_another_request_are_no_way_back(make_scene) -> None:
    scene = make_scene(draft=True)
    scene.start(7, 1, [3, 4, 5])
    for prefix in (3, 4, 3):  # a draft's guesses, then what was taken of them
        scene.forward(Part(request=7, row=1, prefix=prefix, slots=(6 + prefix,)), mode="decode", runner=1)
    scene.status(7, "retracted", 1)
    scene.status(7, "admitted", 1)
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3,)))
    scene.status(7, "finished", 1)
    scene.status(8, "admitted", 1)
    scene.forward(Part(request=8, row=1, prefix=0, slots=(4,)))
    assert scene.judge("seq_len_backwards") == []


def test_without_a_promise_only_forwards_that_sample_tell_a_length(make_scene) -> None:
    for sampled in (True, False):
        scene = make_scene(told="")
        scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4, 5)), sampled=([703], [1]))
        scene.forward(Part(request=7, row=1, prefix=0, slots=(6,)), sampled=([701], [1]) if sampled else ([], [0]))
        assert [row["forward"] for row in scene.judge("seq_len_backwards")] == ([1] if sampled else [])


@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_without_a_promise_a_decode_tells_a_length_where_the_row_was_reported(make_scene, mode: str) -> None:
    scene = make_scene(told="")
    scene.status(7, "admitted", 1)
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4, 5)))
    scene.forward(Part(request=7, row=1, prefix=1, slots=(6,)), mode=mode)
    # An extend may compute the same positions again and again, as diffusion models do.
    assert [row["forward"] for row in scene.judge("seq_len_backwards")] == ([1] if mode == "decode" else [])


def test_without_a_promise_starting_over_is_no_way_back(make_scene) -> None:
    scene = make_scene(told="")
    scene.status(7, "admitted", 1)
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4, 5)))
    scene.status(7, "retracted", 1)
    scene.forward(decode(7, 1, 1, 6))
    scene.status(7, "admitted", 1)
    scene.forward(decode(7, 1, 2, 7))
    assert scene.judge("seq_len_backwards") == []


def test_a_gap_forgets_lengths(scene: Scene) -> None:
    scene.start(7, 1, [3, 4, 5])
    scene.lose()
    scene.forward(decode(7, 1, 1, 6))
    assert scene.judge("seq_len_backwards") == []


def test_a_token_that_arrives_before_its_forward_is_compared_with_it(scene: Scene) -> None:
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)))
    sampled = scene.sampled(0, [999], [1])
    found = scene.forward(decode(7, 1, 2, 5))
    rows = scene.judge("input_not_sampled")
    assert told(rows) == [(1, 7, 5, 1, json.dumps([sampled, found]))]
    assert "was fed token 702, forward 0 sampled 999" in rows[0]["detail"]


def test_a_token_that_arrives_after_its_forward_is_compared_with_it(scene: Scene) -> None:
    """Overlap: forward 1 is launched before the tokens of forward 0 have arrived."""
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)), Part(request=8, row=2, prefix=0, slots=(6,)))
    fed = scene.forward(decode(7, 1, 2, 5), decode(8, 2, 1, 7), mode="decode", inputs={(8, 1): 888})
    late = scene.sampled(0, [702, 801], [1, 1])
    scene.forward(decode(7, 1, 3, 8), decode(8, 2, 2, 9), mode="decode")
    scene.sampled(1, [703, 802], [1, 1])
    rows = scene.judge("input_not_sampled")
    assert told(rows) == [(1, 8, 7, 1, json.dumps([fed, late]))]
    assert rows[0]["event"] == fed
    assert "was fed token 888, forward 0 sampled 801" in rows[0]["detail"]


def test_one_wrong_token_is_told_once_whichever_comes_first(scene: Scene) -> None:
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)))
    scene.forward(decode(7, 1, 2, 5), inputs={(7, 2): 5})
    scene.sampled(0, [702], [1])
    scene.forward(decode(7, 1, 3, 6))
    scene.sampled(1, [703], [1])
    scene.forward(decode(7, 1, 4, 8))
    assert [(row["forward"], row["position"]) for row in scene.judge("input_not_sampled")] == [(1, 2)]


def test_late_tokens_of_a_padded_batch_and_of_requests_that_got_none(scene: Scene) -> None:
    scene.forward(
        Part(request=7, row=1, prefix=0, slots=(3, 4)), Part(request=8, row=2, prefix=0, slots=(6,)), padding=(0, 0)
    )
    scene.sampled(0, [801], [0, 1, 0, 0])
    scene.forward(decode(8, 2, 1, 7), decode(7, 1, 2, 5), mode="mixed", inputs={(7, 2): 1})
    assert scene.judge("input_not_sampled") == []


def test_tokens_of_a_forward_that_was_forgotten_say_nothing(make_scene) -> None:
    for count in (63, 64):
        scene = make_scene()
        scene.forward(Part(request=7, row=1, prefix=0, slots=(3,)))
        for _ in range(count - 1):
            scene.forward(Part(request=8, row=2, prefix=0, slots=(6,)))
        scene.forward(decode(7, 1, 1, 4), inputs={(7, 1): 5})
        scene.sampled(0, [701], [1])
        assert len(scene.judge("input_not_sampled")) == (1 if count == 63 else 0)
    scene = make_scene()
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3,)))
    scene.lose()
    scene.sampled(0, [701], [1])
    scene.forward(decode(7, 1, 1, 4), inputs={(7, 1): 5})
    assert scene.judge("input_not_sampled") == []


def test_a_sample_event_that_does_not_fit_its_forward_is_unusable(scene: Scene) -> None:
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3,)))
    event = scene.sampled(0, [701, 702], [1, 1])
    scene.forward(decode(7, 1, 1, 4), inputs={(7, 1): 5})
    summary, rows = scene.report("input_not_sampled")
    assert rows == []
    assert summary.num_gaps == 1
    assert f"event {event} (sample)" in summary.gaps[0]


def test_wrong_inputs_against_the_truth_carry_their_forward_as_evidence(scene: Scene) -> None:
    found = scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4)), inputs={(7, 1): 5})
    assert told(scene.judge("input_not_truth")) == [(0, 7, 4, 1, json.dumps([found]))]


def test_a_request_with_nothing_in_the_cache_is_fed_the_places_of_its_tokens(scene: Scene) -> None:
    scene.start(7, 1, [3, 4])
    found = scene.forward(Part(request=8, row=2, prefix=0, slots=(5, 6, 7)), mode="extend", padding=(0,), shift=2)
    scene.forward(decode(7, 1, 2, 8), mode="decode", shift=1)  # goes on from a record: the canary's own assert
    rows = scene.judge("position_not_place")
    assert told(rows) == [(1, 8, 5, 3, json.dumps([found]))]
    assert rows[0]["detail"] == "was fed position 2 for its token 0 (the first of 3)"
    assert (rows[0]["position"], rows[0]["req_pool_idx"]) == (0, 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("", ""), ("other", "had 703 there before"), ("lost", "has none there, and had one before"), ("ended", "")],
)
def test_what_is_fed_again_is_what_the_scheduler_had_when_the_request_was_put_back(
    scene: Scene, wrong: str, said: str
) -> None:
    """Its own tokens are wrong afterwards, so that they agree with what is fed: nothing in that forward contradicts it."""
    scene.start(7, 1, [3, 4])
    for position in (2, 3, 4):
        scene.forward(decode(7, 1, position, 3 + position), mode="decode")
    back = scene.status(7, "finished" if wrong == "ended" else "retracted", 1)
    scene.status(7, "admitted", 2)
    fed = {}
    if wrong in ("other", "ended"):
        scene.token(7)[3] = 888
    elif wrong == "lost":
        fed = {(7, position): 700 + position for position in range(5)}
        scene.tokens[7] = scene.token(7)[:3]
    first = scene.forward(Part(request=7, row=2, prefix=0, slots=(11, 12)))
    again = scene.forward(Part(request=7, row=2, prefix=2, slots=(13, 14, 15)), inputs=fed)
    rows = scene.judge("input_not_truth")
    assert all(row["event"] == again > first and json.loads(row["evidence"]) == [back, again] for row in rows)
    assert [row["position"] for row in rows] == {"other": [3], "lost": [3, 4]}.get(wrong, [])
    assert all(said in row["detail"] for row in rows)


def test_what_was_sampled_for_a_request_ends_with_it(scene: Scene) -> None:
    """An id may come again, in the same row, and what a request's last forward sampled be told after its end."""
    scene.start(7, 1, [3, 4])
    scene.forward(decode(7, 1, 2, 5), sampled=([900], [1]))
    late = scene.last_forward
    scene.status(7, "aborted", 1)
    scene.sampled(late, [901], [1])
    scene.status(7, "admitted", 1)
    scene.forward(Part(request=7, row=1, prefix=0, slots=(3, 4, 5, 6)), sampled=([999], [1]))
    found = scene.forward(decode(7, 1, 4, 8))
    rows = scene.judge("input_not_sampled")
    assert [(row["forward"], row["evidence"]) for row in rows] == [(3, json.dumps([found - 1, found]))]


@pytest.mark.parametrize(
    ("prefix", "slots", "found"),
    [
        (0, (6, 7, 8, 9), [2]),  # all of it again, and the token that was sampled last
        (3, (9,), [2]),  # which alone is computed, behind what the cache has
        (0, (6, 7, 8), []),  # all but that: it is sampled anew, and what was sampled before may have been thrown away
    ],
)
def test_a_request_that_was_put_back_is_fed_what_was_sampled_for_it_last(
    scene: Scene, prefix: int, slots: tuple[int, ...], found: list[int]
) -> None:
    scene.start(7, 1, [3, 4])
    scene.forward(decode(7, 1, 2, 5), sampled=([900], [1]))
    scene.status(7, "retracted", 1)
    scene.status(7, "admitted", 2)
    scene.forward(Part(request=7, row=2, prefix=prefix, slots=slots), sampled=([1003], [1]))
    assert [row["forward"] for row in scene.judge("input_not_sampled")] == found


def test_a_row_that_stands_twice_in_a_forward_is_found_in_any_trace(make_scene) -> None:
    scene = make_scene(told="")
    scene.forward(Part(request=7, row=1, prefix=0, slots=(4, 5)))
    once, again = (Part(request=7, row=1, prefix=2, slots=(slot,)) for slot in (6, 7))
    scene.forward(once, again, padding=(0, 0))
    (row,) = scene.judge("row_reassigned")
    assert (row["forward"], row["request_id"], row["req_pool_idx"]) == (1, 7, 1)
