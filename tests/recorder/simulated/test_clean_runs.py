"""A clean engine is judged clean, whatever its shape, its schedule and what interferes with it."""

from dataclasses import asdict

import pytest
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine

from ...support.engines.simulated_engines import (
    Interference,
    assert_clean,
    assert_clean_pair,
    look_at_books,
    random_config,
    random_pair,
    random_workload,
)

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

# A smoke run, which is the most that `make test` can wait for, and what `make fuzz` does, which asks for 5,000 cases.
RUNS = {"run_seed": (5, 160), "pair_seed": (2, 60)}
FUZZ_CASES = 5000


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, (few, many) in RUNS.items():
        if name in metafunc.fixturenames:
            cases = metafunc.config.getoption("--conformance-cases")
            metafunc.parametrize(name, range(max(few, many * cases // FUZZ_CASES if cases > 500 else 0)))


@pytest.mark.one_in(4)
def test_clean_whatever_the_schedule(run_seed, tmp_path):
    config = random_config(run_seed)
    path = tmp_path / "trace.arrow"
    with SimulatedEngine(config, random_workload(run_seed, config), path) as engine:
        # Interference evicts and retracts where the engine itself would not come to it; every third run goes without.
        engine.run(Interference(run_seed, rate=0.1 if run_seed % 3 else 0.0))
    counters = engine.counters
    assert counters.finished + counters.aborted == counters.requests
    # Nothing is held but by the prefix cache, and all of that may go.
    memory = engine.memory
    memory.cache.make_room(config.num_pages)
    assert memory.allocator.free_pages == config.num_pages
    if memory.swa is not None:
        assert memory.swa.pages.free_pages == config.swa_pages
        assert not memory.lut.any()
    assert_clean(path, engine)


def test_clean_pair_whatever_the_schedule(pair_seed, tmp_path):
    with random_pair(pair_seed, tmp_path, requests=12) as pair:
        steps = 0
        while pair.step():
            steps += 1
            if steps % 5 == 0:
                look_at_books(pair.prefill)
                look_at_books(pair.decode)
    assert not pair.rooms
    for engine in (pair.prefill, pair.decode):
        assert engine.counters.finished + engine.counters.aborted == engine.counters.requests
        engine.memory.cache.make_room(engine.config.num_pages)
        assert engine.memory.allocator.free_pages == engine.config.num_pages
        assert not engine.memory.lut.any()
    assert_clean_pair(pair)


@pytest.mark.long
def test_together_they_exercise_everything(tmp_path):
    """What runs as those above prove is worth what happens in them; these few have all of it."""
    total: dict[str, int] = {}
    for seed in (20, 26, 28, 30):
        config = random_config(seed)
        path = tmp_path / "trace.arrow"
        with SimulatedEngine(config, random_workload(seed, config), path, kv_watch_every=0, overwrite=True) as engine:
            engine.run()
        add(total, engine)
    with random_pair(0, tmp_path / "pair") as pair:
        pair.run()
    add(total, pair.prefill)
    add(total, pair.decode)
    missing = [name for name, count in total.items() if count < 5]
    assert not missing, total


def add(total: dict[str, int], engine: SimulatedEngine) -> None:
    for name, count in asdict(engine.counters).items():
        total[name] = total.get(name, 0) + count
