"""What the interval executor is told of: every change of a slot, a table entry or a truth token, before it is made."""

import numpy as np
import numpy.typing as npt

from ....kernels.replay_pass.cells import Cells
from ....kernels.replay_pass.touches import touch_lut, touch_slots, touch_table, touch_truth
from ....recorder.state.forward import Forward
from ....recorder.state.tables import StateTables
from ....recorder.trace.header import StateTable, TraceHeader
from ....recorder.trace.reader import EventView

Int64Array = npt.NDArray[np.int64]


class Watch:
    """The cells of each pool group, `cells[group]`, and for the divergence figures those of each sliding group by full
    slot, `full_cells[group]` with their `kinds[group]` `[rows, width] uint8`.

    `reset` puts new objects in their place: hold on to none of them between two events.
    """

    def __init__(self, header: TraceHeader, *, backend: str) -> None:
        self.cells: list[Cells] = []
        self.full_cells: dict[int, Cells] = {}
        self.kinds: dict[int, npt.NDArray[np.uint8]] = {}
        self._header = header
        self._backend = backend
        self.reset()

    def reset(self) -> None:
        """Take nothing for looked at."""
        self.cells = [self._fresh(index) for index in range(len(self._header.groups))]
        for index, group in enumerate(self._header.groups):
            if group.lut >= 0:
                self._allocate_full(index)

    def reset_group(self, index: int) -> None:
        """Take nothing in a group for looked at."""
        self.cells[index] = self._fresh(index)

    def touch(self, group: int, slots: Int64Array) -> None:
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

    def lut_changes(self, tables: StateTables, *, index: int, places: Int64Array, values: Int64Array) -> None:
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


class WatchedTables(StateTables):
    """State tables that tell a watch what they are about to change."""

    def __init__(self, header: TraceHeader, watch: Watch, *, backend: str) -> None:
        super().__init__(header, backend=backend)
        self._watch = watch

    def apply_forward(self, forward: Forward) -> None:
        """Apply a forward's own slots and sampled tokens, as the recorder did."""
        rows = forward.req_pool_indices
        lens = np.where(rows == 0, 0, np.maximum(forward.extend_lens, 0))
        runs = np.zeros_like(rows)
        for index, slots in enumerate(forward.out_cache_loc):
            self._watch.table_runs(
                self, index=index, indices=runs + index, rows=rows, starts=forward.prefix_lens, lens=lens, values=slots
            )
        if self.truth is not None and len(forward.sampled_lens):
            self._watch.truth_runs(
                self,
                rows=rows,
                starts=forward.prefix_lens + np.maximum(forward.extend_lens, 0),
                lens=np.where(rows == 0, 0, forward.sampled_lens),
                values=forward.sampled_tokens,
            )
        super().apply_forward(forward)

    def _apply(self, view: EventView, prefix: str, index: int, values: str, table: npt.NDArray[np.int32]) -> None:
        rows = view.ints(f"{prefix}_row")
        if len(rows):
            starts, lens = view.ints(f"{prefix}_start"), view.ints(f"{prefix}_count")
            if len(rows) == len(starts) == len(lens):  # else it is refused
                runs = {"rows": rows, "starts": starts, "lens": lens, "values": view.ints(values)}
                if prefix == "truth":
                    self._watch.truth_runs(self, **runs)
                elif len(indices := view.ints("table_index")) == len(rows):
                    self._watch.table_runs(self, index=index, indices=indices, **runs)
        super()._apply(view, prefix, index, values, table)

    def _set_lut(self, index: int, places: Int64Array, values: Int64Array) -> None:
        self._watch.lut_changes(self, index=index, places=places, values=values)
        super()._set_lut(index, places, values)
