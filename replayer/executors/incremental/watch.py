"""What makes prefix entries due again: every change of a slot, a table entry or a truth token, before it is made."""

import numpy as np
import numpy.typing as npt

from ....kernels.arrays import Int64Array
from ....kernels.dispatch import select
from ....kernels.replay_pass.entries import (
    EntryStates,
    Runs,
    SlotTable,
    allocate_states,
    invalidate_lut_loops,
    invalidate_slots_loops,
    invalidate_table_loops,
    invalidate_truth_loops,
)
from ....recorder.state.tables import StateListener, StateTables
from ....recorder.trace.header import StateTable, TraceHeader


class Watch(StateListener):
    """The entry states of each pool group, `states[group]`, and for the divergence figures those of each sliding group by
    full slot, `full_states[group]` with their `kinds[group]` `[rows, width] uint8`.

    `all_changed` puts new objects in their place: hold on to none of them between two events.
    """

    def __init__(self, header: TraceHeader, *, backend: str) -> None:
        self.states: list[EntryStates] = []
        self.full_states: dict[int, EntryStates] = {}
        self.kinds: dict[int, npt.NDArray[np.uint8]] = {}
        self._header = header
        self._backend = backend
        self.all_changed()

    def all_changed(self) -> None:
        """Take nothing for verified."""
        self.states = [self._fresh(index) for index in range(len(self._header.groups))]
        for index, group in enumerate(self._header.groups):
            if group.lut >= 0:
                self._allocate_full(index)

    def group_changed(self, group: int) -> None:
        """Take nothing in a group for verified."""
        self.states[group] = self._fresh(group)

    def slots_changed(self, group: int, slots: Int64Array) -> None:
        """Have what reads slots `[n] int64` of a group verified again."""
        if len(slots):
            select(invalidate_slots_loops, self._backend)(slots, self.states[group])

    def table_runs(self, tables: StateTables, index: int, runs: Runs) -> None:
        """Note runs that will be written to a block table."""
        for number, group in enumerate(self._header.groups):
            if group.table != index:
                continue
            for states in (self.states[number], self.full_states.get(number)):
                if states is not None and len(runs.rows):
                    select(invalidate_table_loops, self._backend)(index, runs, tables.req_to_token[index], states)

    def truth_runs(self, tables: StateTables, runs: Runs) -> None:
        """Note runs that will be written to the truth tokens."""
        if tables.truth is None or not len(runs.rows):
            return
        for states, group in zip(self.states, self._header.groups, strict=True):
            offset = self._header.runners[group.runner].token_offset
            select(invalidate_truth_loops, self._backend)(runs, tables.truth, offset, states)

    def lut_entries(self, tables: StateTables, *, index: int, places: Int64Array, values: Int64Array) -> None:
        """Note full slots `places` `[n] int64` whose entry in a full-to-SWA table will be `values`."""
        before = tables.luts[index][places]
        changed = before != values
        places, before = places[changed], before[changed]
        if not len(places):
            return
        for number, group in enumerate(self._header.groups):
            if group.lut == index:
                table = SlotTable(tables.req_to_token[group.table], tables.luts[index])
                for states, buckets in ((self.states[number], before), (self.full_states[number], places)):
                    select(invalidate_lut_loops, self._backend)(places, buckets, table, states)

    def _fresh(self, index: int) -> EntryStates:
        group = self._header.groups[index]
        return _states(self._header.tables[group.table], slots=group.num_slots)

    def _allocate_full(self, index: int) -> None:
        group = self._header.groups[index]
        self.full_states[index] = _states(self._header.tables[group.table], slots=self._header.lut_lens[group.lut])
        self.kinds[index] = np.zeros(self.full_states[index].due.shape, np.uint8)


def _states(table: StateTable, *, slots: int) -> EntryStates:
    """Return the states of a table; a machine that has no room for them verifies everything, as in stepwise replay."""
    try:
        return allocate_states(rows=table.rows, width=table.width, slots=slots)
    except MemoryError:
        return allocate_states(rows=0, width=0, slots=slots)
