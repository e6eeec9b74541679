"""What the device finds of a forward is what the host's recorder finds, event by event."""

import numpy as np
import pytest
import torch

from .two_recorders import BYTES, ROWS, SLOTS, SWA_SLOTS, WIDTH, Engine


def random_forward(engine, rng):
    """One forward of a careless engine: any rows, lengths, slots and tokens; tables and bytes change at random."""
    for _ in range(int(rng.integers(0, 4))):
        row, start = int(rng.integers(0, ROWS)), int(rng.integers(0, WIDTH))
        count = int(rng.integers(1, 12))
        cells = engine.table[row, start : start + count]
        cells.copy_(torch.from_numpy(rng.integers(-2, SLOTS + 3, len(cells), dtype=np.int32)))
    for lut in engine.luts:
        start = int(rng.integers(0, SLOTS))
        cells = lut[start : start + int(rng.integers(0, 9))]
        cells.copy_(torch.from_numpy(rng.integers(-1, SWA_SLOTS + 2, len(cells))).to(lut.dtype))
    for pool in engine.pools.values():
        if rng.random() < 0.3:
            pool[int(rng.integers(0, len(pool))), int(rng.integers(0, BYTES))] ^= 0x40
    mode = str(rng.choice(["decode", "extend", "draft_extend", "target_verify"]))
    bs = int(rng.integers(0, 5))
    rows = rng.permutation(ROWS + 1)[:bs].tolist()  # row 0 is padding, one row is beyond the table
    rows = sorted((min(row, ROWS + 3) for row in rows), key=lambda row: row == 0)  # padding comes last
    prefix = rng.integers(0, WIDTH + 4, bs).tolist()
    extend = [1] * bs if mode == "decode" else rng.integers(0, 9, bs).tolist()
    tokens = sum(e for row, e in zip(rows, extend, strict=True) if row) + int(rng.integers(0, 3))
    known = max(tokens - int(rng.integers(0, 2)), 0)
    loc = rng.integers(-1, SLOTS + 2, known)
    for row in rows:
        if row in engine.truth:
            engine.truth[row].all += rng.integers(1, 99, int(rng.integers(0, 5))).tolist()
        else:
            engine.truth[row] = type(engine.truth[0])([])

    def during():
        """What the model writes, and what else happens while it runs."""
        for (group, _), pool in engine.pools.items():
            slots = loc if not group else [int(engine.luts[0][s]) if 0 <= s < SLOTS else -1 for s in loc]
            for slot in slots:
                if 0 <= slot < len(pool):
                    pool[slot] = torch.from_numpy(rng.integers(0, 256, BYTES, dtype=np.uint8))
            if rng.random() < 0.5:
                pool[int(rng.integers(0, len(pool))), int(rng.integers(0, BYTES))] ^= 0x08

    ids, positions = rng.integers(0, 99, tokens).tolist(), rng.integers(0, WIDTH, tokens).tolist()
    engine.forward(mode, rows, prefix, extend, loc.tolist(), ids, positions, during=during)


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
