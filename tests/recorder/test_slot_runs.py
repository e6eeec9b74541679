"""Slots as runs: what is left of them where there may be only a few."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.recorder.capture.host_arrays import fewer_runs, mask_to_runs, runs_to_slots
from kvcanary.recorder.state.events import require_inside
from kvcanary.recorder.state.forward import UnusableEventError


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(1, 9))
def test_fewer_runs_hold_all_slots_and_as_few_others_as_can_be(mask: list[bool], most: int) -> None:
    starts, counts = mask_to_runs(np.array(mask))
    fewer = fewer_runs(starts, counts, most)
    assert fewer[0].size == min(starts.size, most)
    slots = runs_to_slots(*fewer)
    assert np.all(np.diff(slots) > 0)
    assert set(runs_to_slots(starts, counts).tolist()) <= set(slots.tolist())
    gaps = np.sort(starts[1:] - (starts + counts)[:-1])
    filled = gaps[: max(0, starts.size - most)].sum()
    assert slots.size == sum(mask) + filled


@pytest.mark.parametrize(
    ("runs", "wrong"),
    [
        ([(0, 0, 8)], ""),
        ([(1, 0, 4)], ""),
        ([(0, 8, 0)], ""),
        ([(0, 0, 9)], "a run of 9 slots from 0 leaves group 0, which has 8"),
        ([(0, 1, 8)], "a run of 8 slots from 1 leaves group 0"),
        ([(0, -1, 2)], "a run of 2 slots from -1 leaves group 0"),
        ([(2, 0, 1)], "a run of group 2, the header names 2"),
        ([(0, 0, 8), (1, 0, 4)], ""),
        ([(0, 0, 8), (1, 0, 5)], "a run of 5 slots from 0 leaves group 1, which has 4"),
        ([(1, 4, 0), (0, 8, 1)], "a run of 1 slots from 8 leaves group 0"),
        ([(0, 8, 0), (0, 9, 0)], "a run of 0 slots from 9 leaves group 0"),
        ([(0, 0, 4), (0, 0, 4)], ""),
        ([(0, 0, 4), (0, 0, 5)], "runs of more slots than group 0 has, 8"),
        ([(0, 0, 0)] * 8, ""),
        ([(0, 0, 0)] * 9, "runs of more slots than group 0 has, 8"),
    ],
)
def test_runs_up_to_a_groups_last_slot(runs: list[tuple[int, int, int]], wrong: str) -> None:
    columns = [np.array(column, np.int64) for column in zip(*runs, strict=True)]
    if not wrong:
        require_inside(columns, [8, 4])
        return
    with pytest.raises(UnusableEventError, match=wrong):
        require_inside(columns, [8, 4])
