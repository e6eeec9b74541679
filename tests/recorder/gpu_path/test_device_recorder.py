"""What the device finds of a forward is what the host's recorder finds, event by event."""

import numpy as np
import pytest
import torch

from .two_recorders import Engine, random_forward


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        more = max(1, metafunc.config.getoption("--conformance-cases") // 500)
        metafunc.parametrize("seed", range(6 * more))


def test_the_same_events(seed, tmp_path):
    rng = np.random.default_rng(seed)
    engine = Engine(
        tmp_path,
        rng,
        swa=bool(seed % 2),
        int_type=(torch.int64, torch.int32)[seed // 2 % 2],
        lut_type=(torch.int64, torch.int32)[seed // 3 % 2],
        watch_every=(1, 2, 0)[seed % 3],
    )
    for _ in range(10):
        random_forward(engine, rng)
    host, device = engine.close()
    assert len(host) == len(device) == 10
    for told, found in zip(host, device, strict=True):
        assert found == told
