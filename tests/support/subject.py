"""The engine that is recorded while something fails, and what every failure is asked."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.replay import ReplaySettings, replay

Outputs = dict[int, list[int]]
OnStep = Callable[[int, SimulatedEngine], None]


class SilentError(Exception):
    """It cannot even say what it is: a KeyError of a tensor whose device has failed."""

    def __str__(self) -> str:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _nothing(_step: int, _engine: SimulatedEngine) -> None: ...


def make_engine(path: Path, **options: Any) -> SimulatedEngine:
    """Return an engine whose tokens depend on what its KV cache holds, so that any interference shows in its output."""
    config = EngineConfig(sampler="content", noise=False, page_size=4, num_pages=120, chunk_tokens=64)
    workload = RandomWorkload(requests=24, prompt_tokens=60, output_tokens=24, max_tokens=200, arrival_rate=400.0)
    return SimulatedEngine(config, workload, path, **options)


def serve(engine: SimulatedEngine, on_step: OnStep = _nothing) -> Outputs:
    """Run the engine to its end; return each request's tokens."""
    seen: dict[int, Any] = {}
    steps = 0

    def look(engine: SimulatedEngine) -> None:
        nonlocal steps
        seen.update((id(request), request) for request in engine.scheduler.active)
        on_step(steps, engine)
        steps += 1

    engine.run(look)
    return {request.request_id: request.tokens[: request.num_tokens].tolist() for request in seen.values()}


def unrecorded(folder: Path) -> Outputs:
    """Return what the engine generates when nothing is recorded at all."""
    engine = make_engine(folder / "unrecorded.arrow")
    engine.recorder._off = "not recording"
    outputs = serve(engine)
    assert engine.recorder.stats().events == 0
    engine.close()
    assert len(outputs) == 24
    return outputs


def judged(path: Path) -> Summary:
    return replay(path, settings=ReplaySettings(), report=None)


def assert_inconclusive(path: Path) -> Summary:
    """What is there is judged, nothing is held against the engine, and it is not called clean."""
    summary = judged(path)
    assert summary.verdict.value == "inconclusive"
    assert (summary.violations, summary.findings) == (0, 0)
    return summary


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.ERROR]
