"""Several traces, one exit code."""

from itertools import combinations_with_replacement, permutations

from kvcanary.replayer.report.summary import Verdict, combined_exit_code

BY_RANK = (1, 2, 125, 0)  # docs/reference/replay.md: corrupt, unreadable, inconclusive, clean


def test_the_worst_of_several_codes_counts() -> None:
    for codes in combinations_with_replacement(BY_RANK, 3):
        for order in permutations(codes):
            assert combined_exit_code(order) == min(codes, key=BY_RANK.index), order
    assert combined_exit_code([]) == 0


def test_each_verdict_has_its_code() -> None:
    assert {verdict.name: verdict.exit_code for verdict in Verdict} == {"CLEAN": 0, "CORRUPT": 1, "INCONCLUSIVE": 125}
