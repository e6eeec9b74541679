"""Bytes that change without a write, right behind what a load filled."""

import numpy as np
import pytest
from kvcanary.analysis.incidents.gathering import ChangedBytes
from kvcanary.recorder.state.events import SlotCopy
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.schema import TIER_HOST, TIER_POOL


@pytest.mark.parametrize(
    ("filled", "changed", "slot", "since", "behind"),
    [
        (range(4, 8), {8, 9}, 9, 10, 20),
        (range(4, 8), {8}, 8, 20, -1),  # it had been looked at since
        (range(4, 8), {9}, 9, 10, -1),  # not right behind
        (range(4, 8), {5, 8}, 5, 10, -1),  # filled itself
        ((4, 5, 9), {6, 7, 8, 9}, 6, 10, -1),  # of which some were filled
    ],
)
def test_a_change_is_behind_the_last_load_that_ends_in_front_of_it(filled, changed, slot, since, behind) -> None:
    seen = ChangedBytes(
        TraceHeader(groups=(PoolGroup(name="full", num_slots=64),), tables=(StateTable(rows=2, width=64),))
    )
    slots = np.array(filled, np.int64)
    seen.loaded(20, SlotCopy(group=0, src=slots, dst=slots, src_tier=TIER_HOST, dst_tier=TIER_POOL))
    assert seen._behind(0, slot, changed, since) == behind
