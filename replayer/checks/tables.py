"""Tokens that are written to another slot than their row names, and entries of the full-to-SWA table that outlive their slot."""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.dispatch import select
from ...kernels.replay_pass.ledger import Found
from ...kernels.replay_pass.swa import shared_halves_loops
from ...recorder.capture.host_arrays import ragged_index
from ...recorder.state.events import SlotEvent
from ...recorder.state.tables import look_up
from ...recorder.trace.reader import EventView
from ..report.findings import NO_CAUSE, Cause, Finding
from .check import Covered, Explained, HistoryCheck, Repeats, happened, register
from .history import ForwardView, GroupReads, History

_MOST_ENTRIES: Final = 1 << 18


# A request, and entries of its row that were recorded before it wrote them: position to the event and the slot.
_Ahead = tuple[int, dict[int, tuple[int, int]]]


@register
class TableEntryDiffers(HistoryCheck):
    """A forward writes a token to another slot than its row of the block table names for the position.

    An entry is recorded by a run of the forward's own event, or by an earlier one: of the same request, behind all that it had
    computed then. Entries that no event gave for this request (an earlier one's, a draft's, those that forwards left) say
    nothing; nor do entries whose slot was given back since, or a token that is written nowhere (a negative slot).
    """

    kind = "table_entry_differs"
    finds = "a forward writes a token to another slot than its row names for the position"
    covered = Covered.COMPILED
    events = frozenset({"alloc", "free", "evict", "status"})

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._ahead: dict[tuple[int, int], _Ahead] = {}

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        if len(view.event.ints("table_row")) or self._ahead:
            for table in range(len(view.tables.req_to_token)):
                yield from self._judge(view, table)

    def event(self, view: EventView) -> list[Finding]:
        """Note what an allocation says of its request's row, and forget what a free or a status makes untrue."""
        known = self.history.known
        if view.kind == "status":
            request, rows = int(view.scalar("request_id")), view.ints("req_pool_indices").tolist()
            self._keep(lambda _, row, owner: row not in rows and owner != request)
        elif isinstance(known, SlotEvent) and known.kind == "alloc":
            if known.row > 0 and known.request_id >= 0 and len(view.ints("table_row")) and _fit(view):
                for table in range(len(self.history.header.tables)):
                    rows, positions, slots = _entries(view, table)
                    mine = rows == known.row
                    self._note(table, known.row, known.request_id, positions[mine], slots[mine], view.number)
        elif isinstance(known, SlotEvent) and self._ahead:
            self._give_back(known)
        return []

    def pending(self) -> bool:
        return bool(self._ahead)

    def forget(self) -> None:
        self._ahead.clear()

    def _judge(self, view: ForwardView, table: int) -> list[Finding]:
        forward, cells = view.forward, view.tables.req_to_token[table]
        tokens = self.history.tokens(view)
        rows, positions = forward.req_pool_indices[tokens.request], tokens.position
        slots = forward.out_cache_loc[table][: len(rows)]
        stands, inside = look_up(cells, rows, positions)
        width = cells.shape[1]
        given_rows, given_positions, given_slots = _entries(view.event, table)
        events = np.where(np.isin(rows * width + positions, given_rows * width + given_positions), forward.event, -1)
        ends = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        batch = list(
            zip(*(column.tolist() for column in (forward.req_pool_indices, forward.request_ids, ends)), strict=True)
        )
        running = {row: request for row, request, _ in batch}
        self._keep(lambda number, row, owner: number != table or running.get(row, owner) == owner)
        for (number, row), (_, entries) in self._ahead.items():
            if number == table:
                for i in np.flatnonzero(rows == row).tolist():
                    events[i] = max(int(events[i]), entries.pop(int(positions[i]), (-1, 0))[0])
        self._keep()
        for row, request, end in batch if len(given_rows) else ():
            if row > 0 and request >= 0:  # behind all that it has computed when the forward is through
                mine = (given_rows == row) & (given_positions >= end)
                self._note(table, row, request, given_positions[mine], given_slots[mine], forward.event)
        wrong = np.flatnonzero(inside & (events >= 0) & (slots >= 0) & (stands != slots))
        group = next((one for one in view.groups if one.pool.group.table == table), None)
        if not len(wrong) or group is None:
            return []
        proof = {int(r): np.unique(events[wrong[tokens.request[wrong] == r]]) for r in np.unique(tokens.request[wrong])}

        def explain(n: int) -> Explained:
            detail = f"is written to slot {slots[n]}, its row names slot {stands[wrong[n]]}"
            return detail, proof[int(requests[n])].tolist(), NO_CAUSE

        requests, positions, slots = tokens.request[wrong], positions[wrong], slots[wrong]
        return self.of_entries(view, group, explain, requests=requests, positions=positions, slots=slots)

    def _give_back(self, event: SlotEvent) -> None:
        """Forget entries that lead to slots which are given back: what stands there now nobody knows."""
        for part in event.parts:
            table = self.history.header.groups[part.group].table
            freed = set(part.slots.tolist())
            for (number, _), (_, entries) in self._ahead.items():
                for position in [p for p, (_, slot) in entries.items() if number == table and slot in freed]:
                    del entries[position]
        self._keep()

    def _note(
        self, table: int, row: int, request_id: int, positions: Int64Array, slots: Int64Array, event: int
    ) -> None:
        if not len(positions):
            return
        if len(positions) + sum(len(entries) for _, entries in self._ahead.values()) > _MOST_ENTRIES:
            self._ahead.clear()
            return
        before, entries = self._ahead.get((table, row), (request_id, {}))
        entries = entries if before == request_id else {}
        entries.update((p, (event, slot)) for p, slot in zip(positions.tolist(), slots.tolist(), strict=True))
        self._ahead[table, row] = request_id, entries

    def _keep(self, wanted: Callable[[int, int, int], bool] = lambda *_: True) -> None:
        """Forget all entries but those of the tables, rows and requests that are wanted."""
        self._ahead = {key: one for key, one in self._ahead.items() if one[1] and wanted(*key, one[0])}


