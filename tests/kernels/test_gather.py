"""gather_kv against numpy indexing: odd sizes, strides, pages, slots that do not exist."""

import numpy as np
import pytest
from kvcanary.kernels.gather import gather_kv
from kvcanary.kernels.kv_source import KvSource

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
