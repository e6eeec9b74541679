"""Sliding windows in rings: what a healthy ring does is clean, and a wrong read is found."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.engines.ring import Ring

SETTINGS = [{}, {"executor": "stepwise"}, {"executor": "stepwise", "backend": "reference"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=["interval", "stepwise", "reference"])
@pytest.mark.parametrize("chunks", [(3, 9, 1, 1, 1), (9, 9, 1, 2), (6, 1, 1, 14, 5, 6, 1), (2, 6, 1)])
def test_a_chunk_longer_than_the_ring_is_healthy(
    chunks: tuple[int, ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    ring = Ring(tmp_path / "trace.arrow")
    for extend in chunks:
        ring.forward(extend)
    summary = ring.judged(**settings)
    assert (summary.violations, summary.findings, summary.losses) == (0, 0, [])
    assert summary.verified > 0


@pytest.mark.parametrize("settings", SETTINGS, ids=["interval", "stepwise", "reference"])
@pytest.mark.parametrize(("shift", "first"), [(2, 7), (3, 8), (-1, 4)])
def test_a_ring_that_is_read_short_or_long_is_found(
    shift: int, first: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    ring = Ring(tmp_path / "trace.arrow")
    ring.forward(3)
    for step in range(12):
        ring.forward(1, shift=shift if step == 7 else 0)
    ring.recorder.close()
    (tmp_path / "report").mkdir()
    summary = replay(ring.path, settings=ReplaySettings(**settings), report=tmp_path / "report")
    (found,) = pq.read_table(tmp_path / "report" / "findings.parquet").to_pylist()
    assert (found["kind"], found["forward"], found["request_id"]) == ("wrong_window", 8, 7)
    assert found["detail"] == f"reads positions {first} to 9 of a prefix of 10, the window of 4 begins at 6"
    assert summary.verdict is Verdict.CORRUPT
