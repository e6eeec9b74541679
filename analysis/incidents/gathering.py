"""One pass over a trace that fills `Facts`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView, TraceBatch, TraceReader
from ...recorder.trace.schema import RECEIVE, TIER_POOL
from .changed_bytes import ChangedBytes, named_slots
from .facts import (
    MAX_PLACES,
    MAX_REWRITES,
    MAX_STATUSES,
    NOBODY,
    Begin,
    Fact,
    Facts,
    Rewrite,
    SlotFacts,
    Status,
    Wanted,
)
from .places import FINDING, Places

_SLOTS_OF_A_REWRITE: Final = 64


def gather(traces: Sequence[Path], places: Places) -> Facts:
    """Read what a trace, or the segments of one, tells of a report's places.

    A torn or damaged trace gives what is whole of it. Of an event whose columns do not fit one another nothing is taken.

    Raises:
        TraceError: the trace cannot be read at all.
    """
    gathering: _Gathering | None = None
    for path in traces:
        with TraceReader(path) as reader:
            if gathering is None:
                gathering = _Gathering(reader.header, _wanted(places, reader.header))
            for item in reader.stream():
                if isinstance(item, TraceBatch):
                    gathering.take(item)
    return gathering.facts if gathering is not None else Facts()


def _wanted(places: Places, header: TraceHeader) -> Wanted:
    groups = header.groups
    masks = [np.zeros(group.num_slots, np.bool_) for group in groups]
    first: dict[tuple[int, int], int] = {}
    until: dict[tuple[int, int], int] = {}
    events, requests = set(), set()
    for i in range(min(len(places), MAX_PLACES)):
        group, slot, event = (int(places[name][i]) for name in ("group", "slot", "event"))
        requests.add(int(places["request"][i]))
        if places["source"][i] == FINDING:
            events.add(event)
        if group < 0 and slot > 0:  # a slot of the block table
            group = next((g for g, known in enumerate(groups) if known.lut < 0), -1)
        if 0 <= group < len(groups) and 0 < slot < groups[group].num_slots:
            masks[group][slot] = True
            first[group, slot] = min(event, first.get((group, slot), event))
            until[group, slot] = max(event, until.get((group, slot), event))
    return Wanted(
        slots=masks, first=first, until=until, requests=frozenset(requests - {NOBODY}), events=frozenset(events)
    )


class _Gathering:
    """The state of the pass: tables of rows, the recent forwards, and what was found."""

    def __init__(self, header: TraceHeader, wanted: Wanted) -> None:
        self.facts = Facts(header=header)
        self._header = header
        self._wanted = wanted
        rows = max((table.rows for table in header.tables), default=0)
        self._owner = np.full(rows, NOBODY, np.int64)
        self._length = np.zeros(rows, np.int64)
        self._changed_rows: list[tuple[int, int, int, int, Int64Array]] = []
        self._luts = [np.zeros(length, np.int64) for length in header.lut_lens]
        self._bytes = ChangedBytes(header)
        self._last_slots = {
            (g, group.num_slots - 1)
            for g, group in enumerate(header.groups)
            if wanted.slots[g][-1:].any() and group.lut < 0
        }

    def take(self, batch: TraceBatch) -> None:
        """Take one batch of events."""
        for view in batch:
            kind = view.kind
            if kind == "mark":
                continue
            try:
                if len(view.ints("table_row")):
                    self._table_changes(view)
                if self._luts and len(view.ints("lut_start")):
                    self._lut_changes(view)
                if kind == "forward":
                    self._forward(view)
                elif kind in ("alloc", "free", "evict"):
                    self._slots(view, kind)
                elif kind == "status":
                    self._status(view)
                elif kind == "transfer":
                    self._transfer(view)
                elif kind == "sample":
                    self.facts.late_samples += 1
                elif kind == "kv_copy":
                    self._copy(view)
                if kind in ("forward", "sweep", "transfer") and len(view.ints("kv_change_slot")):
                    for group, slot, fact in self._bytes.changes(view, self._wanted.slots):
                        self._add(group, slot, fact)
            except (ValueError, IndexError, OverflowError):
                continue  # an event that contradicts itself; the replay has said so

    def _note(self, group: int, slots: Int64Array, event: int, what: str, request_id: int, row: int = -1) -> None:
        if not 0 <= group < len(self._wanted.slots):
            return
        mask = self._wanted.slots[group]
        inside = slots[(slots > 0) & (slots < len(mask))]
        for slot in inside[mask[inside]].tolist():
            self._add(group, slot, Fact(event=event, what=what, request_id=request_id, row=row))

    def _add(self, group: int, slot: int, fact: Fact) -> None:
        if fact.event <= self._wanted.until[group, slot]:
            key = group, slot
            if key not in self.facts.slots:
                self.facts.slots[key] = SlotFacts(self._wanted.first[key])
            self.facts.slots[key].add(fact)

    def _slots(self, view: EventView, kind: str) -> None:
        what = kind if kind != "alloc" else str(view.scalar("status")) or "alloc"
        rows = view.ints("req_pool_indices")
        request_id, row = int(view.scalar("request_id")), int(rows[0]) if len(rows) else -1
        runs = named_slots(view, self._header)
        if view.number in self._wanted.events:
            self.facts.named[view.number] = runs
        for group, slots in runs.items():
            self._note(group, slots, view.number, what, request_id, row)

    def _transfer(self, view: EventView) -> None:
        status, receives = str(view.scalar("status")), str(view.scalar("mode")) == RECEIVE
        what = "sent"
        if receives:
            what = {"start": "receiving", "end": "received"}.get(status, "receive_failed")
        runs = named_slots(view, self._header)
        if view.number in self._wanted.events:
            self.facts.named[view.number] = runs
        for group, slots in runs.items():
            self._note(group, slots, view.number, what, int(view.scalar("request_id")))
        if what == "received":
            self._bytes.wrote(view)

    def _copy(self, view: EventView) -> None:
        columns = [view.ints(f"copy_{name}") for name in ("group", "dst_tier", "dst", "count", "src_tier")]
        for group, tier, start, count, source in zip(*(c.tolist() for c in columns), strict=True):
            limit = self._header.groups[group].num_slots if 0 <= group < len(self._header.groups) else 0
            if tier == TIER_POOL and 0 <= start < limit and 0 < count <= limit - start:
                what = "copied" if source == TIER_POOL else "loaded"
                self._note(group, np.arange(start, start + count), view.number, what, NOBODY)

    def _status(self, view: EventView) -> None:
        rows = view.ints("req_pool_indices")
        row, request_id, status = (
            int(rows[0]) if len(rows) else -1,
            int(view.scalar("request_id")),
            view.scalar("status"),
        )
        if status == "admitted" and 0 <= row < len(self._length):
            self._owner[row], self._length[row] = request_id, 0
        told = self.facts.statuses[request_id] if request_id in self._wanted.requests else None
        if told is not None and len(told) < MAX_STATUSES:
            told.append(Status(event=view.number, status=str(status), row=row))

    def _table_changes(self, view: EventView) -> None:
        index, rows, starts, counts = (view.ints(f"table_{name}") for name in ("index", "row", "start", "count"))
        slots = view.ints("table_slots")
        ends = np.cumsum(counts)
        for i, (table, row, start, count) in enumerate(
            zip(index.tolist(), rows.tolist(), starts.tolist(), counts.tolist(), strict=True)
        ):
            if 0 <= row < len(self._owner) and start < self._length[row]:
                end = int(ends[i])
                self._changed_rows.append((view.number, table, row, start, slots[end - count : end]))

    def _forward(self, view: EventView) -> None:
        rows, ids, prefix = (view.ints(name) for name in ("req_pool_indices", "request_ids", "prefix_lens"))
        extend = np.maximum(view.ints("extend_lens"), 0)
        inside = (rows > 0) & (rows < len(self._owner))
        if self._changed_rows:
            self._judge_changed_rows(rows[inside], ids[inside])
        runner = int(view.scalar("runner"))
        if view.number in self._wanted.events:
            self.facts.modes[view.number] = str(view.scalar("mode"))
        if runner == 0:
            self._owner[rows[inside]] = ids[inside]
            self._length[rows[inside]] = (prefix + extend)[inside]
        for i in np.flatnonzero(inside).tolist():
            request_id = int(ids[i])
            if request_id not in self._wanted.requests:
                continue
            if view.number in self._wanted.events:
                self.facts.prefixes[view.number, request_id] = int(prefix[i])
            if request_id not in self.facts.begins:
                self.facts.begins[request_id] = Begin(
                    event=view.number,
                    forward=int(view.scalar("forward")),
                    mode=str(view.scalar("mode")),
                    prefix_len=int(prefix[i]),
                    row=int(rows[i]),
                )
        extend = np.where(rows == 0, 0, extend)
        self._writes(view, np.repeat(ids, extend), np.repeat(prefix - np.cumsum(extend) + extend, extend), runner)
        self._bytes.wrote(view)

    def _writes(self, view: EventView, owners: Int64Array, bases: Int64Array, runner: int) -> None:
        """Note which of the wanted slots a forward writes, in every group of its runner, and where its padding goes."""
        tokens, real = len(view.ints("input_ids")), len(owners)
        if real > tokens:
            return
        out = view.ints("out_cache_loc")
        for number, group in enumerate(self._header.groups):
            if group.runner != runner:
                continue
            full = out[group.table * tokens : (group.table + 1) * tokens]
            slots = self._behind_lut(group.lut, full) if group.lut >= 0 else full
            mask = self._wanted.slots[number]
            found = np.flatnonzero((slots > 0) & (slots < len(mask)))
            for i in found[mask[slots[found]]].tolist():
                fact = Fact(
                    event=view.number,
                    what="written" if i < real else "padded",
                    request_id=int(owners[i]) if i < real else NOBODY,
                    via=int(full[i]) if group.lut >= 0 else -1,
                    position=int(bases[i]) + i if i < real else -1,
                )
                self._add(number, int(slots[i]), fact)
            if (number, group.num_slots - 1) in self._last_slots and bool((slots[real:] < 0).any()):
                self.facts.padding_nowhere.append(view.number)

    def _behind_lut(self, number: int, full: Int64Array) -> Int64Array:
        lut = self._luts[number]
        inside = (full >= 0) & (full < len(lut))
        return np.where(inside, lut[np.where(inside, full, 0)], 0)

    def _lut_changes(self, view: EventView) -> None:
        index, starts, counts = (view.ints(f"lut_{name}") for name in ("index", "start", "count"))
        ends = np.cumsum(counts)
        slots = view.ints("lut_slots")
        for number, start, count, end in zip(*(c.tolist() for c in (index, starts, counts, ends)), strict=True):
            lut = self._luts[number]
            if not (start >= 0 and 0 < count <= len(lut) - start):
                continue
            new, old = slots[end - count : end], lut[start : start + count]
            moved = np.flatnonzero((old > 0) & (new > 0) & (old != new))
            for i in moved.tolist():
                for group, known in enumerate(self._header.groups):
                    if known.lut == number and new[i] < known.num_slots and self._wanted.slots[group][new[i]]:
                        self._add(group, int(new[i]), Fact(event=view.number, what="remapped", via=start + i))
            lut[start : start + count] = new

    def _judge_changed_rows(self, rows: Int64Array, ids: Int64Array) -> None:
        """Table entries that changed inside what a request had computed: its, if it goes on with its next forward."""
        going_on = dict(zip(rows.tolist(), ids.tolist(), strict=True))
        kept = []
        for change in self._changed_rows:
            event, table, row, start, slots = change
            owner = int(self._owner[row])
            if row not in going_on:
                kept.append(change)
                continue
            if going_on[row] != owner or owner not in self._wanted.requests:
                continue
            found = self.facts.rewrites[owner]
            length = int(self._length[row])
            if len(found) < MAX_REWRITES and start < length:
                inside = slots[: length - start]
                found.append(
                    Rewrite(
                        event=event,
                        table=table,
                        row=row,
                        first_position=start,
                        slots=tuple(inside[:_SLOTS_OF_A_REWRITE].tolist()),
                        count=len(inside),
                        length=length,
                    )
                )
        self._changed_rows = kept[-1024:]
