"""Slots as runs: what is left of them where there may be only a few."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.recorder.capture.host_arrays import fewer_runs, mask_to_runs, runs_to_slots


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
