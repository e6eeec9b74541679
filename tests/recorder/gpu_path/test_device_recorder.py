"""What the device finds of a forward is what the host's recorder finds, event by event."""

import numpy as np
import pytest
import torch
import triton.language as tl
from kvcanary.kernels.capture import frame_kv
from kvcanary.kernels.capture.layers import SATURATED

from .two_recorders import LAYOUTS, WIDTH, Engine, random_forward, rows_of

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all


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


TYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype,axes", list(zip(TYPES, [*LAYOUTS, "slot head dim"], strict=True)))
@pytest.mark.one_in(3)
def test_all_layers_are_sampled_and_searched_alike(dtype, axes, tmp_path, monkeypatch):
    if dtype.itemsize == 1:  # a row of four pieces is read in two turns
        monkeypatch.setattr(frame_kv, "ROW_TILE", tl.constexpr(2))
    rng = np.random.default_rng([*map(ord, axes), TYPES.index(dtype)])
    engine = Engine(tmp_path, rng, swa=axes.startswith("block"), sampled=(axes, dtype))
    for _ in range(12):
        random_forward(engine, rng)
    host, device = engine.close()
    assert len(host) == len(device) == 12
    for told, found in zip(host, device, strict=True):
        assert found == told
    kinds = {value[2] for event in host for value in event["values"]}
    assert kinds and (SATURATED in kinds) == (dtype.itemsize == 1)


@pytest.mark.parametrize("axes", LAYOUTS)
def test_a_byte_that_changes_in_any_layer_is_found_where_it_is_looked_at(axes, tmp_path):
    engine = Engine(tmp_path, np.random.default_rng(5), sampled=(axes, torch.bfloat16))
    slots = list(range(7, 7 + WIDTH // 2))
    engine.table[1, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    places = list(range(len(slots)))

    def read(row=1, *, during=lambda: None):
        engine.forward("decode", [row], [len(slots)], [1], [150], [3], [len(slots)], during=during)

    engine.forward("extend", [1], [0], [len(slots)], slots, places, places)
    read()
    for layer in engine.layers[0, 0]:
        for slot in slots:
            rows_of(layer, slot).view(torch.uint8)[:] ^= 1
    read()
    # What is copied is known, but not where it is looked at there.
    engine.table[2, : len(slots)] = torch.tensor([slot + 40 for slot in slots], dtype=torch.int32)
    for pools in (*engine.layers.values(), *([pool] for pool in engine.pools.values())):
        for pool in pools:
            for slot in slots:
                take = (
                    (lambda number, rows=pool: rows[number])
                    if pool.dim() == 2
                    else (lambda n, rows=pool: rows_of(rows, n))
                )
                take(slot + 40).copy_(take(slot).clone())
    for recorder in (engine.host, engine.device):
        recorder.kv_copy(group=0, src=[slots[0]], dst=[slots[0] + 40], count=[len(slots)])
    read(2)
    for pool in engine.pools.values():
        pool[slots[3] + 40] ^= 1
    read(2)
    host, device = engine.close()
    assert host == device
    found = [event["kv_changes"] for event in host if event["kind"] == "forward"]
    assert [(stream, slot) for stream, slot, *_ in found[2]] == [(2, slot) for slot in slots]
    assert [len(changes) for changes in found] == [0, 0, len(slots), 0, 2]
