"""What the interval executor is told of: every change of a slot, a table entry or a truth token, before it is made."""

import numpy as np
import numpy.typing as npt

from ....kernels.replay_pass.cells import Cells
from ....kernels.replay_pass.touches import touch_lut, touch_slots, touch_table, touch_truth
from ....recorder.state.tables import StateListener, StateTables
from ....recorder.trace.header import StateTable, TraceHeader

Int64Array = npt.NDArray[np.int64]


class Watch(StateListener):
    """The cells of each pool group, `cells[group]`, and for the divergence figures those of each sliding group by full
    slot, `full_cells[group]` with their `kinds[group]` `[rows, width] uint8`.

    `all_changed` puts new objects in their place: hold on to none of them between two events.
    """

    def __init__(self, header: TraceHeader, *, backend: str) -> None:
        self.cells: list[Cells] = []
        self.full_cells: dict[int, Cells] = {}
        self.kinds: dict[int, npt.NDArray[np.uint8]] = {}
        self._header = header
        self._backend = backend
        self.all_changed()

    def all_changed(self) -> None:
        """Take nothing for looked at."""
        self.cells = [self._fresh(index) for index in range(len(self._header.groups))]
        for index, group in enumerate(self._header.groups):
            if group.lut >= 0:
                self._allocate_full(index)

    def group_changed(self, group: int) -> None:
        """Take nothing in a group for looked at."""
        self.cells[group] = self._fresh(group)

    def slots_changed(self, group: int, slots: Int64Array) -> None:
        """Have what reads slots `[n] int64` of a group looked at again."""
        if len(slots):
            touch_slots(self.cells[group], slots, backend=self._backend)

    def table_runs(
        self,
        tables: StateTables,
        *,
        index: int,
        indices: Int64Array,
        rows: Int64Array,
        starts: Int64Array,
        lens: Int64Array,
        values: Int64Array,
    ) -> None:
        """Tell of runs that will be written to a block table, as `touch_table` takes them."""
        for number, group in enumerate(self._header.groups):
            if group.table != index:
                continue
            for cells in (self.cells[number], self.full_cells.get(number)):
                if cells is not None:
                    touch_table(
                        cells,
                        index=index,
                        indices=indices,
                        rows=rows,
                        starts=starts,
                        lens=lens,
                        values=values,
                        table=tables.req_to_token[index],
                        backend=self._backend,
                    )

    def truth_runs(
        self, tables: StateTables, *, rows: Int64Array, starts: Int64Array, lens: Int64Array, values: Int64Array
    ) -> None:
        """Tell of runs that will be written to the truth tokens."""
        if tables.truth is None:
            return
        for cells, group in zip(self.cells, self._header.groups, strict=True):
            touch_truth(
                cells,
                rows=rows,
                starts=starts,
                lens=lens,
                values=values,
                truth=tables.truth,
                token_offset=self._header.runners[group.runner].token_offset,
                backend=self._backend,
            )

    def lut_entries(self, tables: StateTables, *, index: int, places: Int64Array, values: Int64Array) -> None:
        """Tell of full slots `places` `[n] int64` whose entry in a full-to-SWA table will be `values`."""
        before = tables.luts[index][places]
        changed = before != values
        places, before = places[changed], before[changed]
        if not len(places):
            return
        for number, group in enumerate(self._header.groups):
            if group.lut == index:
                table = tables.req_to_token[group.table]
                for cells, buckets in ((self.cells[number], before), (self.full_cells[number], places)):
                    touch_lut(cells, places=places, before=buckets, req_to_token=table, backend=self._backend)

    def _fresh(self, index: int) -> Cells:
        group = self._header.groups[index]
        return _cells(self._header.tables[group.table], slots=group.num_slots)

    def _allocate_full(self, index: int) -> None:
        group = self._header.groups[index]
        self.full_cells[index] = _cells(self._header.tables[group.table], slots=self._header.lut_lens[group.lut])
        self.kinds[index] = np.zeros(self.full_cells[index].pending.shape, np.uint8)


def _cells(table: StateTable, *, slots: int) -> Cells:
    """Return the cells of a table; a machine that has no room for them looks at everything, as in stepwise replay."""
    try:
        return Cells.allocate(rows=table.rows, width=table.width, slots=slots)
    except MemoryError:
        return Cells.allocate(rows=0, width=0, slots=slots)
