"""Traces for the analysis tests: recorded once by the simulated engine, replayed once."""

import shutil
from pathlib import Path

import pytest
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.pd_pair import PairSettings, PdPair
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.places import DATA
from .recorded import CONFIGS, WORKLOAD


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Each configuration's trace, and the engine as it stood at the end."""
    folder = tmp_path_factory.mktemp("traces")
    made = {}
    for name, changes in CONFIGS.items():
        with SimulatedEngine(EngineConfig(**changes), WORKLOAD, folder / f"{name}.arrow") as engine:
            engine.run()
        made[name] = (folder / f"{name}.arrow", engine)
    return made


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A prefill and a decode trace; some transfers fail."""
    folder = tmp_path_factory.mktemp("pair")
    config = EngineConfig(page_size=4, num_pages=150)
    with PdPair(config, WORKLOAD, folder, settings=PairSettings(failure_rate=0.2)) as both:
        both.run()
    return folder / "prefill.arrow", folder / "decode.arrow"


@pytest.fixture
def report(tmp_path):
    """Makes a report of a trace in data/, both copied to a folder of the test's own."""

    def make(name: str) -> Path:
        trace = tmp_path / f"{name}.arrow"
        shutil.copy(DATA / trace.name, trace)
        folder = tmp_path / f"{name}.report"
        folder.mkdir()
        replay(trace, settings=ReplaySettings(), report=folder)
        return folder

    return make
