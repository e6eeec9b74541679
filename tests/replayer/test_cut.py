"""A recording that was cut is judged up to its end, before and after it is recovered, and no advice goes in a circle."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.recorder.writing.recovery import recover
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.engines.toy_engine import SHAPES, ToyEngine
from ..support.raw_traces import write_in_batches


@pytest.fixture
def ends(tmp_path: Path) -> list[int]:
    """Write a whole trace of thirty forwards, and return where its batches end."""
    engine = ToyEngine(SHAPES["full"], seed=1, forwards=30)
    return write_in_batches(tmp_path / "whole.arrow", engine.header, engine.events, flush_every=3)


def _said(path: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(replay_command, [str(path), "--no-report", *options])
    return done.exit_code, done.output


def test_a_torn_recording_is_clean_up_to_its_last_forward(ends: list[int], tmp_path: Path) -> None:
    torn, saved = tmp_path / "torn.arrow", tmp_path / "saved.arrow"
    torn.write_bytes((tmp_path / "whole.arrow").read_bytes()[: ends[5] - 7])
    recover(torn, saved)
    last = replay(torn, settings=ReplaySettings(), report=None).last_forward
    assert last >= 0
    for path in (torn, saved):
        for executor in ("interval", "stepwise"):
            summary = replay(path, settings=ReplaySettings(executor=executor), report=None)
            assert (summary.verdict, summary.cut, summary.last_forward) == (Verdict.INCONCLUSIVE, True, last)
        code, said = _said(path)
        assert code == 125
        assert f"CLEAN in what was watched up to forward {last:,}; the recording was cut there" in said
        assert "recover " not in said
        code, said = _said(path, "--quiet")
        assert f"clean up to forward {last:,}; the recording was cut there" in said
        assert json.loads(_said(path, "--json")[1])["cut_at_forward"] == last


def test_what_lacks_something_in_its_middle_is_not_clean_up_to_its_end(ends: list[int], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.arrow"
    data = bytearray((tmp_path / "whole.arrow").read_bytes())
    data[(ends[2] + ends[3]) // 2] ^= 0x10
    damaged.write_bytes(data)
    saved = tmp_path / "saved.arrow"
    recover(damaged, saved)
    for path in (damaged, saved):
        code, said = _said(path)
        assert code == 125
        assert "INCONCLUSIVE" in said
        assert "CLEAN" not in said
        assert "kvcanary recover" not in said


def test_a_cut_recording_that_is_corrupt_is_corrupt(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=3, fault="kv", forwards=60, fault_rate=0.5)
    path = tmp_path / "t.arrow"
    found = write_in_batches(path, engine.header, engine.events, flush_every=3)
    path.write_bytes(path.read_bytes()[: found[-2] - 7])
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert (summary.verdict, summary.cut) == (Verdict.CORRUPT, False)


def test_a_recording_under_way_is_clean_so_far(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=1, forwards=9)
    path = tmp_path / "live.arrow"
    with TraceWriter(path, engine.header, flush_bytes=1 << 30, flush_interval_ns=1 << 60) as writer:
        for event in engine.events:
            assert writer.append(event)
        assert writer.flush()
        code, said = _said(path)
    assert code == 125
    assert "up to forward 8; it is being recorded" in said
    assert "cut there" not in said and "recover" not in said
    assert _said(path)[0] == 0
