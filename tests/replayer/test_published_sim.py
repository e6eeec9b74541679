"""Whole traces of the simulated engine: the replay finds exactly the rows that the published canary finds online."""

from collections import Counter
from pathlib import Path

import pytest
from kvcanary.kernels.constants import FailReason, LaunchTag

from .published_sim.cases import CONFIGS
from .published_sim.injector import FAULTS
from .published_sim.run import run

FEWEST_TRACES = 3 * len(CONFIGS)


def test_tags_and_reasons_are_numbered_as_published() -> None:
    from sglang.kernels.ops.kv_canary.consts import FailReason as PublishedReason
    from sglang.kernels.ops.kv_canary.verify import CanaryLaunchTag

    assert {tag.name: int(tag) for tag in LaunchTag} == {tag.name: int(tag) for tag in CanaryLaunchTag}
    ours = {reason.name: int(reason) for reason in FailReason}
    published = {reason.name: int(reason) for reason in PublishedReason}
    assert ours == {name.removesuffix("_MISMATCH").replace("REAL_", ""): bit for name, bit in published.items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.one_in(3)
def test_clean_engine_is_clean_on_both_sides(name: str, tmp_path: Path) -> None:
    found = run(name, 3, tmp_path / "run")
    found.assert_same()
    assert found.seen.rows == []
    assert found.summary.verdict.exit_code == 0, (found.summary.doubts, found.summary.first_finding)
    assert found.summary.verified > 100


def test_replay_finds_the_published_rows(tmp_path: Path, conformance_cases: int) -> None:
    names = list(CONFIGS)
    tags: Counter[int] = Counter()
    modes: set[tuple[str, int]] = set()
    reasons = traces = with_rows = swaps_seen = padded = host_copies = pool_copies = 0
    # A smoke run of `make test`; make fuzz goes through 2,000.
    for case in range(FEWEST_TRACES if conformance_cases <= 500 else conformance_cases // 10):
        number = case % len(names)
        # Engines and faults drift against one another, so that every pair comes up as cases grow.
        fault = FAULTS[(case // len(names) + 5 * number) % len(FAULTS)]
        found = run(names[number], 1000 + case, tmp_path / str(case), fault)
        try:
            found.assert_same()
        except AssertionError as error:
            error.add_note(f"case {case}: engine {names[number]}, fault {fault}, seed {1000 + case}")
            raise
        traces += 1
        with_rows += bool(found.seen.rows)
        if fault == "next_token_swap":  # the KV path is whole: only who knows the tokens can tell
            assert {row[7] for row in found.seen.rows} <= {FailReason.WRITE_TOKEN}, case
            swaps_seen += bool(found.seen.rows)
        modes |= found.seen.modes
        padded += found.seen.padded
        host_copies += found.seen.host_copies
        pool_copies += found.seen.pool_copies
        tags.update(row[0] for row in found.seen.rows)
        for row in found.seen.rows:
            reasons |= row[7]
    assert with_rows > 0.7 * traces
    assert set(tags) == set(map(int, LaunchTag))
    assert FailReason(reasons) == ~FailReason(0)
    target = {("extend", 0), ("mixed", 0), ("decode", 0), ("target_verify", 0), ("idle", 0)}
    assert modes == target | {("draft_extend", 1), ("decode", 1)}
    assert min(swaps_seen, padded, host_copies, pool_copies) > 0
