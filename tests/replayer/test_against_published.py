"""Whole traces: the replay finds exactly the rows that the published canary finds, stepped over the engine itself."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kvcanary.replayer.report.violations import VIOLATION_SCHEMA
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.engines.toy_engine import FAULTS, SHAPES, ToyEngine, record
from .published import published_rows

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

FIELDS = VIOLATION_SCHEMA.names[:8]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.one_in(4)
def test_replay_finds_the_published_rows(shape: str, fault: str, tmp_path: Path, conformance_cases: int) -> None:
    found_any = 0
    # Two of the three ways to hash KV bytes each, in turns over shapes and faults; make fuzz goes through ten seeds each.
    turn = list(SHAPES).index(shape) + list(FAULTS).index(fault)
    for seed in range(max(2, conformance_cases // 2000)):
        engine = ToyEngine(SHAPES[shape], seed=seed, fault=fault)
        mode = (seed + turn) % 3
        folder = tmp_path / str(seed)
        folder.mkdir()
        summary = replay(
            record(engine, folder / "t.arrow"),
            settings=ReplaySettings(
                kv_hash=("none", "partial", "all")[mode], backend="cpu", checks=(), merge_rows=False
            ),
            report=folder,
        )
        expected = published_rows(engine, mode)
        table = pq.read_table(folder / "violations.parquet")
        ours: list[list[list[int]]] = [[] for _ in engine.snapshots]
        for forward, *fields in zip(*(table[name].to_pylist() for name in ("forward", *FIELDS)), strict=True):
            ours[forward].append(fields)
        # The order of rows within a forward follows the launches on both sides: groups, halves, verify then write.
        assert ours == expected
        assert summary.violations == sum(map(len, expected))
        assert summary.findings == 0
        found_any += summary.violations
        if fault == "none":
            assert summary.verdict.exit_code == 0, summary.doubts
    if fault != "none":
        assert found_any


def test_reference_backend_agrees_with_the_compiled_one(tmp_path: Path) -> None:
    for shape in ("full_two_sources", "swa"):
        engine = ToyEngine(SHAPES[shape], seed=11, fault="table", forwards=12)
        trace = record(engine, tmp_path / f"{shape}.arrow")
        tables = []
        for backend in ("cpu", "reference"):
            folder = tmp_path / f"{shape}.{backend}"
            folder.mkdir()
            replay(trace, settings=ReplaySettings(backend=backend), report=folder)
            tables.append(pq.read_table(folder / "violations.parquet"))
        assert tables[0].equals(tables[1])
        assert tables[0].num_rows
