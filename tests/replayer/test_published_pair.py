"""Prefill and decode engines: replayed together, their traces give the rows that the published canaries find online."""

from pathlib import Path

import pytest

from .published_sim.injector import FAULTS
from .published_sim.pair import run_pair

ENGINES = ("mha", "mha_pages", "mla", "swa", "swa_pages", "dsv4", "eagle_mha", "eagle_swa", "mha_whole_slots")
FEWEST_TRACES = 2 * len(ENGINES)


@pytest.mark.parametrize("name", ENGINES)
def test_a_clean_pair_is_clean_on_both_sides(name: str, tmp_path: Path) -> None:
    for found in (pair := run_pair(name, 5, tmp_path / "pair")):
        found.assert_same()
        assert found.seen.rows == []
        assert found.summary.verdict.exit_code == 0, (found.summary.doubts, found.summary.first_finding)
    assert pair[1].seen.landed > 10
    assert pair[1].summary.verified > 50


def test_joined_replay_finds_the_published_rows(tmp_path: Path, conformance_cases: int) -> None:
    traces = with_rows = only_decode = 0
    for case in range(max(FEWEST_TRACES, conformance_cases // 40)):
        name, side = ENGINES[case % len(ENGINES)], ("prefill", "decode")[case // len(ENGINES) % 2]
        fault = FAULTS[(case // len(ENGINES) + 3 * case) % len(FAULTS)]
        pair = run_pair(name, 7000 + case, tmp_path / str(case), fault, side=side)
        for found in pair:
            try:
                found.assert_same()
            except AssertionError as error:
                error.add_note(f"case {case}: engine {name}, fault {fault} of {side}, seed {7000 + case}")
                raise
        rows = [bool(found.seen.rows) for found in pair]
        traces += 1
        with_rows += any(rows)
        only_decode += side == "prefill" and rows == [False, True]
    assert with_rows > 0.6 * traces
    assert only_decode  # damage on the prefill side that shows on the decode side alone
