"""One pass over a trace that fills `Facts`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.replay_pass.invalidation import Runs
from ...recorder.state.events import (
    CopyEvent,
    GroupSlots,
    KnownEvent,
    SampleEvent,
    SlotEvent,
    StatusEvent,
    TransferEvent,
    read_known_event,
)
from ...recorder.state.forward import Forward, UnusableEventError, batch_tokens, read_forward
from ...recorder.state.tables import StateListener, StateTables
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import TraceBatch, TraceReader
from ...recorder.trace.schema import RECEIVE, TIER_POOL
from .changed_bytes import ChangedBytes
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
    """Read what a trace, or the segments of one, holds about a report's places.

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


class _Gathering(StateListener):
    """The state of the pass: the tables, whose row is whose, the recent forwards, and what was found.

    The tables report each of their changes to it, before they make it.
    """

    def __init__(self, header: TraceHeader, wanted: Wanted) -> None:
        self.facts = Facts(header=header)
        self._header = header
        self._wanted = wanted
        rows = max((table.rows for table in header.tables), default=0)
        self._owner = np.full(rows, NOBODY, np.int64)
        self._length = np.zeros(rows, np.int64)
        self._event = -1
        self._changed_rows: list[tuple[int, int, int, int, Int64Array]] = []
        self._tables = StateTables(header, backend="cpu", listener=self)
        self._bytes = ChangedBytes(header)
        self._last_slots = {
            (g, group.num_slots - 1)
            for g, group in enumerate(header.groups)
            if wanted.slots[g][-1:].any() and group.lut < 0
        }

    def take(self, batch: TraceBatch) -> None:
        """Take one batch of events."""
        for view in batch:
            if view.kind == "mark":
                continue
            self._event = view.number
            try:
                self._tables.apply_changes(view)
                if view.kind == "forward":
                    self._forward(read_forward(view, self._header))
                else:
                    self._known(read_known_event(view, self._header.groups), str(view.scalar("status")))
                if view.kind in ("forward", "sweep", "transfer") and len(view.ints("kv_change_slot")):
                    for group, slot, fact in self._bytes.changes(view, self._wanted.slots):
                        self._add(group, slot, fact)
            except UnusableEventError:
                continue  # the replay has said so

    def _add(self, group: int, slot: int, fact: Fact) -> None:
        if fact.event <= self._wanted.until[group, slot]:
            key = group, slot
            if key not in self.facts.slots:
                self.facts.slots[key] = SlotFacts(self._wanted.first[key])
            self.facts.slots[key].add(fact)

    # --- tables

    def table_runs(self, tables: StateTables, index: int, runs: Runs) -> None:
        """Remember entries that change inside what a row's request has computed, until its next forward."""
        del tables
        indices, rows, starts, lens, values = runs
        ends = np.cumsum(lens)
        inside = (indices == index) & (rows >= 0) & (rows < len(self._owner))
        inside &= starts < self._length[np.where(inside, rows, 0)] if len(self._length) else False
        for i in np.flatnonzero(inside).tolist():
            slots = values[ends[i] - lens[i] : ends[i]]
            self._changed_rows.append((self._event, index, int(rows[i]), int(starts[i]), slots))

    def lut_entries(self, tables: StateTables, *, index: int, places: Int64Array, values: Int64Array) -> None:
        """Note which wanted sliding-window slots another full slot leads to now."""
        old = tables.luts[index][places]
        for i in np.flatnonzero((old > 0) & (values > 0) & (old != values)).tolist():
            for group, known in enumerate(self._header.groups):
                slot = int(values[i])
                if known.lut == index and slot < known.num_slots and self._wanted.slots[group][slot]:
                    self._add(group, slot, Fact(event=self._event, what="remapped", via=int(places[i])))

    # --- what happens between forwards

    def _known(self, event: KnownEvent | None, status: str) -> None:
        if isinstance(event, SlotEvent):
            # The recorded status: an old trace's note says that slots were shared which were given out anew.
            what = event.kind if event.kind != "alloc" else status or "alloc"
            self._note(event.parts, what, event.request_id, event.row)
        elif isinstance(event, TransferEvent):
            what = "sent"
            if event.direction == RECEIVE:
                what = {"start": "receiving", "end": "received"}.get(event.status, "receive_failed")
            self._note(event.parts, what, event.request_id)
            if what == "received":
                self._bytes.received(event)
        elif isinstance(event, CopyEvent):
            for copy in event.copies:
                if copy.dst_tier == TIER_POOL:
                    what = "copied" if copy.src_tier == TIER_POOL else "loaded"
                    self._note_slots(copy.group, copy.dst, what)
        elif isinstance(event, SampleEvent):
            self.facts.late_samples += 1
        elif isinstance(event, StatusEvent):
            if event.status == "admitted" and 0 <= event.row < len(self._length):
                self._owner[event.row], self._length[event.row] = event.request_id, 0
            if event.request_id in self._wanted.requests:
                found = self.facts.statuses[event.request_id]
                if len(found) < MAX_STATUSES:
                    found.append(Status(event=event.event, status=event.status, row=event.row))

    def _note(self, parts: Sequence[GroupSlots], what: str, request_id: int, row: int = -1) -> None:
        if self._event in self._wanted.events:
            self.facts.named[self._event] = {part.group: part.slots for part in parts}
        for part in parts:
            self._note_slots(part.group, part.slots, what, request_id, row)

    def _note_slots(self, group: int, slots: Int64Array, what: str, request_id: int = NOBODY, row: int = -1) -> None:
        for slot in slots[self._wanted.slots[group][slots]].tolist():
            self._add(group, slot, Fact(event=self._event, what=what, request_id=request_id, row=row))

    # --- forwards

    def _forward(self, forward: Forward) -> None:
        rows, ids = forward.req_pool_indices, forward.request_ids
        inside = (rows > 0) & (rows < len(self._owner))
        if self._changed_rows:
            self._judge_changed_rows(rows[inside], ids[inside])
        asked = forward.event in self._wanted.events
        if asked:
            self.facts.modes[forward.event] = forward.mode
        if forward.runner == 0:
            self._owner[rows[inside]] = ids[inside]
            self._length[rows[inside]] = (forward.prefix_lens + np.maximum(forward.extend_lens, 0))[inside]
        for i in np.flatnonzero(inside).tolist():
            request_id, prefix = int(ids[i]), int(forward.prefix_lens[i])
            if request_id not in self._wanted.requests:
                continue
            if asked:
                self.facts.prefixes[forward.event, request_id] = prefix
            if request_id not in self.facts.begins:
                self.facts.begins[request_id] = Begin(
                    event=forward.event, forward=forward.forward, mode=forward.mode, prefix_len=prefix, row=int(rows[i])
                )
        self._writes(forward)
        self._bytes.wrote(forward)

    def _writes(self, forward: Forward) -> None:
        """Note which of the wanted slots a forward writes, in every group of its runner, and where its padding goes."""
        tokens = batch_tokens(forward)
        real = len(tokens.request)
        for number, group in enumerate(self._header.groups):
            if group.runner != forward.runner:
                continue
            slots = full = forward.out_cache_loc[group.table]
            if group.lut >= 0:
                lut = self._tables.luts[group.lut]
                inside = (full >= 0) & (full < len(lut))
                slots = np.where(inside, lut[np.where(inside, full, 0)], 0)
            mask = self._wanted.slots[number]
            found = np.flatnonzero((slots > 0) & (slots < len(mask)))
            for i in found[mask[slots[found]]].tolist():
                fact = Fact(
                    event=forward.event,
                    what="written" if i < real else "padded",
                    request_id=int(forward.request_ids[tokens.request[i]]) if i < real else NOBODY,
                    via=int(full[i]) if group.lut >= 0 else -1,
                    position=int(tokens.position[i]) if i < real else -1,
                )
                self._add(number, int(slots[i]), fact)
            if (number, group.num_slots - 1) in self._last_slots and bool((slots[real:] < 0).any()):
                self.facts.padding_nowhere.append(forward.event)

    def _judge_changed_rows(self, rows: Int64Array, ids: Int64Array) -> None:
        """Table entries that changed inside what a request had computed: its, if it goes on with its next forward."""
        continuing = dict(zip(rows.tolist(), ids.tolist(), strict=True))
        kept = []
        for change in self._changed_rows:
            event, table, row, start, slots = change
            owner = int(self._owner[row])
            if row not in continuing:
                kept.append(change)
                continue
            if continuing[row] != owner or owner not in self._wanted.requests:
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
