"""The bytes of slots, against plain indexing: odd sizes, strides, pages, slots that do not exist; numpy and torch."""

from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.host_arrays import gather_kv

KINDS = (np.asarray, torch.from_numpy)


def _source(kind: Any, *, rows: int, page_size: int, bytes_per_token: int, gap: int = 0) -> KvSource:
    width = page_size * bytes_per_token
    tensor = kind(np.random.default_rng(rows).integers(0, 256, (rows, width + 2 * gap), np.uint8))
    return KvSource(
        tensor=tensor[:, gap : width + gap], page_size=page_size, bytes_per_token=bytes_per_token, read_bytes=16
    )


def _expected(source: KvSource, slots: np.ndarray, capture: int) -> np.ndarray:
    tokens = np.asarray(source.tensor).reshape(-1, source.bytes_per_token)
    out = np.zeros((slots.size, capture), np.uint8)
    for i, slot in enumerate(slots):
        if 0 <= slot < len(tokens):
            out[i] = tokens[slot, :capture]
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 7, 300])
@pytest.mark.parametrize("page_size", [1, 3, 8])
@pytest.mark.parametrize("capture", [16, 48])
def test_bytes_are_those_of_the_slots(kind: Any, count: int, page_size: int, capture: int) -> None:
    source = _source(kind, rows=11, page_size=page_size, bytes_per_token=48, gap=16)
    slots = np.random.default_rng(count).integers(-5, source.num_slots + 5, count)
    np.testing.assert_array_equal(gather_kv(source, slots, capture), _expected(source, slots, capture))


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_slots_give_zeros(kind: Any) -> None:
    source = _source(kind, rows=4, page_size=2, bytes_per_token=16)
    slots = np.array([-1, np.iinfo(np.int64).min, np.iinfo(np.int64).max, source.num_slots], np.int64)
    assert not gather_kv(source, slots, 16).any()


@pytest.mark.parametrize("kind", KINDS)
def test_slots_that_do_not_lie_one_after_another(kind: Any) -> None:
    source = _source(kind, rows=9, page_size=4, bytes_per_token=32)
    slots = np.arange(0, 72, dtype=np.int64)[::3]
    np.testing.assert_array_equal(gather_kv(source, slots, 16), _expected(source, slots, 16))
