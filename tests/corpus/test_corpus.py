"""The saved traces of public bugs: found in time, one incident each, its kind right; and runs without a bug are clean."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bugs import BUGS, link
from kvcanary.analysis.incidents.alike import known_bugs
from kvcanary.analysis.incidents.rules import RULES
from run import CERTAIN, DATA, HIGH, PAGE, look, outcome


@functools.cache
def by_rules(name):
    """Return what the rules say, without the bugs that look alike."""
    return outcome(BUGS[name], known=replace(known_bugs(), rows=()))


def test_all_of_them(bugs):
    """In one test, since of some claims many are needed, and each of pytest's workers would judge them all."""
    outcomes = {name: outcome(BUGS[name]) for name in bugs}
    found_no_later_than_it_is_read(outcomes)
    the_right_kind_comes_first(outcomes)
    of_what_no_rule_knows_no_kind_is_sure(outcomes)
    nobody_is_told_names_of_reasons(outcomes)


def test_each_bug_has_its_trace_and_all_are_small():
    traces = {path.stem for path in DATA.glob("*.arrow")}
    assert set(BUGS) <= traces
    assert max(path.stat().st_size for path in DATA.glob("*.arrow")) < 400_000
    assert {bug.mechanism.count(". ") + bug.mechanism.endswith(".") for bug in BUGS.values()} <= {1, 2, 3}
    assert all(link(bug.tracker).startswith("https://github.com/") for bug in BUGS.values())


def found_no_later_than_it_is_read(outcomes):
    late = {name: (o.found, o.reads) for name, o in outcomes.items() if o.effective and not 0 <= o.found <= o.reads}
    assert late.keys() == {name for name in outcomes if BUGS[name].late}
    assert {name for name, (found, _) in late.items() if found < 0} == {
        name for name in outcomes if BUGS[name].late.startswith("not found: ")
    }


def the_right_kind_comes_first(outcomes):
    effective = [o for o in outcomes.values() if o.effective]
    assert len(effective) >= 40
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    of_page = dict(zip(sorted(BUGS, key=lambda name: (BUGS[name].engine, BUGS[name].name)), rows, strict=True))
    judged = [row for row in of_page.values() if "| not effective |" not in row and "| not recorded |" not in row]
    assert sum(", not " not in row for row in judged) >= 0.9 * len(judged)
    wrong = {o.bug.trace for o in effective if not o.right}
    assert wrong <= {name for name, row in of_page.items() if ", not " in row}, "python tests/corpus/run.py --replay"
    assert not [(o.bug.trace, o.kind, o.score) for o in effective if not o.right and o.score >= CERTAIN]
    assert sum(o.incidents for o in effective) <= 1.1 * len(effective)


def of_what_no_rule_knows_no_kind_is_sure(outcomes):
    told = [o for o in outcomes.values() if o.effective and o.incidents]
    assert not [(o.bug.trace, o.unknown) for o in told if o.unknown[2] >= CERTAIN]
    assert sum(o.unknown[1] == RULES[o.bug.kinds[0]].branch for o in told) >= 0.9 * len(told)


def nobody_is_told_names_of_reasons(outcomes):
    assert not [o.sentence for o in outcomes.values() if "VERIFY_" in o.sentence or "no rule" in o.sentence.lower()]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("vllm-count_of_the_row_before", "position_off", "went on from position 97 in forward 27"),
        ("vllm-one_table_of_two_is_moved", "req_to_token", "all that it reads is not its own"),
        ("vllm-hit_of_a_part_of_the_window", "swa_window_off_by_one", "its slot is gone"),
        ("sglang-node_split_one_slot_early", "req_to_token", "stand in one another's places"),
        ("vllm-all_layers_are_of_the_first_group", "load_landed_elsewhere", "of the same load other slots got nothing"),
        ("nano-restored_one_token_too_many", "prefix_not_computed", "nobody has written it since"),
        ("transformers-tail_block_shared_by_fork", "shared_page_written", "before anything stood there"),
        ("vllm-scales_of_the_cache_are_never_set", "bad_values_written", "look at the cache's scales"),
    ],
)
def test_what_was_observed_makes_it_sure(name, kind, words):
    o = by_rules(name)
    assert (o.kind, o.score >= HIGH, o.incidents) == (kind, True, 1)
    assert words in o.sentence


