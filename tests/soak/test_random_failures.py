"""Random engines under a recorder that fails somewhere, some time: nothing shows in what they generate, all in the verdict."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcanary.recorder.capture import recorder as recorder_module
from kvcanary.recorder.capture.forward_event import StateShadow
from kvcanary.recorder.capture.kv_shadow import GroupKvShadow
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.writing.segments import SingleFile
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.engines.simulated_engines import random_config, random_workload
from ..support.subject import serve

SEEDS = 240

# Where a fault may strike, and with what; all are called over and over while an engine runs.
PLACES = (
    (recorder_module, "copy_forward", RuntimeError),
    (recorder_module, "forward_event", ValueError),
    (StateShadow, "changes", IndexError),
    (StateShadow, "commit", MemoryError),
    (GroupKvShadow, "gather", RuntimeError),
    (TraceWriter, "append", RuntimeError),
    (SingleFile, "write", OSError),
    (SingleFile, "write", MemoryError),
)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_fault_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random = np.random.default_rng([seed, 77])
    config = random_config(seed)

    def engine(name: str) -> SimulatedEngine:
        path = tmp_path / f"{name}.arrow"
        return SimulatedEngine(config, random_workload(seed, config), path, flush_interval_ns=1_000_000)

    silent = engine("silent")
    silent.recorder._off = "not recording"
    expected = serve(silent)
    silent.close()

    owner, name, error = PLACES[int(random.integers(len(PLACES)))]
    strikes_at = int(random.integers(1, 60))
    original, calls = getattr(owner, name), []

    def struck(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == strikes_at:
            raise error(errno.ENOSPC, "injected") if error is OSError else error("injected")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, struck)
        recorded = engine("recorded")
        assert serve(recorded) == expected
        recorded.close()
    summary = replay(tmp_path / "recorded.arrow", settings=ReplaySettings(), report=None)
    assert (summary.violations, summary.findings) == (0, 0)
    if len(calls) >= strikes_at:
        assert "injected" in recorded.recorder.stats().off or summary.doubts, (name, strikes_at)
        assert summary.verdict.value == "inconclusive"
    elif summary.written:
        assert summary.verdict.value == "clean"