def _fit(view: EventView) -> bool:
    """Whether an event's runs of table entries fit its slots; those of a forward were applied before."""
    index, rows, starts, counts = (view.ints(f"table_{name}") for name in ("index", "row", "start", "count"))
    room = len(view.ints("table_slots"))
    return (
        len(index) == len(rows) == len(starts) == len(counts)
        and bool(((counts >= 0) & (counts <= room)).all())
        and int(counts.sum()) == room
    )


def _entries(view: EventView, table: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return row, position and slot, `[n] int64` each, of the entries of a table that an event gives."""
    index, counts = view.ints("table_index"), view.ints("table_count")
    mine = index == table
    rows = np.repeat(view.ints("table_row")[mine], counts[mine])
    positions = ragged_index(view.ints("table_start")[mine], counts[mine])
    return rows, positions, view.ints("table_slots")[np.repeat(mine, counts)]


@register
class SwaMappingStale(HistoryCheck):
    """Two full slots that a forward uses lead to one sliding-window slot, or one inside the window leads nowhere.

    A recycled slot that keeps its old entry shows here. Requests that share a prefix share its full slots, too; tokens of a
    long chunk that are past the window already when it is written go to slot 0. A free or foreign SWA slot is for the read
    and write checks to find.
    """

    kind = "swa_mapping_stale"
    finds = "two full slots in use lead to one SWA slot, or one inside the window leads nowhere"
    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.serial = 0
        groups = history.header.groups
        self.partners = {
            index: np.zeros((group.num_slots, 2), np.int64) for index, group in enumerate(groups) if group.lut >= 0
        }
        self.nowhere = Repeats()

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        for group in view.groups:
            if group.pool.index in self.partners:
                yield from self._shared_slots(view, group)
                # After a gap the rebuilt table may lack entries that the engine's has.
                if not self.history.had_gap:
                    yield from self._leads_nowhere(view, group)

    def _shared_slots(self, view: ForwardView, group: GroupReads) -> list[Finding]:
        forward, index = view.forward, group.pool.index
        self.serial += 1
        written_full = forward.out_cache_loc[group.pool.group.table]
        slots, table = group.slots, view.tables.req_to_token[group.pool.group.table]
        room = Found.allocate(len(slots) + len(group.written))
        select(shared_halves_loops, self.history.backend)(
            slots, group.positions, group.plan.request_offsets, forward.req_pool_indices, table, group.written,
            written_full, len(group.request_slots), self.serial, self.partners[index], room,
        )  # fmt: skip
        found = room.found()[0]
        reads, writes = found[found < len(slots)], found[found >= len(slots)] - len(slots)
        group.mark(reads)
        requests = np.append(group.readers(reads), group.writers(writes))
        at = np.append(slots[reads], group.written[writes])
        stands = table[forward.req_pool_indices[requests[: len(reads)]], group.positions[reads]]
        full = np.append(stands, written_full[writes])

        def explain(n: int) -> Explained:
            other = int(self.partners[index][at[n], 1])
            detail = f"full slots {other} and {int(full[n])} lead to SWA slot {int(at[n])}"
            return detail, happened(self.history.ledger.rows[index][at[n]]), Cause("swa_slot_shared")

        positions = np.append(group.positions[reads], forward.positions[writes])
        return self.of_entries(
            view, group, explain, requests=requests, positions=positions, slots=at, repeats=self.repeats
        )

    def _leads_nowhere(self, view: ForwardView, group: GroupReads) -> list[Finding]:
        forward, lut = view.forward, view.tables.luts[group.pool.group.lut]
        entries = np.flatnonzero(group.slots == 0)
        table = view.tables.req_to_token[group.pool.group.table]
        if not len(entries) or not table.size or not len(lut):
            return []
        requests = group.readers(entries)
        rows, positions = forward.req_pool_indices[requests], group.positions[entries]
        full, _ = look_up(table, rows, positions)
        known = (full > 0) & (full < len(lut))
        nowhere = known & (lut[np.where(known, full, 0)] == 0)
        if not nowhere.any():
            self.nowhere.forget()
            return []

        requests, positions, full = requests[nowhere], positions[nowhere], full[nowhere]

        def explain(n: int) -> Explained:
            detail = f"full slot {int(full[n])}, inside the window, leads to no SWA slot"
            return detail, [], Cause("swa_slot_missing")

        return self.of_entries(
            view, group, explain, requests=requests, positions=positions, slots=full, repeats=self.nowhere
        )
