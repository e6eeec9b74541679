"""Zeros for tables that are mostly empty: zeros they are, on small pages, and no room is a MemoryError."""

import mmap
from pathlib import Path

import numpy as np
import pytest
from kvcanary.kernels.sparse import sparse_zeros


@pytest.mark.parametrize("shape", [(0, 7), (3, 5), (129, 40_000)])
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_zeros(shape: tuple[int, int], dtype: type) -> None:
    table = sparse_zeros(shape, dtype)
    assert table.shape == shape and table.dtype == dtype
    assert table.flags.c_contiguous and table.flags.writeable and table.flags.aligned
    assert not table.any()
    table.fill(3)
    assert int(table.sum()) == 3 * table.size


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="no huge pages here")
def test_a_large_table_has_small_pages() -> None:
    table = sparse_zeros((64, 1 << 20), np.uint8)
    table[:, 0] = 1
    address, inside, told = table.ctypes.data, False, {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside:
            told[first] = line.split()[1:]
    assert "nh" in told["VmFlags:"]
    assert int(told["Rss:"][0]) <= 64 * mmap.PAGESIZE // 1024 * 2


@pytest.mark.parametrize("shape", [(1 << 30, 1 << 24), (1 << 40, 1 << 40)])
def test_no_room(shape: tuple[int, int]) -> None:
    with pytest.raises(MemoryError):
        sparse_zeros(shape, np.int32)
