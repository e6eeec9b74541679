"""The device's replay in Triton's interpreter: whatever the trace holds, it gives what the CPU's stepwise replay gives."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from kvcanary.replayer.checks import CHECK_NAMES
from kvcanary.replayer.executors.device import logs
from kvcanary.replayer.lab.trial import Trial, run_trial
from kvcanary.replayer.run.settings import ReplaySettings

from ...support.engines.toy_engine import Shape, ToyEngine
from ...support.places import DATA
from ...support.raw_traces import bend, cut, read_raw, write_raw
from .same import replay_both

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

# Shape, fault, seed, KV hash, history checks, how many rows a log has room for, and which event is a forward that failed.
TOYS = {
    "positions": (Shape(), "position", 6, "none", True, 64, None),
    "sliding_stale": (Shape(window=5), "table", 5, "partial", False, 64, None),
    "full_logs": (Shape(sources=2, capture=16), "kv", 20, "all", False, 1, None),
    "failed": (Shape(), "position", 6, "none", False, 64, 1),
}


@pytest.mark.parametrize("name", TOYS)
def test_toy_engines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, fault, seed, kv_hash, checks, rows, failed = TOYS[name]
    monkeypatch.setattr(logs, "FEWEST_ROWS", rows)
    monkeypatch.setattr(logs, "MOST_ROWS", rows)
    engine = ToyEngine(shape, seed=seed, fault=fault, forwards=6, fault_rate=0.7)
    if failed is not None:
        engine.events[failed].scalars["status"] = "failed"
    trace = write_raw(tmp_path / "t.arrow", engine.header, engine.events, flush_every=3)
    settings = ReplaySettings(kv_hash=kv_hash, checks=CHECK_NAMES if checks else ())
    ((summary, _),) = replay_both([trace], tmp_path / "reports", "interpreter", settings)
    assert summary.forwards == 6
    assert summary.verified > 20
    assert summary.violations


# Traces of engines, cut behind so many forwards and the first event of a kind.
CUT = {
    "clean_fork_dedup_evict.arrow": ("kv_copy", 4),
    "clean_hybrid.arrow": ("", 3),  # whose ring buffer goes on from a slot that the same forward writes
    "simulated/clean_eagle.arrow": ("", 4),
    "sglang/clean_hybrid_h200.arrow": ("sweep", 3),
}


@pytest.mark.parametrize("name", CUT)
def test_beginnings_of_real_traces(name: str, tmp_path: Path) -> None:
    wanted, forwards = CUT[name]
    header, events = read_raw(DATA / name)
    so_far = list(itertools.accumulate(event.kind == "forward" for event in events))
    end = next(at for at, count in enumerate(so_far) if count == forwards) + 1
    if wanted:  # and what the next forward makes of it
        first = next(at for at, event in enumerate(events) if event.kind == wanted)
        end = max(end, next(at for at in range(first, len(events)) if events[at].kind == "forward") + 1)
    trace = write_raw(tmp_path / "t.arrow", header, events[:end], flush_every=3)
    ((summary, _),) = replay_both([trace], tmp_path / "reports", "interpreter")
    assert summary.verified
    assert not wanted or summary.events[wanted] > 0


def test_segments_alone_and_together(tmp_path: Path) -> None:
    engine = ToyEngine(Shape(), seed=6, fault="position", forwards=6, fault_rate=0.7)
    trace = write_raw(tmp_path / "t.arrow", engine.header, engine.events)
    segments = cut(trace, tmp_path / "s.arrow", seed=1, least=2, most=4)
    assert len(segments) > 1
    found = replay_both([segments, *segments[1:]], tmp_path / "reports", "interpreter")
    assert found[0][0].violations
    assert found[1][0].events["keyframe"] > 0
    assert not found[1][0].unknown_before
    assert found[1][0].verified


@pytest.mark.parametrize(("config", "number"), [("swa", 3), ("overlap", 3)])
def test_a_segment_of_an_engine_alone(config: str, number: int, tmp_path: Path) -> None:
    (trace,) = run_trial(Trial(fault=None, config=config, seed=0), tmp_path / "t.arrow").traces
    segments = cut(trace, tmp_path / "s.arrow", seed=0, least=12, most=20)
    ((summary, _),) = replay_both([segments[number]], tmp_path / "reports", "interpreter")
    assert summary.verified > 300
    assert not summary.violations


def test_bent_trace(tmp_path: Path) -> None:
    header, events = read_raw(DATA / "versions" / "transformers_5.23.0.arrow")
    bent = bend(events, header, np.random.default_rng(3))
    trace = write_raw(tmp_path / "t.arrow", header, bent[:24], flush_every=5)
    ((summary, _),) = replay_both([trace], tmp_path / "reports", "interpreter")
    assert summary.num_gaps or summary.violations or summary.num_losses
