"""The state tables of a whole trace beside those of a part of it: what the part has to be told, so that it reads the same."""

from collections.abc import Mapping

import numpy as np

from ...kernels.arrays import Int32Array, Int64Array
from ...kernels.capture.changes import RowRuns, cells_to_runs, joined
from ...recorder.capture.host_arrays import ragged_index
from ...recorder.state.forward import EventColumns, Forward
from ...recorder.state.tables import StateTables
from ...recorder.trace.event import TraceEvent
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.schema import TABLE_CHANGES
from .parts import NOTHING, EventLists

Cells = Mapping[int, tuple[Int64Array, Int64Array]]  # rows and positions, by block table


class TwoTables:
    """`whole` are the tables as the whole trace makes them, `part` as the kept events do."""

    def __init__(self, header: TraceHeader) -> None:
        self._header = header
        self.whole = StateTables(header, backend="cpu")
        self.part = StateTables(header, backend="cpu")

    def forget(self) -> None:
        """Take every entry for unknown, on both sides."""
        self.whole.forget()
        self.part.forget()

    def translated(self, lut: int, slots: Int64Array) -> Int64Array:
        """Return the slots to which full slots lead; themselves without a full-to-SWA table, -1."""
        if lut < 0:
            return slots
        table = self.whole.luts[lut]
        return table[slots[(slots >= 0) & (slots < len(table))]]

    def prefixes(self, forward: Forward) -> Cells:
        """Return the entries of a forward's prefixes."""
        rows, found = forward.req_pool_indices, {}
        for number, table in enumerate(self.whole.req_to_token):
            inside = (rows > 0) & (rows < len(table))
            lens = np.clip(np.where(inside, forward.prefix_lens, 0), 0, table.shape[1])
            found[number] = np.repeat(rows, lens), ragged_index(np.zeros_like(lens), lens)
        return found

    def reads(self, forward: Forward, group: int, cells: Cells) -> Int64Array:
        """Return the slots of a pool group that a forward reads, and the one before its window."""
        known = self._header.groups[group]
        rows, positions = cells[known.table]
        if known.window and known.kind == "swa":
            near = positions >= _ends(forward, rows) - known.window - 1
            rows, positions = rows[near], positions[near]
        return self.translated(known.lut, self.whole.req_to_token[known.table][rows, positions].astype(np.int64))

    def supply(self, event: TraceEvent, part: Forward, cells: Cells) -> None:
        """Put the entries into a forward's event that it reads and that the part does not have yet, and apply it.

        Of what the whole trace's event changes, entries behind the prefixes stay: they are compared with where tokens go.
        """
        ints, mine = event.ints, np.unique(part.req_pool_indices[part.req_pool_indices > 0])
        own = {name: ints.pop(name, NOTHING) for name in TABLE_CHANGES}
        found: list[tuple[int, RowRuns]] = []
        for table, (rows, positions) in cells.items():
            whole, known = self.whole.req_to_token[table], self.part.req_to_token[table]
            differs = whole[rows, positions] != known[rows, positions]
            found.append((table, _runs(rows[differs], positions[differs], whole)))
            counts = own["table_count"]
            of = np.repeat(own["table_index"] == table, counts)
            rows, positions = np.repeat(own["table_row"], counts), ragged_index(own["table_start"], counts)
            of &= np.isin(rows, mine)
            of &= positions >= _ends(part, rows)
            found.append((table, cells_to_runs(rows[of], positions[of], own["table_slots"][of])))
        numbers = [np.full(len(runs.rows), table) for table, runs in found]
        ints["table_index"] = np.concatenate([NOTHING, *numbers])
        _put(ints, ("table_row", "table_start", "table_count", "table_slots"), joined([runs for _, runs in found]))
        _put(ints, ("lut_index", "lut_start", "lut_count", "lut_slots"), joined(self._luts(part, cells)))
        if self.whole.truth is not None and self.part.truth is not None and part.truth_lens is not None:
            rows, width = part.req_pool_indices, self.whole.truth.shape[1]
            ahead = part.prefix_lens + np.maximum(part.extend_lens, 0) + 1
            inside = (rows > 0) & (rows < len(self.whole.truth))
            lens = np.clip(np.where(inside, np.maximum(part.truth_lens, ahead), 0), 0, width)
            rows, positions = np.repeat(rows, lens), ragged_index(np.zeros_like(lens), lens)
            differs = self.whole.truth[rows, positions] != self.part.truth[rows, positions]
            truth = _runs(rows[differs], positions[differs], self.whole.truth)
            _put(ints, ("truth_row", "truth_start", "truth_count", "truth_tokens"), truth)
        lists: EventColumns = EventLists(event)
        self.part.apply_changes(lists)
        self.part.apply_forward(part)

    def _luts(self, part: Forward, cells: Cells) -> list[RowRuns]:
        found = []
        for lut, (whole, known) in enumerate(zip(self.whole.luts, self.part.luts, strict=True)):
            tables = {group.table for group in self._header.groups if group.lut == lut}
            used = [self.whole.req_to_token[table][cells[table]].astype(np.int64) for table in tables]
            used += [part.out_cache_loc[table] for table in tables if part.out_cache_loc]
            full = np.unique(np.concatenate([NOTHING, *used]))
            full = full[(full >= 0) & (full < len(whole))]
            full = full[whole[full] != known[full]]
            found.append(cells_to_runs(np.full(len(full), lut), full, whole[full]))
        return found


def _ends(forward: Forward, rows: Int64Array) -> Int64Array:
    """Return the prefix length of the request in each row, 0 if the forward has none there."""
    ends = dict(zip(forward.req_pool_indices.tolist(), forward.prefix_lens.tolist(), strict=True))
    unique, at = np.unique(rows, return_inverse=True)
    return np.array([ends.get(row, 0) for row in unique.tolist()], np.int64)[at.reshape(-1)]


def _runs(rows: Int64Array, positions: Int64Array, table: Int32Array) -> RowRuns:
    return cells_to_runs(rows, positions, table[rows, positions].astype(np.int64))


def _put(ints: dict[str, Int64Array], names: tuple[str, ...], runs: RowRuns) -> None:
    ints.update(zip(names, runs, strict=True))
