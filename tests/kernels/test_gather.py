"""gather_kv against numpy indexing: odd sizes, strides, pages, slots that do not exist."""

import numpy as np
import pytest
from kvcanary.kernels.capture.gather import gather_kv, read_runs
from kvcanary.kernels.ops.hash.kv_source import KvSource

BACKENDS = ("reference", "cpu")


def _source(*, rows: int, page_size: int, bytes_per_token: int, offset: int = 0) -> KvSource:
    width = page_size * bytes_per_token + 2 * offset
    whole = np.random.default_rng(rows).integers(0, 256, (rows, width), np.uint8)
    tensor = whole[:, offset : width - offset] if offset else whole
    return KvSource(tensor=tensor, page_size=page_size, bytes_per_token=bytes_per_token, read_bytes=16)


def _expected(source: KvSource, slots: np.ndarray, capture: int) -> np.ndarray:
    tokens = source.tensor.reshape(-1, source.bytes_per_token)
    out = np.zeros((slots.size, capture), np.uint8)
    for i, slot in enumerate(slots):
        if 0 <= slot < len(tokens):
            out[i] = tokens[slot, :capture]
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [0, 1, 7, 300])
@pytest.mark.parametrize("page_size", [1, 3, 8])
@pytest.mark.parametrize("capture", [16, 48])
def test_bytes_are_those_of_the_slots(backend: str, count: int, page_size: int, capture: int) -> None:
    source = _source(rows=11, page_size=page_size, bytes_per_token=48, offset=16)
    slots = np.random.default_rng(count).integers(-5, source.num_slots + 5, count)
    out = np.full((count, capture), 0xA5, np.uint8)
    gather_kv(source=source, slots=slots, out=out, backend=backend)
    np.testing.assert_array_equal(out, _expected(source, slots, capture))


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_slots_give_zeros(backend: str) -> None:
    source = _source(rows=4, page_size=2, bytes_per_token=16)
    slots = np.array([-1, np.iinfo(np.int64).min, np.iinfo(np.int64).max, source.num_slots], np.int64)
    out = np.full((4, 16), 0xA5, np.uint8)
    gather_kv(source=source, slots=slots, out=out, backend=backend)
    assert not out.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_slots_and_output(backend: str) -> None:
    source = _source(rows=9, page_size=4, bytes_per_token=32)
    slots = np.arange(0, 72, dtype=np.int64)[::3]
    out = np.full((48, 16), 0xA5, np.uint8)[::2]
    gather_kv(source=source, slots=slots, out=out, backend=backend)
    np.testing.assert_array_equal(out, _expected(source, slots, 16))


@pytest.mark.parametrize("shape", [(3, 16), (2, 64), (2,)])
def test_an_output_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    source = _source(rows=4, page_size=1, bytes_per_token=32)
    with pytest.raises(ValueError, match="one row per slot"):
        gather_kv(source=source, slots=np.zeros(2, np.int64), out=np.zeros(shape, np.uint8))


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
