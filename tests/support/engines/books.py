"""Who holds which slot, by what a trace says alone: each request's own slots, those it shares, the cache's."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from kvcanary.recorder.trace.reader import TraceReader, read_trace

NOBODY = -1
CACHE = -2


class Books:
    """Takes the events in order and notes in `wrong` whatever a clean engine that tells everything would not do."""

    def __init__(self, header: Any) -> None:
        self.header = header
        self.wrong: list[str] = []
        # Of each group: the holder of each slot that is out of the pool, and what each request shares.
        self.holder: list[dict[int, int]] = [{} for _ in header.groups]
        self.shared: list[dict[int, set[int]]] = [defaultdict(set) for _ in header.groups]
        self.row: dict[int, int] = {}
        self.requests: set[int] = set()
        self.statuses: dict[str, int] = defaultdict(int)
        self.tables = [np.zeros((table.rows, table.width), np.int64) for table in header.tables]
        self.luts = [np.zeros(length, np.int64) for length in header.lut_lens]
        # Transfers under way, by direction, room and group: their slots, and whose they are.
        self.transfers: dict[tuple[str, int, int], tuple[list[int], int]] = {}
        # Forwards whose tokens have not come back: the requests in them.
        self.in_flight: dict[int, set[int]] = {}

    def take(self, view: Any) -> None:
        getattr(self, f"_{view.kind}", lambda view: None)(view)

    def finish(self, *, complete: bool = True) -> None:
        if complete:
            for request, row in self.row.items():
                self._wrong(None, f"request {request} still has row {row} at the end")
            if self.transfers:
                self._wrong(None, f"transfers under way at the end: {list(self.transfers)}")
            for group, holder in enumerate(self.holder):
                left = [slot for slot, who in holder.items() if who != CACHE]
                if left:
                    self._wrong(None, f"group {group}: slots {left[:5]} are held at the end, not by the cache")

    def _wrong(self, view: Any, text: str) -> None:
        self.wrong.append(text if view is None else f"event {view.number} ({view.kind}): {text}")

    def _slots(self, view: Any) -> Any:
        groups, starts, counts = (view.ints(name).tolist() for name in ("slot_group", "slot_start", "slot_count"))
        for group, start, count in zip(groups, starts, counts, strict=True):
            for slot in range(start, start + count):
                yield group, slot

    def _request(self, view: Any) -> None:
        self.requests.add(view.scalar("request_id"))

    def _status(self, view: Any) -> None:
        request, status, rows = view.scalar("request_id"), view.scalar("status"), view.ints("req_pool_indices").tolist()
        self.statuses[status] += 1
        if request not in self.requests:
            self._wrong(view, f"request {request} is not known")
        if status == "admitted":
            if request in self.row or rows[0] in self.row.values():
                self._wrong(view, f"row {rows} of request {request} is taken, or it has one: {self.row}")
            self.row[request] = rows[0]
            return
        if self.row.pop(request, None) != (rows[0] if rows else None):
            self._wrong(view, f"request {request} gives back row {rows}")
        if any(request in members for members in self.in_flight.values()):
            self._wrong(view, f"request {request} leaves while a forward with it is in flight")
        for group, holder in enumerate(self.holder):
            left = [slot for slot, who in holder.items() if who == request]
            if left:
                self._wrong(view, f"group {group}: request {request} leaves, slots {left[:5]} are still its own")
            self.shared[group].pop(request, None)

    def _alloc(self, view: Any) -> None:
        request, status = view.scalar("request_id"), view.scalar("status")
        if request != NOBODY and self.row.get(request) != view.ints("req_pool_indices").tolist()[0]:
            self._wrong(view, f"request {request} has row {self.row.get(request)}")
        for group, slot in self._slots(view):
            holder = self.holder[group]
            if slot == 0:
                self._wrong(view, "slot 0 is padding")
            if status == "":
                if slot in holder:
                    self._wrong(view, f"group {group}: slot {slot} is held by {holder[slot]}")
                holder[slot] = CACHE if request == NOBODY else request
            elif status == "cached":
                if holder.get(slot) != request:
                    self._wrong(view, f"group {group}: slot {slot} is {holder.get(slot)}'s, handed over by {request}")
                holder[slot] = CACHE
            else:
                if holder.get(slot) != CACHE:
                    self._wrong(view, f"group {group}: slot {slot} is shared and is {holder.get(slot)}'s")
                self.shared[group][request].add(slot)

    def _transfer(self, view: Any) -> None:
        request, status = view.scalar("request_id"), view.scalar("status")
        for group in set(view.ints("slot_group").tolist()):
            key = (view.scalar("mode"), view.scalar("room"), group)
            slots = [slot for g, slot in self._slots(view) if g == group]
            if status == "start":
                if key in self.transfers:
                    self._wrong(view, f"{key} is under way")
                self.transfers[key] = (slots, request)
            elif self.transfers.pop(key, None) != (slots, request):
                self._wrong(view, f"{key} began with other slots, or for another request")
            written = [] if key[0] == "send" else slots
            self._look(view, group, request, [] if written else slots, written)

    def _free(self, view: Any) -> None:
        request = view.scalar("request_id")
        expected = CACHE if view.kind == "evict" or request == NOBODY else request
        under_way = {(group, slot) for (_, _, group), (slots, _) in self.transfers.items() for slot in slots}
        for group, slot in self._slots(view):
            if (group, slot) in under_way:
                self._wrong(view, f"group {group}: slot {slot} is being transferred")
            if self.holder[group].pop(slot, None) != expected:
                self._wrong(view, f"group {group}: slot {slot} is not {expected}'s")
            # A request that shares a sliding-window half may have moved on from it.
            if self.header.groups[group].window == 0:
                sharing = [r for r, slots in self.shared[group].items() if slot in slots]
                if sharing:
                    self._wrong(view, f"group {group}: slot {slot} is shared by {sharing}")
            for slots in self.shared[group].values():
                slots.discard(slot)

    _evict = _free

    def _sample(self, view: Any) -> None:
        if self.in_flight.pop(view.scalar("forward"), None) is None:
            self._wrong(view, f"forward {view.scalar('forward')} is not waited for")

    def _forward(self, view: Any) -> None:
        self._apply(view)
        rows, requests = view.ints("req_pool_indices").tolist(), view.ints("request_ids").tolist()
        prefix, extend = view.ints("prefix_lens").tolist(), view.ints("extend_lens").tolist()
        out, at = view.ints("out_cache_loc"), 0
        if requests and view.scalar("runner") == 0 and not view.ints("sampled_lens").size:
            self.in_flight[view.scalar("forward")] = {r for r, row in zip(requests, rows, strict=True) if row}
        for row, request, before, count in zip(rows, requests, prefix, extend, strict=True):
            if row == 0:
                continue
            if self.row.get(request) != row:
                self._wrong(view, f"request {request} runs in row {row}, has {self.row.get(request)}")
            for number, group in enumerate(self.header.groups):
                if group.runner != view.scalar("runner"):
                    continue
                read = self.tables[group.table][row, max(0, before - group.window if group.window else 0) : before]
                written = out[at : at + count]
                if group.lut >= 0:
                    read, written = self.luts[group.lut][read], self.luts[group.lut][written]
                    written = written[written != 0]
                self._look(view, number, request, read.tolist(), written.tolist())
            self.tables[0][row, before : before + count] = out[at : at + count]
            at += count

    def _look(self, view: Any, group: int, request: int, read: list[int], written: list[int]) -> None:
        holder, shared = self.holder[group], self.shared[group][request]
        foreign = [slot for slot in written if holder.get(slot) != request]
        if foreign:
            self._wrong(view, f"group {group}: request {request} writes {foreign[:5]}, {holder.get(foreign[0])}'s")
        foreign = [slot for slot in read if holder.get(slot) != request and slot not in shared]
        if foreign:
            self._wrong(view, f"group {group}: request {request} reads {foreign[:5]}, {holder.get(foreign[0])}'s")

    def _apply(self, view: Any) -> None:
        """Bring the tables to what the forward reads."""
        values, at = view.ints("table_slots"), 0
        runs = zip(*(view.ints(f"table_{name}").tolist() for name in ("index", "row", "start", "count")), strict=True)
        for index, row, start, count in runs:
            self.tables[index][row, start : start + count] = values[at : at + count]
            at += count
        values, at = view.ints("lut_slots"), 0
        for index, start, count in zip(
            *(view.ints(f"lut_{name}").tolist() for name in ("index", "start", "count")), strict=True
        ):
            self.luts[index][start : start + count] = values[at : at + count]
            at += count


def read_books(path: Path, *, complete: bool = True) -> Books:
    """Return the books of a whole trace; `complete` says that every request has gone through."""
    with TraceReader(path) as reader:
        books = Books(reader.header)
    for view in read_trace(path):
        books.take(view)
    books.finish(complete=complete)
    return books
