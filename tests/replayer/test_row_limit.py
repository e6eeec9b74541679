"""How many violations a report keeps: the first of each slot, all counted, and all kept where that is asked for."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.replayer.report import report as results
from kvcanary.replayer.report import violations
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.places import DATA

TRACE = DATA / "free_too_early.arrow"


def rows_and_summary(folder: Path, **settings):
    folder.mkdir()
    summary = replay(TRACE, settings=ReplaySettings(**settings), report=folder)
    return pq.read_table(folder / "violations.parquet"), summary


@pytest.mark.parametrize("executor", ["stepwise", "interval"])
def test_the_first_rows_of_each_slot_are_kept_and_all_are_counted(tmp_path, monkeypatch, executor):
    whole, expected = rows_and_summary(tmp_path / "whole", executor=executor)
    monkeypatch.setattr(results, "ROWS_PER_SLOT", 1)
    asked, everything = rows_and_summary(tmp_path / "asked", executor=executor, all_rows=True)
    monkeypatch.setattr(results, "PENDING_ROWS", 1)
    kept, summary = rows_and_summary(tmp_path / "kept", executor=executor)
    assert asked.equals(whole)
    assert everything.violations_left_out == expected.violations_left_out == 0
    assert 0 < kept.num_rows < whole.num_rows
    assert summary.violations_left_out > 0
    told = {"violations", "violations_by_reason", "violations_by_launch", "forwards_hit", "slots_hit", "requests_hit"}
    told |= {"first_violation_forward", "last_violation_forward", "verdict"}
    assert {name: getattr(summary, name) for name in told} == {name: getattr(expected, name) for name in told}
    firsts = {}
    for row in whole.to_pylist():
        firsts.setdefault((row["group"], row["launch_tag"], row["slot"]), row["forward"])
    for row in kept.to_pylist():
        assert row["forward"] == firsts[row["group"], row["launch_tag"], row["slot"]]
    assert {(row["group"], row["launch_tag"], row["slot"]) for row in kept.to_pylist()} == {*firsts}


def test_a_report_has_a_bound_too(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "PENDING_ROWS", 1)
    monkeypatch.setattr(violations, "MAX_ROWS", 3)
    kept, summary = rows_and_summary(tmp_path / "kept", executor="stepwise")
    assert summary.violations == summary.violations_left_out + kept.num_rows
    assert np.unique(kept["forward"].to_numpy()).size <= 3
