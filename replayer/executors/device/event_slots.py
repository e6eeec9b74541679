"""Which slots an event between forwards names: what must be on the host before the event is carried out there.

Nothing is checked here: what does not fit is left out, and the code that carries the event out says so.
"""

import numpy as np

from ....kernels.arrays import BoolArray, Int64Array
from ....recorder.capture.host_arrays import runs_to_slots
from ....recorder.state.pools import GroupPool
from ....recorder.trace.batch import EventView
from ....recorder.trace.header import TraceHeader
from ....recorder.trace.schema import TIER_POOL


def slots_of_event(view: EventView, pools: list[GroupPool], header: TraceHeader) -> list[Int64Array]:
    """Return the slots of each group, `[n] int64`, ascending, that an event names in any column."""
    found: list[list[Int64Array]] = [[] for _ in pools]
    groups, counts = view.ints("copy_group"), view.ints("copy_count")
    for tier, start in (("copy_src_tier", "copy_src"), ("copy_dst_tier", "copy_dst")):
        _add_runs(found, pools, groups, view.ints(start), counts, view.ints(tier) == TIER_POOL)
    groups = view.ints("slot_group")
    _add_runs(found, pools, groups, view.ints("slot_start"), view.ints("slot_count"), np.ones(len(groups), np.bool_))
    groups = view.ints("sweep_group")
    for name in ("sweep_slot", "sweep_prev"):
        values = view.ints(name)
        if len(values) == len(groups):
            for index in range(len(pools)):
                found[index].append(values[groups == index])
    runner = int(view.scalar("runner"))
    streams, slots = view.ints("kv_change_stream"), view.ints("kv_change_slot")
    if 0 <= runner < len(header.runners) and len(streams) == len(slots):
        for number, (group, _) in enumerate(header.streams(runner)):
            found[group].append(slots[streams == number])
    unique = [np.unique(np.concatenate([np.zeros(0, np.int64), *parts])) for parts in found]
    return [slots[(slots >= 0) & (slots < pool.num_slots)] for slots, pool in zip(unique, pools, strict=True)]


def _add_runs(
    found: list[list[Int64Array]],
    pools: list[GroupPool],
    groups: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    mask: BoolArray,
) -> None:
    if not len(groups) == len(starts) == len(counts) == len(mask):
        return
    for index, pool in enumerate(pools):
        mine = (groups == index) & mask
        begins = np.clip(starts[mine], 0, pool.num_slots)
        ends = np.clip(begins + np.clip(counts[mine], 0, pool.num_slots), begins, pool.num_slots)
        if int((ends - begins).sum()) > 4 * pool.num_slots:  # hostile
            found[index].append(np.arange(pool.num_slots))
        else:
            found[index].append(runs_to_slots(begins, ends - begins))
