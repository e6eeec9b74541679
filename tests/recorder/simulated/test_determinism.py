"""The same configuration and seed give the same events; another seed gives others."""

import pytest
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS

SHAPES = {
    "paged": {"page_size": 4, "mixed": True},
    "eagle": {"page_size": 2, "eagle": True, "host_pages": 40},
    "swa": {"shape": "swa", "page_size": 1, "num_pages": 600, "window": 16, "sampler": "content"},
}


def record(path, seed, changes):
    config = EngineConfig(**{"seed": seed, "num_pages": 250, **changes})
    workload = RandomWorkload(
        requests=15, seed=seed, prompt_tokens=60, output_tokens=15, max_tokens=200, fork_rate=0.3, abort_rate=0.2
    )
    with SimulatedEngine(config, workload, path) as engine:
        engine.run()
    return [
        {name: view.scalar(name) for name in SCALARS if name != "time_ns"}
        | {name: view.ints(name).tolist() for name in INT_LISTS}
        | {name: view.bytes(name).tobytes() for name in BYTE_LISTS}
        for view in read_trace(path)
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_same_seed_same_events(shape, tmp_path):
    first = record(tmp_path / "first.arrow", 5, SHAPES[shape])
    assert len(first) > 50
    assert record(tmp_path / "second.arrow", 5, SHAPES[shape]) == first
    assert record(tmp_path / "third.arrow", 6, SHAPES[shape]) != first


def test_noise_changes_bytes_and_nothing_else(tmp_path):
    noisy = record(tmp_path / "noisy.arrow", 3, {"noise": True})
    quiet = record(tmp_path / "quiet.arrow", 3, {"noise": False})
    assert [e["kv_bytes"] for e in noisy] != [e["kv_bytes"] for e in quiet]
    for event in noisy + quiet:
        event["kv_bytes"] = b""
    assert noisy == quiet
