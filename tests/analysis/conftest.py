"""Traces for the analysis tests: recorded once by the simulated engine, replayed once."""

import functools
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


@pytest.fixture(scope="session")
def replayed(tmp_path_factory):
    """A folder with a trace of data/ and the report on it, made once."""

    @functools.cache
    def make(name: str) -> Path:
        made = tmp_path_factory.mktemp("replayed")
        trace = shutil.copy(DATA / f"{name}.arrow", made)
        (made / f"{name}.report").mkdir()
        replay(trace, settings=ReplaySettings(), report=made / f"{name}.report")
        return made

    return make


@pytest.fixture
def report(tmp_path, replayed):
    """Makes a report of a trace in data/, both in a folder of the test's own, as if it had been replayed there."""

    def make(name: str) -> Path:
        made, folder = replayed(name), tmp_path / f"{name}.report"
        shutil.copytree(made, tmp_path, copy_function=shutil.copy, dirs_exist_ok=True)
        summary = folder / "summary.json"
        summary.write_text(summary.read_text().replace(str(made), str(tmp_path)))
        return folder

    return make