@pytest.mark.parametrize(
    ("name", "kind", "score", "words"),
    [
        (
            "sglang-tokens_handed_on_in_the_order_of_what_was_scheduled",
            "next_token_swap",
            0.85,
            "and 2 more were fed one another's sampled tokens, 494, 146, 96, 131, in forward 3",
        ),
        (
            "transformers-append_goes_on_into_the_next_row",
            "commit_beyond_allocation",
            0.85,
            "its row has no entry for that position",
        ),
        ("vllm-angles_of_the_longest_in_the_batch", "not_of_the_model", 0.85, "rotated (RoPE) by another position"),
        (
            "transformers-prompt_that_is_put_back_leaves_its_blocks_in_the_cache",
            "hit_before_written",
            0.85,
            "nobody has computed",
        ),
        ("transformers-last_token_of_a_full_hit_is_counted_twice", "position_off", 0.85, "behind its whole prompt"),
        ("transformers-prefixes_are_shared_in_layers_whose_window_slides", "stale_prefix_hit", 0.85, "had gone round"),
        ("sglang-aborted_prompt_gives_back_what_the_tree_has", "stale_prefix_hit", 0.85, "was given it anew"),
        ("sglang-page_that_is_not_there_counts_as_read", "failed_load_counted_loaded", 0.92, "from a further storage"),
        ("vllm-count_of_what_can_be_stored_goes_on_over_a_preemption", "stored_wrong", 0.85, "still to be computed"),
        (
            "vllm-drafts_behind_the_longest_context_fall_on_its_beginning",
            "shared_page_written",
            0.95,
            "which the prefix cache holds",
        ),
        ("sglang-segments_of_adapters_overlap_what_lies_between", "computed_with_other_weights", 0.95, "3 tokens of 3"),
        (
            "sglang-what_was_sent_away_is_kept_with_a_chunk_that_never_ran",
            "prefix_not_computed",
            0.5,
            "written by nobody",
        ),
        (
            "minisgl-aborted_between_two_chunks_and_computed_on",
            "row_reassigned_in_flight",
            0.9,
            "for the same positions",
        ),
        ("minisgl-graph_keeps_the_page_table_it_was_prepared_with", "attention_table_overwritten", 0.96, "writes 29"),
        ("minisgl-lock_of_the_hit_is_released_a_second_time", "eviction_of_locked_page", 0.9, "evicted slot 1"),
        ("transformers-whole_prompt_is_kept_for_reuse_with_its_first_chunk", "hit_before_written", 0.85, "nobody has"),
        (
            "transformers-block_is_taken_to_follow_on_the_last_without_what_lies_between",
            "kv_write_lost",
            0.66,
            "nobody had written the slot before",
        ),
        (
            "vllm-window_is_counted_in_whole_blocks_from_the_end",
            "swa_window_off_by_one",
            0.92,
            "inside its window of 47",
        ),
        (
            "minisgl-tokens_beyond_what_was_allocated_go_where_the_rows_last_owner_was",
            "commit_beyond_allocation",
            0.9,
            "which it was never given",
        ),
        ("gllm-rest_of_a_prompt_is_copied_before_it_has_its_pages", "prefix_not_computed", 0.93, "nobody has written"),
        ("gllm-page_that_was_replaced_is_given_back_again_at_the_end", "free_too_early", 0.5, "given back twice"),
        ("gllm-pages_of_cancelled_work_stay_in_the_cache", "hit_before_written", 0.85, "given to nobody"),
        (
            "gllm-preempted_request_has_no_more_prompt_than_it_was_asked_with",
            "async_resume_wrong_input",
            0.95,
            "put back",
        ),
        ("sglang-host_pages_are_free_while_they_are_loaded", "host_copy_overwritten", 0.95, "in place of its copy"),
        (
            "sglang-last_slot_is_given_back_by_who_counts_and_by_who_decodes",
            "double_free",
            0.85,
            "given back in event 57 as well",
        ),
        ("transformers-block_of_a_row_is_read_without_the_stride_of_the_table", "slot_mapping", 0.95, "for slot 575"),
        ("transformers-place_of_a_cancelled_request_is_not_given_back", "page_given_twice", 0.5, "was given to it"),
        (
            "sglang-who_has_made_room_by_leaving_finds_that_there_is_room",
            "scheduled_after_retraction",
            0.96,
            "has not been let in again",
        ),
        (
            "sglang-later_chunks_are_replayed_with_the_reach_of_the_first",
            "attention_seq_len_wrong",
            0.5,
            "its row names slot 8",
        ),
        (
            "transformers-second_attempt_goes_on_behind_what_the_first_one_left",
            "position_off",
            0.68,
            "21 positions late",
        ),
        ("vllm-cache_takes_its_hold_before_a_request_lets_go", "page_leaked", 0.93, "a user whom nobody knows"),
        (
            "transformers-token_that_was_sampled_last_counts_as_stored_after_a_suspension",
            "prefix_not_computed",
            0.93,
            "counts position 32 as computed",
        ),
    ],
)
def test_what_was_observed_names_it(name, kind, score, words):
    o = by_rules(name)
    assert (o.kind, o.score, o.incidents) == (kind, score, 1)
    assert words in o.sentence


def test_who_is_not_sure_says_what_else_it_may_be():
    sentence = by_rules("sglang-row_gets_new_pages_alone").sentence
    assert "it may also be " in sentence
    assert (
        "tokens written to the wrong slots, which a write that went to another slot than the row names would show"
        in sentence
    )


def test_without_a_bug_nothing_is_found(clean_trace):
    reads, summary, found, _ = look(clean_trace)
    assert (reads, found.rows, summary.to_json()["verdict"]) == (-1, [], "clean")


def test_the_page_has_each_bug():
    text = PAGE.read_text()
    assert all(f"({link(bug.tracker)}) {bug.name} " in text for bug in BUGS.values())
