"""The change ops against plain Python over dictionaries, on hostile rows, positions and slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.kernels.capture.changes import (
    RowRuns,
    cell_changes,
    kv_changes,
    kv_same,
    new_slots,
    row_changes,
)
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.kernels.replay_pass.state import apply_runs

BACKENDS = ("reference", "cpu")
POISON = -77


def _poisoned_runs(capacity: int) -> RowRuns:
    return RowRuns(**{name: np.full(capacity, POISON, np.int64) for name in ("rows", "starts", "counts", "values")})


def _case(seed: int, bs: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(-2, 9, bs)
    return {
        "rows": rng.integers(-2, 8, bs),
        "starts": rng.integers(-4, 14, bs),
        "counts": counts,
        "values": rng.integers(0, 4, int(np.maximum(counts, 0).sum())),
    }


def _cells(case: dict[str, np.ndarray], shape: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """List what lies inside the table: request, row, position, value."""
    found = []
    offset = 0
    for r, (row, start, count) in enumerate(zip(case["rows"], case["starts"], case["counts"], strict=True)):
        for i in range(max(int(count), 0)):
            position = int(start) + i
            if 0 < row < shape[0] and 0 <= position < shape[1]:
                found.append((r, int(row), position, int(case["values"][offset + i])))
        offset += max(int(count), 0)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bs", [0, 1, 3, 17])
@pytest.mark.parametrize("seed", range(6))
def test_row_changes_list_every_difference_once(backend: str, bs: int, seed: int) -> None:
    case = _case(100 * seed + bs, bs)
    shadow = np.random.default_rng(seed).integers(0, 4, (6, 12)).astype(np.int32)
    before = shadow.copy()
    runs, sizes = _poisoned_runs(case["values"].size), np.full(2, POISON, np.int64)
    row_changes(**case, shadow=shadow, runs=runs, sizes=sizes, backend=backend)
    np.testing.assert_array_equal(shadow, before)
    got = runs.cut(int(sizes[0]), int(sizes[1]))
    told = []
    at = 0
    for row, start, count in zip(got.rows, got.starts, got.counts, strict=True):
        assert count > 0
        told += [(int(row), int(start) + i, int(got.values[at + i])) for i in range(count)]
        at += count
    assert at == got.values.size
    assert told == [(row, p, v) for _, row, p, v in _cells(case, shadow.shape) if before[row, p] != v]
    assert (runs.values[sizes[1] :] == POISON).all()


def test_neighbouring_differences_are_one_run() -> None:
    shadow = np.array([[0] * 6, [5, 1, 2, 5, 3, 5]], np.int32)
    runs, sizes = _poisoned_runs(6), np.zeros(2, np.int64)
    one = np.ones(1, np.int64)
    row_changes(
        rows=one, starts=0 * one, counts=6 * one, values=np.full(6, 5, np.int64), shadow=shadow, runs=runs, sizes=sizes
    )
    got = runs.cut(int(sizes[0]), int(sizes[1]))
    assert got.starts.tolist() == [1, 4]
    assert got.counts.tolist() == [2, 1]


@given(st.integers(0, 10_000), st.integers(0, 12))
def test_after_writing_the_changes_there_are_none(seed: int, bs: int) -> None:
    case = _case(seed, bs)
    case["rows"] = np.arange(1, bs + 1)  # one request a row: no two claims on a cell
    shadow = np.zeros((bs + 2, 12), np.int32)
    for _ in range(2):
        runs, sizes = RowRuns.allocate(case["values"].size), np.zeros(2, np.int64)
        row_changes(**case, shadow=shadow, runs=runs, sizes=sizes)
        got = runs.cut(int(sizes[0]), int(sizes[1]))
        outside = apply_runs(
            index=0,
            indices=np.zeros_like(got.rows),
            rows=got.rows,
            starts=got.starts,
            counts=got.counts,
            values=got.values,
            table=shadow,
        )
        assert outside == 0
    assert sizes.tolist() == [0, 0]


def test_counts_beyond_the_values_are_refused() -> None:
    case = {"rows": np.ones(2, np.int64), "starts": np.zeros(2, np.int64), "counts": np.array([3, 2])}
    with pytest.raises(ValueError, match="counts ask for 5 values, there are 4"):
        row_changes(
            **case,
            values=np.zeros(4, np.int64),
            shadow=np.zeros((3, 8), np.int32),
            runs=RowRuns.allocate(5),
            sizes=np.zeros(2, np.int64),
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_slots_lists_each_slot_once(backend: str) -> None:
    slots = np.array([3, 0, 5, 3, -1, 9, 10, 5, 1 << 62], np.int64)
    stamps = np.zeros(10, np.int64)
    out, size = np.full(slots.size, POISON, np.int64), np.full(1, POISON, np.int64)
    new_slots(slots=slots, stamps=stamps, stamp=4, out=out, size=size, backend=backend)
    assert out[: size[0]].tolist() == [3, 5, 9]
    new_slots(slots=np.array([9, 8], np.int64), stamps=stamps, stamp=4, out=out, size=size, backend=backend)
    assert out[: size[0]].tolist() == [8]
    new_slots(slots=np.array([9, 8], np.int64), stamps=stamps, stamp=5, out=out, size=size, backend=backend)
    assert out[: size[0]].tolist() == [9, 8]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_kv_changes_finds_changed_known_slots(backend: str, page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    tensor = rng.integers(0, 256, (24 // page_size, page_size * 32), np.uint8)
    source = KvSource(tensor=tensor, page_size=page_size, bytes_per_token=32, read_bytes=16)
    shadow = np.zeros((30, 16), np.uint8)
    shadow[:24] = tensor.reshape(24, 32)[:, :16]
    known = np.ones(30, np.uint8)
    known[11] = 0
    tokens = tensor.reshape(24, 32)
    for slot, byte in ((5, 0), (7, 15), (9, 16), (11, 0), (13, 3)):
        tokens[slot, byte] ^= 0xFF
    slots = np.array([13, 1, 5, 7, 9, 11, 29], np.int64)
    out_slots, size = np.full(7, POISON, np.int64), np.full(1, POISON, np.int64)
    out_bytes = np.full((7, 16), 0xA5, np.uint8)
    before = shadow.copy()
    kv_changes(
        source=source,
        slots=slots,
        shadow=shadow,
        known=known,
        out_slots=out_slots,
        out_bytes=out_bytes,
        size=size,
        backend=backend,
    )
    assert out_slots[: size[0]].tolist() == [13, 5, 7]  # byte 16 is not captured, 11 not known, 29 beyond the pool
    np.testing.assert_array_equal(out_bytes[:3], tokens[[13, 5, 7], :16])
    np.testing.assert_array_equal(shadow, before)
    assert (out_bytes[3:] == 0xA5).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("capture", [16, 32])
def test_kv_same_says_no_exactly_where_something_changed(backend: str, page_size: int, capture: int) -> None:
    rng = np.random.default_rng(page_size)
    tensor = rng.integers(0, 256, (24 // page_size, page_size * 32), np.uint8)
    source = KvSource(tensor=tensor, page_size=page_size, bytes_per_token=32, read_bytes=16)
    tokens = tensor.reshape(24, 32)
    shadow = np.full((30, capture), 0xA5, np.uint8)
    shadow[:24] = tokens[:, :capture]
    known = np.ones(30, np.uint8)
    known[11] = 0
    tokens[[0, 11]] ^= 0xFF
    slots = np.array([-1, 0, 29, 24, np.iinfo(np.int64).max, 11, 7, 7, 3], np.int64)
    same = {"source": source, "shadow": shadow, "known": known, "backend": backend}
    assert kv_same(slots=slots, **same)
    assert kv_same(slots=slots[:0], **same)
    for slot, byte in ((7, 0), (3, 15), (7, 16), (3, 31)):
        tokens[slot, byte] ^= 1
        assert kv_same(slots=slots, **same) == (byte >= capture), (slot, byte)
        tokens[slot, byte] ^= 1
    known[11] = 1
    assert not kv_same(slots=slots, **same)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kv_same_does_not_say_where_bytes_do_not_lie_as_words(backend: str) -> None:
    padded = np.zeros((6, 48), np.uint8)[:, :32]
    shadow, known = np.zeros((6, 16), np.uint8), np.ones(6, np.uint8)
    source = KvSource(tensor=padded, page_size=1, bytes_per_token=32, read_bytes=16)
    slots = np.arange(6, dtype=np.int64)
    assert not kv_same(source=source, slots=slots, shadow=shadow, known=known, backend=backend)
    whole = KvSource(tensor=padded.copy(), page_size=1, bytes_per_token=32, read_bytes=16)
    assert kv_same(source=whole, slots=slots, shadow=shadow, known=known, backend=backend)
    odd = np.zeros(6 * 16 + 1, np.uint8)[1:].reshape(6, 16)
    assert not kv_same(source=whole, slots=slots, shadow=odd, known=known, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cell_changes_lists_what_differs(backend: str) -> None:
    table, shadow = np.arange(20, dtype=np.int64), np.arange(18, dtype=np.int64)
    table[[3, 5, 19]] = -7
    cells = np.array([5, 4, 19, 18, -1, 3, 5, np.iinfo(np.int64).max, np.iinfo(np.int64).min], np.int64)
    out, size = np.full(9, POISON, np.int64), np.full(1, POISON, np.int64)
    cell_changes(cells=cells, table=table, shadow=shadow, out=out, size=size, backend=backend)
    assert out[: size[0]].tolist() == [5, 3, 5]
    assert (out[3:] == POISON).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_changes_at_the_ends_of_int64_lie_outside(backend: str) -> None:
    shadow = np.zeros((3, 4), np.int32)
    starts = np.array([np.iinfo(np.int64).max - 1, np.iinfo(np.int64).min, 1], np.int64)
    runs, sizes = _poisoned_runs(6), np.full(2, POISON, np.int64)
    row_changes(
        rows=np.ones(3, np.int64),
        starts=starts,
        counts=np.full(3, 2),
        values=np.arange(6),
        shadow=shadow,
        runs=runs,
        sizes=sizes,
        backend=backend,
    )
    assert sizes.tolist() == [1, 2]
    assert (runs.starts[0], runs.counts[0], runs.values[:2].tolist()) == (1, 2, [4, 5])
