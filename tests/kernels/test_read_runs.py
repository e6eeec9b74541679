"""Runs of cells, read from tables: odd sizes, strides, cells that do not exist."""

import numpy as np
import pytest
from kvcanary.kernels.capture.changes import read_runs

BACKENDS = ("reference", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("seed", range(6))
def test_runs_of_cells_are_those_of_the_table(backend: str, dtype: type, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(-9, 9, (7, 22)).astype(dtype)[:, :: 1 + seed % 2]
    num = int(rng.integers(0, 12))
    rows, starts, counts = rng.integers(-2, 9, num), rng.integers(-30, 30, num), rng.integers(-3, 40, num)
    out = np.full(int(np.maximum(counts, 0).sum()), 77, np.int64)
    read_runs(table=table, rows=rows, starts=starts, counts=counts, out=out, backend=backend)
    height, width = table.shape
    expected = [
        int(table[row, column]) if 0 <= row < height and 0 <= column < width else -1
        for row, start, count in zip(rows, starts, counts, strict=True)
        for column in range(start, start + count)
    ]
    assert out.tolist() == expected


def test_cells_that_do_not_fit_are_refused() -> None:
    ints = np.ones(2, np.int64)
    table = np.zeros((3, 3), np.int32)
    with pytest.raises(ValueError, match="out has length 3, expected sum\\(counts\\), 2"):
        read_runs(table=table, rows=ints, starts=ints, counts=ints, out=np.empty(3, np.int64))
    with pytest.raises(ValueError, match="dtype uint8, expected int32 or int64"):
        read_runs(table=table.astype(np.uint8), rows=ints, starts=ints, counts=ints, out=np.empty(2, np.int64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_at_the_ends_of_int64_lie_outside(backend: str) -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    rows, starts = np.array([1, 1, low, high, 1], np.int64), np.array([low, high, 0, 0, 2], np.int64)
    out = np.full(15, 77, np.int64)
    read_runs(table=table, rows=rows, starts=starts, counts=np.full(5, 3), out=out, backend=backend)
    assert out.tolist() == [-1] * 12 + [6, 7, -1]
