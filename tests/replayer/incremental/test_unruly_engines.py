"""The interval executor against the stepwise one, on histories of an engine that does what it likes."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.executors.incremental.executor import IncrementalPlanner
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .shapes import SHAPES
from .unruly_engine import write

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all


def answer(path: Path, folder: Path, **settings) -> tuple[dict, dict]:
    """Return everything that a replay gives, but for how it was made."""
    folder.mkdir()
    summary = replay(path, settings=ReplaySettings(merge_rows=False, **settings), report=folder).to_json()
    for name in ("settings", "seconds", "report"):
        del summary[name]
    return summary, {file.name: pq.read_table(file).to_pylist() for file in folder.glob("*.parquet")}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.one_in(4)
def test_the_answer_is_stepwises(seed: int, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "t.arrow"
    fuss = write(trace, seed, shape)
    looked = []
    plan = IncrementalPlanner.plan

    def counted(*arguments):
        step = plan(*arguments)
        looked.append((step.due.entries, step.reads))
        return step

    monkeypatch.setattr(IncrementalPlanner, "plan", counted)
    options = {"kv_hash": ("auto", "none", "all")[seed % 3]} | ({"checks": ()} if seed == 3 else {})
    expected = answer(trace, tmp_path / "stepwise", executor="stepwise", **options)
    assert not looked
    came = answer(trace, tmp_path / "interval", executor="interval", **options)
    assert came == expected
    entries, reads = np.sum(looked, axis=0)
    assert expected[0]["verified"] and reads
    if fuss <= 0.05 and shape in ("full", "draft"):
        assert entries < reads


@pytest.mark.parametrize("shape", ["hybrid", "all"])
def test_the_reference_backend_agrees(shape: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.arrow"
    write(trace, 8, shape)
    assert answer(trace, tmp_path / "reference", executor="interval", backend="reference") == answer(
        trace, tmp_path / "cpu", executor="interval"
    )


@pytest.mark.parametrize("options", [{"fail_fast": True}, {"max_violations": 40}])
def test_it_stops_where_stepwise_stops(options: dict, tmp_path: Path) -> None:
    for seed in range(6, 12):
        trace = tmp_path / f"{seed}.arrow"
        write(trace, seed, list(SHAPES)[seed % len(SHAPES)])
        expected, came = (
            answer(trace, tmp_path / f"{seed}.{executor}", executor=executor, **options)
            for executor in ("stepwise", "interval")
        )
        assert came == expected


def test_the_command_and_the_settings_name_it(tmp_path: Path) -> None:
    trace = tmp_path / "t.arrow"
    write(trace, 6, "draft")
    told = {}
    for executor in ("stepwise", "interval"):
        done = CliRunner().invoke(replay_command, ["--no-report", "--json", "--executor", executor, str(trace)])
        told[executor] = json.loads(done.output)
        assert done.exit_code == told[executor]["exit_code"]
        assert told[executor].pop("settings")["executor"] == executor
        del told[executor]["seconds"]
    assert told["interval"] == told["stepwise"]
    with pytest.raises(ValueError, match="expected one of interval, stepwise"):
        ReplaySettings(executor="both")
