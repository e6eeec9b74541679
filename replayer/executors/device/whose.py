"""Which slots and rows an event concerns: what the host must have before it carries the event out.

Nothing is checked here: what does not fit is left out, and the code that carries the event out says so.
"""

import numpy as np
import numpy.typing as npt

from ....recorder.capture.host_arrays import runs_to_slots
from ....recorder.state.forward import Forward
from ....recorder.state.pools import GroupPool
from ....recorder.state.tables import StateTables
from ....recorder.trace.batch import EventView
from ....recorder.trace.header import TraceHeader
from ....recorder.trace.schema import TIER_POOL

Int64Array = npt.NDArray[np.int64]


def slots_of_event(view: EventView, pools: list[GroupPool], header: TraceHeader) -> list[Int64Array]:
    """Return the slots of each group, `[n] int64`, ascending, that an event between forwards names in any column."""
    found: list[list[Int64Array]] = [[] for _ in pools]
    groups, counts = view.ints("copy_group"), view.ints("copy_count")
    for tier, start in (("copy_src_tier", "copy_src"), ("copy_dst_tier", "copy_dst")):
        _take_runs(found, pools, groups, view.ints(start), counts, view.ints(tier) == TIER_POOL)
    _take_runs(found, pools, view.ints("slot_group"), view.ints("slot_start"), view.ints("slot_count"), None)
    groups = view.ints("sweep_group")
    for name in ("sweep_slot", "sweep_prev"):
        values = view.ints(name)
        if len(values) == len(groups):
            for index in range(len(pools)):
                found[index].append(values[groups == index])
    return _inside(found, pools, _changed(view, header))


def slots_of_forward(
    forward: Forward, view: EventView, pools: list[GroupPool], tables: StateTables, header: TraceHeader
) -> list[Int64Array]:
    """Return the slots of each group that a forward reads or writes, or in which it saw bytes change.

    Its rows must be on the host, with the changes of the event yet to come.
    """
    found: list[list[Int64Array]] = [[] for _ in pools]
    values = view.ints("table_slots")
    for index, pool in enumerate(pools):
        if pool.group.runner != forward.runner:
            continue
        table = tables.req_to_token[pool.group.table]
        rows = np.unique(forward.req_pool_indices)
        rows = rows[(rows >= 0) & (rows < len(table))]
        full = [forward.out_cache_loc[pool.group.table], values, table[rows].reshape(-1).astype(np.int64)]
        found[index] += full
        if pool.group.lut >= 0:
            lut = tables.luts[pool.group.lut]
            slots = np.concatenate(full)
            found[index] += [lut[slots[(slots >= 0) & (slots < len(lut))]], view.ints("lut_slots")]
    return _inside(found, pools, _changed(view, header))


def rows_of(view: EventView, tables: StateTables) -> Int64Array:
    """Return the rows of tables that an event names, `[n] int64`, ascending."""
    rows = np.unique(np.concatenate([view.ints(name) for name in ("req_pool_indices", "table_row", "truth_row")]))
    shapes = [*tables.req_to_token, *([] if tables.truth is None else [tables.truth])]
    return rows[(rows >= 0) & (rows < max(map(len, shapes), default=0))]


def _take_runs(
    found: list[list[Int64Array]],
    pools: list[GroupPool],
    groups: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    mask: npt.NDArray[np.bool_] | None,
) -> None:
    if not len(groups) == len(starts) == len(counts) or (mask is not None and len(mask) != len(groups)):
        return
    for index, pool in enumerate(pools):
        mine = groups == index if mask is None else (groups == index) & mask
        begins = np.clip(starts[mine], 0, pool.num_slots)
        ends = np.clip(begins + np.clip(counts[mine], 0, pool.num_slots), begins, pool.num_slots)
        if int((ends - begins).sum()) > 4 * pool.num_slots:  # hostile
            found[index].append(np.arange(pool.num_slots))
        else:
            found[index].append(runs_to_slots(begins, ends - begins))


def _changed(view: EventView, header: TraceHeader) -> list[tuple[int, Int64Array]]:
    """Return `(group, slots)` for the bytes that an event saw change."""
    runner = int(view.scalar("runner"))
    streams, slots = view.ints("kv_change_stream"), view.ints("kv_change_slot")
    if not 0 <= runner < len(header.runners) or len(streams) != len(slots):
        return []
    return [(group, slots[streams == number]) for number, (group, _) in enumerate(header.streams(runner))]


def _inside(
    found: list[list[Int64Array]], pools: list[GroupPool], changed: list[tuple[int, Int64Array]]
) -> list[Int64Array]:
    for group, slots in changed:
        found[group].append(slots)
    unique = [np.unique(np.concatenate([np.zeros(0, np.int64), *parts])) for parts in found]
    return [slots[(slots >= 0) & (slots < pool.num_slots)] for slots, pool in zip(unique, pools, strict=True)]
