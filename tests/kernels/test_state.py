"""Applying recorded changes: whatever lengths, rows and positions a file claims, nothing outside the array is touched."""

import numpy as np
import pytest
from kvcanary.kernels.constants import SLOT_OUT_OF_RANGE
from kvcanary.kernels.replay_pass.entries import Runs
from kvcanary.kernels.replay_pass.state import (
    apply_forward_loops,
    apply_runs_loops,
    mark_writer_loops,
    read_cells_loops,
    store_bytes_loops,
    translate_loops,
)

from ..support.loops import run

BACKENDS = ("reference", "cpu")
HUGE = 1 << 62
MIN, MAX = -(1 << 63), (1 << 63) - 1


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_writes_each_request_behind_its_prefix(backend: str) -> None:
    table = np.full((4, 6), 9, np.int32)
    run(
        apply_forward_loops, rows=ints(2, 0, 1, 3), prefix_lens=ints(1, 0, 4, 0), lens=ints(2, 5, 3, -1), values=ints(11, 12, 13, 14, 15),
        table=table, backend=backend,
    )  # fmt: skip
    expected = np.full((4, 6), 9, np.int32)
    expected[2, 1:3] = 11, 12
    expected[1, 4:6] = 13, 14  # the third value lies beyond the width; the padding row took none
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("backend", ["cpu"])  # the uncompiled loops have no overflow to fall into
@pytest.mark.parametrize("lens", [(HUGE,) * 4, (MAX, MAX, 2, 1), (HUGE, HUGE, HUGE, 1), (MIN, MAX, 1, MIN)])
def test_lengths_that_overflow_end_with_the_values(backend: str, lens: tuple[int, ...]) -> None:
    table = np.zeros((5, 6), np.int32)
    run(
        apply_forward_loops, rows=ints(1, 2, 3, 4), prefix_lens=ints(0, 0, 0, 0), lens=ints(*lens), values=ints(7, 8), table=table,
        backend=backend,
    )  # fmt: skip
    first = 2 if lens[0] == MIN else 1
    expected = np.zeros((5, 6), np.int32)
    expected[first, :2] = 7, 8
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", [-1, 4, MIN, MAX])
@pytest.mark.parametrize("prefix", [0, -1, 6, MIN, MAX])
def test_a_forward_outside_the_table_changes_nothing(backend: str, row: int, prefix: int) -> None:
    table = np.zeros((4, 6), np.int32)
    with np.errstate(over="ignore"):
        for r, p in ((row, 0), (1, prefix if prefix else 6)):
            run(
                apply_forward_loops,
                backend,
                rows=ints(r),
                prefix_lens=ints(p),
                lens=ints(1),
                values=ints(7),
                table=table,
            )
    assert not table.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_outside_are_counted_and_runs_that_do_not_fit_are_refused(backend: str) -> None:
    def apply(rows, starts, counts, values) -> tuple[int, np.ndarray]:
        table = np.zeros((3, 4), np.int32)
        runs, outside = Runs(ints(*[1] * len(rows)), ints(*rows), ints(*starts), ints(*counts), ints(*values)), ints(9)
        run(apply_runs_loops, backend, index=1, runs=runs, table=table, outside=outside)
        return int(outside[0]), table

    outside, table = apply((2, 1), (3, 0), (2, 1), (5, 6, 7))
    assert outside == 1
    assert table.tolist() == [[0, 0, 0, 0], [7, 0, 0, 0], [0, 0, 0, 5]]
    for row, start in ((-1, 0), (3, 0), (MIN, 0), (0, -1), (0, 5), (0, MAX), (0, MIN)):
        outside, table = apply((row,), (start,), (2,), (5, 6))
        assert (outside, table.any()) == (2, False), (row, start)
    for counts, values in (((1,), (5, 6)), ((3,), (5, 6)), ((-1,), ()), ((MAX, MAX, 2), ()), ((2, -1), (5,))):
        assert apply((0,) * len(counts), (0,) * len(counts), counts, values)[0] == -1, counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_of_another_table_are_passed_over(backend: str) -> None:
    table = np.zeros((3, 4), np.int32)
    runs, outside = Runs(ints(1, 0), ints(9, 1), ints(0, 1), ints(2, 1), ints(5, 6, 7)), ints(9)
    run(apply_runs_loops, backend, index=0, runs=runs, table=table, outside=outside)
    assert outside[0] == 0
    assert table.tolist() == [[0, 0, 0, 0], [0, 7, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_translate_keeps_negative_slots_and_counts_those_beyond(backend: str) -> None:
    slots = ints(0, 2, -1, MIN, 3, MAX)
    out = np.full(6, 77, np.int64)
    outside = ints(0)
    run(translate_loops, backend, slots=slots, lut=ints(0, 9, 5), out=out, outside=outside)
    assert outside[0] == 2
    assert out.tolist() == [0, 5, -1, MIN, SLOT_OUT_OF_RANGE, SLOT_OUT_OF_RANGE]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_of_a_repeated_slot_keep_the_last_and_slots_outside_are_passed_over(backend: str) -> None:
    pool = np.full((3, 2), 9, np.uint8)
    data = np.arange(12, dtype=np.uint8).reshape(6, 2)
    run(store_bytes_loops, backend, slots=ints(1, -1, 3, 1, MIN, MAX), data=data, pool=pool)
    assert pool.tolist() == [[9, 9], [6, 7], [9, 9]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_writers_are_those_of_each_requests_own_tokens(backend: str) -> None:
    writers = np.full((4, 3), -1, np.int64)
    run(
        mark_writer_loops, slots=ints(1, 2, 1, 9, -1), offsets=ints(0, 1, 1, 9), request_ids=ints(10, 11, 12), event=5, forward=6,
        writers=writers, backend=backend,
    )  # fmt: skip
    assert writers.tolist() == [[-1] * 3, [5, 6, 12], [5, 6, 12], [-1] * 3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("starts", "counts", "room", "expected"),
    [
        ([1], [2], 9, [106, 107]),
        ([-1], [2], 9, [105, 106]),
        ([3], [9], 9, [108, 109]),
        ([5], [1], 9, []),
        ([0], [-1], 9, []),
        ([0], [5], 3, [105, 106]),  # one place is taken already
        ([4, 0], [1, 1], 9, [109, 105]),
        ([HUGE], [HUGE], 9, []),
    ],
)
def test_cells_of_runs_inside_the_table(
    starts: list[int], counts: list[int], room: int, expected: list[int], backend: str
) -> None:
    table = np.arange(10, 25, dtype=np.int32).reshape(3, 5)
    cells, values, filled = np.full(room, -1), np.full(room, -1, np.int32), ints(1)
    outside = {"starts": ints(*starts, 0, 0), "counts": ints(*counts, 5, 5), "rows": ints(*[1] * len(starts), -1, 3)}
    run(read_cells_loops, **outside, table=table, base=100, cells=cells, values=values, filled=filled, backend=backend)
    assert filled.tolist() == [1 + len(expected)]
    assert cells[1 : filled[0]].tolist() == expected
    assert values[1 : filled[0]].tolist() == [cell - 90 for cell in expected]
