"""Slots copied by the engine outside a forward, carried out on the rebuilt pools."""

from collections.abc import Sequence

import numpy as np

from ..trace.reader import EventView
from ..trace.slot_runs import runs_to_slots
from .forward import UnusableEventError
from .pools import GroupPool


def apply_copies(view: EventView, pools: Sequence[GroupPool]) -> None:
    """Copy what a kv_copy event says; raise `UnusableEventError` where it contradicts itself or the pools."""
    columns = [view.ints(f"copy_{c}") for c in ("group", "src_tier", "src", "dst_tier", "dst", "count")]
    if len({len(column) for column in columns}) != 1:
        raise UnusableEventError("the copy columns differ in length")
    runs: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for group, src_tier, src, dst_tier, dst, count in zip(*(c.tolist() for c in columns), strict=True):
        if not 0 <= group < len(pools) or src_tier not in (0, 1) or dst_tier not in (0, 1):
            raise UnusableEventError(f"a copy in group {group} from tier {src_tier} to tier {dst_tier}")
        limit = pools[group].largest_tier
        if not 0 <= count <= limit:
            raise UnusableEventError(f"a copy of {count} slots, the larger tier has {limit}")
        runs.setdefault((group, src_tier, dst_tier), []).append((src, dst, count))
    for (group, src_tier, dst_tier), given in runs.items():
        # Everything is read before anything is written: a run may begin where another one ends.
        starts, targets, counts = np.array(given, dtype=np.int64).T
        pool = pools[group]
        if int(counts.sum()) > pool.largest_tier:
            raise UnusableEventError(f"a copy of {int(counts.sum())} slots, the larger tier has {pool.largest_tier}")
        if pool.copy_slots(src_tier, runs_to_slots(starts, counts), dst_tier, runs_to_slots(targets, counts)):
            raise UnusableEventError(f"a copy of {int(counts.sum())} slots leaves its tier")


def forget_listed(view: EventView, pools: Sequence[GroupPool]) -> None:
    """Take the slots that a loss event lists for unknown; raise `UnusableEventError` where there are no such slots."""
    groups, starts, counts = (view.ints(f"slot_{c}") for c in ("group", "start", "count"))
    if not len(groups) == len(starts) == len(counts):
        raise UnusableEventError("the slot columns differ in length")
    for group, start, count in zip(groups.tolist(), starts.tolist(), counts.tolist(), strict=True):
        if not 0 <= group < len(pools) or start < 0 or count < 0:
            raise UnusableEventError(f"a run of {count} slots from {start} in group {group}")
        pools[group].forget(slice(start, start + count))
