"""Tokens that are written to another slot than their row of the block table names."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.capture.host_arrays import ragged_index
from ...recorder.state.events import SlotEvent
from ...recorder.state.forward import Forward
from ...recorder.trace.reader import EventView
from ..report.findings import Finding
from .check import Covered, HistoryCheck, by_request, register
from .history import History
from .view import ForwardView

_MOST_ENTRIES: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """Entries of a row that were recorded for a request before it wrote them: position to the event and the slot."""

    request_id: int
    entries: dict[int, tuple[int, int]]


@register
class TableEntryDiffers(HistoryCheck):
    """A forward writes a token to another slot than its row of the block table names for the position.

    Invariant: if the trace says what stands in the entry of a position that a forward writes, the token goes to the slot
    that stands there. An entry is recorded by a run of the forward's own event, or by an earlier one: of the same request, behind
    all that it had computed then. Evidence: the event that recorded the entry, the forward. Legitimate exceptions: entries that
    no event gave for this request (an earlier one's, a draft's, those that forwards left) say nothing; nor do entries whose slot
    was given back since, or a token that is written nowhere (a negative slot). Judged in every trace.
    """

    kind = "table_entry_differs"
    finds = "a forward writes a token to another slot than its row names for the position"
    covered = Covered.COMPILED
    events = frozenset({"alloc", "free", "evict", "status"})

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._ahead: dict[tuple[int, int], _Ahead] = {}

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request of which tokens go elsewhere than its row says."""
        runs = view.event.ints("table_row")
        if not len(runs) and not self._ahead:
            return []
        findings = []
        for table in range(len(view.tables.req_to_token)):
            findings += self._judge(view, table)
        return findings

    def event(self, view: EventView) -> list[Finding]:
        """Note what an allocation says of its request's row, and forget what a free or a status makes untrue."""
        known = self.history.known
        if view.kind == "status":
            request, rows = int(view.scalar("request_id")), view.ints("req_pool_indices").tolist()
            self._drop([key for key, one in self._ahead.items() if key[1] in rows or one.request_id == request])
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
        """Whether entries were recorded that no forward has written yet."""
        return bool(self._ahead)

    def forget(self) -> None:
        """Forget what was recorded."""
        self._ahead.clear()

    def _judge(self, view: ForwardView, table: int) -> list[Finding]:
        forward, cells = view.forward, view.tables.req_to_token[table]
        tokens = self.history.tokens(view)
        rows, positions = forward.req_pool_indices[tokens.request], tokens.position
        slots = forward.out_cache_loc[table][: len(rows)]
        inside = (rows > 0) & (rows < cells.shape[0]) & (positions >= 0) & (positions < cells.shape[1])
        stands = cells[np.where(inside, rows, 0), np.where(inside, positions, 0)]
        width = cells.shape[1]
        given_rows, given_positions, given_slots = _entries(view.event, table)
        events = np.where(np.isin(rows * width + positions, given_rows * width + given_positions), forward.event, -1)
        self._drop_others(table, forward)
        for (number, row), one in self._ahead.items():
            if number == table:
                for i in np.flatnonzero(rows == row).tolist():
                    events[i] = max(int(events[i]), one.entries.pop(int(positions[i]), (-1, 0))[0])
        self._drop([key for key, one in self._ahead.items() if not one.entries])
        self._note_ahead(table, forward, given_rows, given_positions, given_slots)
        wrong = np.flatnonzero(inside & (events >= 0) & (slots >= 0) & (stands != slots))
        group = next((one.pool.index for one in view.groups if one.pool.group.table == table), -1)
        if not len(wrong) or group < 0:
            return []
        return [
            self.of_request(
                forward,
                r,
                f"is written to slot {slots[mine[0]]}, its row names slot {stands[mine[0]]}",
                group=group,
                position=int(positions[mine[0]]),
                slot=int(slots[mine[0]]),
                count=len(mine),
                events=np.unique(events[mine]).tolist(),
            )
            for r, mine in by_request(tokens.request[wrong], wrong)
        ]

    def _drop_others(self, table: int, forward: Forward) -> None:
        """Forget what was recorded of rows that are another request's now."""
        owner = dict(zip(forward.req_pool_indices.tolist(), forward.request_ids.tolist(), strict=True))
        stale = [key for key, one in self._ahead.items() if owner.get(key[1], one.request_id) != one.request_id]
        self._drop([key for key in stale if key[0] == table])

    def _give_back(self, event: SlotEvent) -> None:
        """Forget entries that lead to slots which are given back: what stands there now nobody knows."""
        for part in event.parts:
            table = self.history.header.groups[part.group].table
            freed = set(part.slots.tolist())
            for (number, _), one in self._ahead.items():
                if number == table:
                    for position in [position for position, (_, slot) in one.entries.items() if slot in freed]:
                        del one.entries[position]
        self._drop([key for key, one in self._ahead.items() if not one.entries])

    def _note_ahead(
        self, table: int, forward: Forward, rows: Int64Array, positions: Int64Array, slots: Int64Array
    ) -> None:
        """Note entries that a forward gives behind all that its requests have computed when it is through."""
        if not len(rows):
            return
        ends = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        requests = zip(forward.req_pool_indices.tolist(), forward.request_ids.tolist(), ends.tolist(), strict=True)
        for row, request_id, end in requests:
            if row > 0 and request_id >= 0:
                mine = (rows == row) & (positions >= end)
                self._note(table, row, request_id, positions[mine], slots[mine], forward.event)

    def _note(
        self, table: int, row: int, request_id: int, positions: Int64Array, slots: Int64Array, event: int
    ) -> None:
        if not len(positions):
            return
        if len(positions) + sum(len(one.entries) for one in self._ahead.values()) > _MOST_ENTRIES:
            self._ahead.clear()
            return
        before = self._ahead.get((table, row))
        entries = before.entries if before is not None and before.request_id == request_id else {}
        entries.update((p, (event, slot)) for p, slot in zip(positions.tolist(), slots.tolist(), strict=True))
        self._ahead[table, row] = _Ahead(request_id=request_id, entries=entries)

    def _drop(self, keys: list[tuple[int, int]]) -> None:
        for key in keys:
            del self._ahead[key]


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
    return (
        rows,
        ragged_index(view.ints("table_start")[mine], counts[mine]),
        view.ints("table_slots")[np.repeat(mine, counts)],
    )
