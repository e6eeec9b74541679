"""Copies of whole slots: everything is read before anything is written, whatever the order of the runs."""

from pathlib import Path

import pytest
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .pd_engine import Side

TOKENS = [11, 12, 13, 14, 15]


def recorded(tmp_path: Path, *, copies: list[tuple[list[int], list[int]]], then: list[int]):
    """Write five tokens to slots 10 to 14, copy, and decode over the slots where they should be now."""
    side = Side(tmp_path / "t.arrow")
    side.forward(TOKENS, [10, 11, 12, 13, 14], truth=TOKENS)
    for src, dst in copies:
        for pool in side.kv:
            pool[dst] = pool[src]
        side.recorder.kv_copy(group=0, src=src, dst=dst, count=[1] * len(src))
    side.table[1, : len(then)] = then
    side.forward([16], [30], start=len(then), mode="decode", truth=[*TOKENS, 16])
    return replay(side.close(), settings=ReplaySettings(checks=()), report=None)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([10, 11, 12, 13, 14], [11, 12, 13, 14, 15]),  # each run begins where the one before has written
        ([14, 13, 12, 11, 10], [13, 12, 11, 10, 9]),
        ([10, 11, 12, 13, 14], [14, 10, 11, 12, 13]),  # around in a circle
    ],
)
def test_a_compaction_whose_runs_overlap(src, dst, tmp_path):
    moved = dict(zip(src, dst, strict=True))
    summary = recorded(tmp_path, copies=[(src, dst)], then=[moved[slot] for slot in range(10, 15)])
    assert summary.first_violation is None
    assert summary.verdict is Verdict.CLEAN, summary.doubts
    assert summary.verified == 20  # five records in HEAD and TAIL of K and V


def test_a_copy_that_went_elsewhere_is_seen(tmp_path):
    summary = recorded(tmp_path, copies=[([10, 11], [20, 21])], then=[20, 22, 12, 13, 14])
    assert summary.verdict is Verdict.CORRUPT
    assert summary.first_violation["slot"] == 22
