"""The change ops against plain Python over dictionaries, on hostile rows, positions and slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.kernels.capture.changes import NO_RUNS, RowRuns, cell_changes, cells_to_runs, joined, kv_same, row_changes
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.kernels.replay_pass.entries import Runs
from kvcanary.kernels.replay_pass.state import apply_runs_loops

from ..support.loops import run

BACKENDS = ("reference", "cpu")


def _case(seed: int, bs: int) -> RowRuns:
    rng = np.random.default_rng(seed)
    counts = rng.integers(-2, 9, bs)
    values = rng.integers(0, 4, int(np.maximum(counts, 0).sum()))
    return RowRuns(rng.integers(-2, 8, bs), rng.integers(-4, 14, bs), counts, values)


def _cells(case: RowRuns, shape: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """List what lies inside the table: request, row, position, value."""
    found = []
    offset = 0
    for r, (row, start, count) in enumerate(zip(case.rows, case.starts, case.counts, strict=True)):
        for i in range(max(int(count), 0)):
            position = int(start) + i
            if 0 < row < shape[0] and 0 <= position < shape[1]:
                found.append((r, int(row), position, int(case.values[offset + i])))
        offset += max(int(count), 0)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bs", [0, 1, 3, 17])
@pytest.mark.parametrize("seed", range(6))
def test_row_changes_list_every_difference_once(backend: str, bs: int, seed: int) -> None:
    case = _case(100 * seed + bs, bs)
    shadow = np.random.default_rng(seed).integers(0, 4, (6, 12)).astype(np.int32)
    before = shadow.copy()
    got = row_changes(case, shadow, backend=backend)
    np.testing.assert_array_equal(shadow, before)
    told = []
    at = 0
    for row, start, count in zip(got.rows, got.starts, got.counts, strict=True):
        assert count > 0
        told += [(int(row), int(start) + i, int(got.values[at + i])) for i in range(count)]
        at += count
    assert at == got.values.size
    assert told == [(row, p, v) for _, row, p, v in _cells(case, shadow.shape) if before[row, p] != v]
    assert all(part.dtype == np.int64 for part in got)


def test_neighbouring_differences_are_one_run() -> None:
    shadow = np.array([[0] * 6, [5, 1, 2, 5, 3, 5]], np.int32)
    one = np.ones(1, np.int64)
    got = row_changes(RowRuns(one, 0 * one, 6 * one, np.full(6, 5, np.int64)), shadow)
    assert got.starts.tolist() == [1, 4]
    assert got.counts.tolist() == [2, 1]


@given(st.integers(0, 10_000), st.integers(0, 12))
def test_after_writing_the_changes_there_are_none(seed: int, bs: int) -> None:
    case = _case(seed, bs)
    case = case._replace(rows=np.arange(1, bs + 1))  # one request a row: no two claims on a cell
    shadow = np.zeros((bs + 2, 12), np.int32)
    for _ in range(2):
        got = row_changes(case, shadow)
        outside, runs = (
            np.ones(1, np.int64),
            Runs(np.zeros_like(got.rows), got.rows, got.starts, got.counts, got.values),
        )
        run(apply_runs_loops, index=0, runs=runs, table=shadow, outside=outside)
        assert outside == 0
    assert (got.rows.size, got.values.size) == (0, 0)


def test_counts_beyond_the_values_are_refused() -> None:
    case = RowRuns(np.ones(2, np.int64), np.zeros(2, np.int64), np.array([3, 2]), np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="counts ask for 5 values, there are 4"):
        row_changes(case, np.zeros((3, 8), np.int32))


def test_cells_of_two_rows_are_runs_of_each() -> None:
    rows, positions = np.array([1, 1, 1, 2, 2, 7]), np.array([3, 4, 6, 7, 8, 9])
    got = cells_to_runs(rows, positions, np.arange(6))
    assert [part.tolist() for part in got] == [[1, 1, 2, 7], [3, 6, 7, 9], [2, 1, 2, 1], [0, 1, 2, 3, 4, 5]]
    assert [part.size for part in cells_to_runs(rows[:0], rows[:0], rows[:0])] == [0] * 4
    assert [part.tolist() for part in joined([got, NO_RUNS, got])] == [2 * part.tolist() for part in got]
    assert [part.dtype for part in joined([])] == [np.int64] * 4


def test_a_part_of_runs_is_their_values_there() -> None:
    runs = RowRuns(np.array([1, 2, 3]), np.array([5, 0, 7]), np.array([3, -2, 2]), np.array([50, 60, 70, 71, 81]))
    got = runs.part(np.array([6, 9, 7]), np.array([2, -1, 1]))
    assert (got.counts.tolist(), got.values.tolist()) == ([2, 0, 1], [60, 70, 71])


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
    whole = KvSource(tensor=np.zeros((6, 32), np.uint8), page_size=1, bytes_per_token=32, read_bytes=16)
    same = {"source": whole, "slots": np.arange(6, dtype=np.int64), "known": np.ones(6, np.uint8), "backend": backend}
    assert kv_same(shadow=np.zeros((6, 16), np.uint8), **same)
    assert not kv_same(shadow=np.zeros(6 * 16 + 1, np.uint8)[1:].reshape(6, 16), **same)
    assert not kv_same(shadow=np.zeros((6, 8), np.uint8), **same)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_kv_same_looks_at_every_slot_of_rows_with_gaps(backend: str, page_size: int) -> None:
    tensor = np.random.default_rng(7).integers(0, 256, (6, page_size * 32 + 48), np.uint8)
    source = KvSource(tensor=tensor, page_size=page_size, bytes_per_token=32, read_bytes=16)
    tokens = tensor[:, : page_size * 32].reshape(-1, 32)
    known, slots = np.ones(len(tokens), np.uint8), np.arange(len(tokens) + 3, dtype=np.int64)
    for slot in range(len(tokens)):
        shadow = tokens[:, :16].copy()
        same = {"source": source, "slots": slots, "shadow": shadow, "known": known, "backend": backend}
        assert kv_same(**same)
        shadow[slot, 15] ^= 1
        assert kv_same(**same) == (slot == 0), slot


@pytest.mark.parametrize("backend", BACKENDS)
def test_cell_changes_are_the_cells_that_differ_once_each(backend: str) -> None:
    cells = np.array([5, 4, 19, 18, -1, 3, 5, np.iinfo(np.int64).max, np.iinfo(np.int64).min, 17], np.int64)
    table = np.arange(19)
    table[[3, 5, 18]] = -7
    assert cell_changes(cells, table, np.arange(18), backend=backend).tolist() == [3, 5]
    assert cell_changes(cells, table[:5], np.arange(18), backend=backend).tolist() == [3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_changes_at_the_ends_of_int64_lie_outside(backend: str) -> None:
    shadow = np.zeros((3, 4), np.int32)
    starts = np.array([np.iinfo(np.int64).max - 1, np.iinfo(np.int64).min, 1], np.int64)
    got = row_changes(RowRuns(np.ones(3, np.int64), starts, np.full(3, 2), np.arange(6)), shadow, backend=backend)
    assert [part.tolist() for part in got] == [[1], [1], [2], [4, 5]]
