"""One pass over a trace that fills `Facts`."""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.replay_pass.entries import Runs
from ...recorder.state.events import (
    CopyEvent,
    GroupSlots,
    KnownEvent,
    SampleEvent,
    SlotCopy,
    SlotEvent,
    StatusEvent,
    TransferEvent,
    read_known_event,
)
from ...recorder.state.forward import Forward, UnusableEventError, batch_tokens, read_forward
from ...recorder.state.tables import StateListener, StateTables
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView, TraceBatch, TraceReader
from ...recorder.trace.schema import LET_GO, NOBODYS, RECEIVE, SEEN, TIER_POOL
from .facts import HANDED_IN, MAX_PLACES, NOBODY, Begin, Fact, Facts, Rewrite, SlotFacts, Status
from .places import FINDING, Places

_MAX_STATUSES: Final = 32
_MAX_REWRITES: Final = 16
_MAX_CHANGED_ROWS: Final = 1024
_NOTHING: Final = np.empty(0, np.int64)
# Of bytes: pool group and slot of their write, its event, its event's kind.
Twin = tuple[tuple[int, int], int, str]

NO_TWIN: Final[Twin] = ((-1, -1), -1, "")
# The write is looked for among the last events that wrote bytes: it must come shortly before the change was seen.
RECENT_EVENTS: Final = 12


class _Written(NamedTuple):
    """What an event wrote: pool group, bytes `[n, capture_bytes]` and slots `[n]`, a stream."""

    event: int
    kind: str
    parts: list[tuple[int, ByteArray, Int64Array]]


class ChangedBytes:
    """Remembers the last events that wrote bytes, forwards and transfers that landed."""

    def __init__(self, header: TraceHeader) -> None:
        self._header = header
        self._recent: deque[_Written] = deque(maxlen=RECENT_EVENTS)
        # Event, pool group, slots that were filled.
        self._loads: deque[tuple[int, int, Int64Array]] = deque(maxlen=RECENT_EVENTS)

    def loaded(self, event: int, copy: SlotCopy) -> None:
        """Remember what a copy from another tier filled; of one inside the pool nothing is kept."""
        if copy.src_tier != TIER_POOL:
            self._loads.append((event, copy.group, copy.dst))

    def wrote(self, forward: Forward) -> None:
        """Remember a forward."""
        streams = zip(self._header.streams(forward.runner), forward.kv_bytes, strict=True)
        parts = [(group, data, forward.out_cache_loc[self._header.groups[group].table]) for (group, _), data in streams]
        self._recent.append(_Written(event=forward.event, kind="forward", parts=parts))
        lost = []
        for (group, data, slots), handed in zip(parts, forward.kv_submitted, strict=False):
            at = np.flatnonzero((data != handed).any(axis=1))  # what did not come to its slot may have come to another
            lost.append((group, handed[at], slots[at]))
        if lost:
            self._recent.append(_Written(event=forward.event, kind=HANDED_IN, parts=lost))

    def received(self, transfer: TransferEvent) -> None:
        """Remember a transfer that landed."""
        parts = [(transfer.group, data, transfer.slots) for data in transfer.landed]
        self._recent.append(_Written(event=transfer.event, kind="transfer", parts=parts))

    def changes(self, view: EventView, wanted: Sequence[BoolArray]) -> Iterator[tuple[int, int, Fact]]:
        """Yield pool group, slot and fact of each wanted slot that an event saw changed, each slot once."""
        streams = list(self._header.streams(int(view.scalar("runner"))))
        numbers, slots = (view.ints(f"kv_change_{name}") for name in ("stream", "slot"))
        changes = [
            (*streams[number], slot)
            for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True)
            if 0 <= number < len(streams)
        ]
        if len(changes) < len(numbers):
            return  # a stream that the header does not have: whose bytes are whose, nobody knows
        data, at = view.bytes("kv_change_bytes"), 0
        looked = next((recent.event for recent in reversed(self._recent) if recent.event < view.number), NOBODY)
        done = set()
        for group, stream, slot in changes:
            content = data[at : at + stream.capture_bytes]
            at += stream.capture_bytes
            mask = wanted[group]
            if (group, slot) in done or not 0 < slot < len(mask) or not mask[slot]:
                continue
            done.add((group, slot))
            others = {other for of_group, _, other in changes if of_group == group}
            twin, event, kind = self._twin(content, group, slot)
            fact = Fact(
                event=view.number,
                what="changed",
                via=looked,
                twin=twin,
                twin_event=event,
                twin_kind=kind,
                together=len(others),
                emptied=not content.any(),
                behind=self._behind(group, slot, others, looked),
            )
            yield group, slot, fact

    def _behind(self, group: int, slot: int, changed: set[int], since: int) -> int:
        """Return the last load since an event that filled the slot in front of those that changed with `slot`, and none of these."""
        first, end = slot, slot + 1
        while first - 1 in changed:
            first -= 1
        while end in changed:
            end += 1
        for event, of_group, filled in reversed(self._loads):
            if event > since and of_group == group and (filled == first - 1).any():
                return NOBODY if ((filled >= first) & (filled < end)).any() else event
        return NOBODY

    def _twin(self, content: ByteArray, group: int, slot: int) -> Twin:
        """Return the latest write of these very bytes elsewhere; one in another pool group says more than one beside."""
        beside = NO_TWIN
        if not content.any():
            return beside
        for recent in reversed(self._recent):
            for of_group, data, slots in recent.parts:
                if data.shape[1] != len(content):
                    continue
                for written in slots[np.flatnonzero((data == content).all(axis=1))].tolist():
                    if of_group != group:
                        return (of_group, written), recent.event, recent.kind
                    if written != slot and beside == NO_TWIN:
                        beside = (of_group, written), recent.event, recent.kind
        return beside


def gather(traces: Sequence[Path], places: Places) -> Facts:
    """Read what a trace, or the segments of one, holds about a report's places.

    A torn or damaged trace gives what is whole of it. Of an event whose columns do not fit one another nothing is taken.

    Raise `TraceError` if the trace cannot be read at all.
    """
    gathering: _Gathering | None = None
    for path in traces:
        with TraceReader(path) as reader:
            gathering = gathering or _Gathering(reader.header, places)
            for item in reader.stream():
                for view in item if isinstance(item, TraceBatch) else ():
                    gathering.take(view)
    return gathering.facts if gathering is not None else Facts()


class _Gathering(StateListener):
    """The state of the pass: the tables, whose row is whose, the recent forwards, and what was found.

    The tables report each of their changes to it, before they make it.
    """

    def __init__(self, header: TraceHeader, places: Places) -> None:
        self.facts = Facts(header=header)
        self._header = header
        # What to look for: a mask of slots for each pool group, each slot's first and last events, requests, events.
        self._slots = [np.zeros(group.num_slots, np.bool_) for group in header.groups]
        self._first: dict[tuple[int, int], int] = {}
        self._until: dict[tuple[int, int], int] = {}
        self._want(places)
        chosen = slice(0, MAX_PLACES)
        self._requests = frozenset(places["request"][chosen].tolist()) - {NOBODY}
        self._events = frozenset(places["event"][chosen][places["source"][chosen] == FINDING].tolist())
        self._seen = frozenset(places["event"][chosen].tolist())  # the events in which something is wrong at all
        pairs = np.unique(np.stack([places["request"][chosen], places["position"][chosen]], axis=1), axis=0)
        self._positions = {int(r): pairs[pairs[:, 0] == r, 1] for r in np.unique(pairs[:, 0])}  # ascending
        rows = max((table.rows for table in header.tables), default=0)
        self._owner = np.full(rows, NOBODY, np.int64)
        self._length = np.zeros(rows, np.int64)
        self._event = -1
        # Wanted requests that had a forward since their last status: where the last one of the target ended.
        self._running: dict[int, int] = {}
        # By pool group and host slot: how often it was stored since it was read, and whether it was read since.
        self._stored: dict[tuple[int, int], tuple[int, bool]] = {}
        # Those that nobody stored: what was computed here for the same tokens.
        self._only_seen: set[tuple[int, int]] = set()
        self._changed_rows: list[tuple[int, int, int, int]] = []  # event, row, start, count
        self._filled = -1, _NOTHING, _NOTHING, _NOTHING  # the last event with changes, and their rows, starts and ends
        self._tables = StateTables(header, backend="cpu", listener=self)
        self._bytes = ChangedBytes(header)

    def _want(self, places: Places) -> None:
        groups = self._header.groups
        columns = (places[name][:MAX_PLACES].tolist() for name in ("group", "slot", "event"))
        for group, slot, event in zip(*columns, strict=True):
            if group < 0 and slot > 0:  # a slot of the block table
                group = next((g for g, known in enumerate(groups) if known.lut < 0), -1)
            if 0 <= group < len(groups) and 0 < slot < groups[group].num_slots:
                self._slots[group][slot] = True
                self._first[group, slot] = min(event, self._first.get((group, slot), event))
                self._until[group, slot] = max(event, self._until.get((group, slot), event))

    def take(self, view: EventView) -> None:
        """Take an event."""
        if view.kind == "mark":
            return
        self._event = view.number
        try:
            self._tables.apply_changes(view)
            if view.kind == "forward":
                self._forward(read_forward(view, self._header))
            elif view.kind == "request":
                self.facts.prompts[view.scalar("request_id")] = view.scalar("prompt_len")
            else:
                self._known(read_known_event(view, self._header.groups), str(view.scalar("status")))
            if view.kind == "kv_copy":
                there, here = (view.ints(f"copy_{end}_hash") for end in ("src", "dst"))
                if len(there) and there.all() and np.array_equal(there, here):
                    self.facts.landed.add(view.number)
                self._note_not_loaded(view)
            if view.kind in ("forward", "sweep", "transfer") and len(view.ints("kv_change_slot")):
                for group, slot, fact in self._bytes.changes(view, self._slots):
                    self._add(group, slot, fact)
        except UnusableEventError:
            return  # the replay has said so

    def _add(self, group: int, slot: int, fact: Fact) -> None:
        key = group, slot
        if fact.event <= self._until[key]:
            self.facts.slots.setdefault(key, SlotFacts(self._first[key])).add(fact)

    # --- tables

    def table_runs(self, tables: StateTables, index: int, runs: Runs) -> None:
        """Remember entries that change inside what a row's request has computed, until its next forward."""
        del tables
        indices, rows, starts, lens, values = runs
        self._filled = self._event, rows[indices == index], starts[indices == index], (starts + lens)[indices == index]
        inside = (indices == index) & (rows >= 0) & (rows < len(self._owner))
        inside &= starts < self._length[np.where(inside, rows, 0)] if len(self._length) else False
        ends = np.cumsum(lens)
        for i in np.flatnonzero(inside).tolist():
            count = len(values[ends[i] - lens[i] : ends[i]])
            self._changed_rows.append((self._event, int(rows[i]), int(starts[i]), count))

    def lut_entries(self, tables: StateTables, *, index: int, places: Int64Array, values: Int64Array) -> None:
        """Note which wanted sliding-window slots another full slot leads to now."""
        old = tables.luts[index][places]
        for i in np.flatnonzero((old > 0) & (values > 0) & (old != values)).tolist():
            for group, known in enumerate(self._header.groups):
                slot = int(values[i])
                if known.lut == index and slot < known.num_slots and self._slots[group][slot]:
                    self._add(group, slot, Fact(event=self._event, what="remapped", via=int(places[i])))

    # --- what happens between forwards

    def _known(self, event: KnownEvent | None, status: str) -> None:
        if isinstance(event, SlotEvent):
            # The recorded status: an old trace's note says that slots were shared which were given out anew.
            said = {LET_GO: "let_go", NOBODYS: "nobodys"}.get(event.note, status or "alloc")
            what = said if event.kind == "alloc" else event.kind
            self._note(event.parts, what, event.request_id)
        elif isinstance(event, TransferEvent):
            what = "sent"
            if event.direction == RECEIVE:
                what = {"start": "receiving", "end": "received"}.get(event.status, "receive_failed")
            self._note(event.parts, what, event.request_id)
            if what == "received":
                self._bytes.received(event)
        elif isinstance(event, CopyEvent):
            for copy in event.copies:
                self._copy(copy, event.note)
                if copy.src_tier != TIER_POOL and event.request_id in self._requests:
                    self.facts.loads[event.request_id].append(self._event)
        elif isinstance(event, SampleEvent):
            self.facts.late_samples += 1
        elif isinstance(event, StatusEvent):
            if event.status == "admitted" and 0 <= event.row < len(self._length):
                self._owner[event.row], self._length[event.row] = event.request_id, 0
            self.facts.rows_told |= event.status == "admitted"
            self._running.pop(event.request_id, None)
            if event.request_id in self._requests:
                found = self.facts.statuses[event.request_id]
                if len(found) < _MAX_STATUSES:
                    found.append(Status(event=event.event, status=event.status))

    def _note(self, parts: Sequence[GroupSlots], what: str, request_id: int) -> None:
        if self._event in self._events:
            self.facts.named[self._event] = {part.group: part.slots for part in parts}
        # Whoever runs and joins slots gets them for its own (de-duplication): it holds no more than before.
        joins = what == "shared" and request_id not in self._running
        if request_id in self._requests and (joins or what in ("alloc", "free")):
            sign = -1 if what == "free" else 1
            self.facts.given[request_id] += [(self._event, part.group, sign * len(part.slots)) for part in parts]
        self.facts.frees_of_nobody |= what == "free" and request_id == NOBODY
        self.facts.shares_told |= what == "shared"
        for part in parts:
            self._note_slots(part.group, part.slots, what, request_id)

    def _note_not_loaded(self, view: EventView) -> None:
        """Note the pages that were to be loaded from where nobody knows what lies, and hold what they held before."""
        names = ("group", "src_tier", "dst_tier", "dst", "count", "src_hash", "dst_hash", "before_hash")
        columns = [view.ints(f"copy_{name}") for name in names]
        if len({len(column) for column in columns}) > 1:  # nobody looked at its ends
            return
        group, src_tier, dst_tier, dst, count, there, here, before = columns
        to_pool = (src_tier != TIER_POOL) & (dst_tier == TIER_POOL) & (count == 0)
        for i in np.flatnonzero(to_pool & (here != 0) & (here == before) & (here != there)).tolist():
            index, first = int(group[i]), int(dst[i])
            if 0 <= index < len(self._slots) and first > 0:
                last = min(first + max(1, self._header.groups[index].page_size), len(self._slots[index]))
                self._note_slots(index, np.arange(first, last), "not_loaded", int(view.scalar("request_id")))

    def _note_slots(self, group: int, slots: Int64Array, what: str, request_id: int = NOBODY) -> None:
        for slot in slots[self._slots[group][slots]].tolist():
            self._add(group, slot, Fact(event=self._event, what=what, request_id=request_id))

    def _copy(self, copy: SlotCopy, note: str) -> None:
        """Note what was copied into wanted slots; of a load also how often its host slot was stored since it was read before that."""
        sources, targets = copy.src.tolist(), copy.dst.tolist()
        if copy.dst_tier != TIER_POOL:
            for source, target in zip(sources, targets, strict=True):
                if copy.src_tier == TIER_POOL:
                    times, read = self._stored.get((copy.group, target), (0, False))
                    times = 1 if read else times + 1
                else:  # to a further storage, or from there
                    times, _ = self._stored.get((copy.group, source), (1, True))
                    self._stored[copy.group, source] = times, True
                self._stored[copy.group, target] = times, False
            change = self._only_seen.update if note == SEEN else self._only_seen.difference_update
            change((copy.group, target) for target in targets if note == SEEN or self._only_seen)
            return
        self._bytes.loaded(self._event, copy)
        for source, target in zip(sources, targets, strict=True):
            times = 0
            if copy.src_tier != TIER_POOL:  # whoever reads it again reads what the first one did
                times, _ = self._stored.get((copy.group, source), (0, True))
                self._stored[copy.group, source] = times, True
            if self._slots[copy.group][target]:
                what = "copied" if copy.src_tier == TIER_POOL else "loaded"
                whose = SEEN if copy.src_tier != TIER_POOL and (copy.group, source) in self._only_seen else ""
                fact = Fact(event=self._event, what=what, via=source, together=times, twin_kind=whose)
                self._add(copy.group, target, fact)

    # --- forwards

    def _forward(self, forward: Forward) -> None:
        rows, ids = forward.req_pool_indices, forward.request_ids
        inside = (rows > 0) & (rows < len(self._owner))
        if self._changed_rows:
            self._judge_changed_rows(rows[inside], ids[inside])
        asked = forward.event in self._events
        if asked:
            self.facts.modes[forward.event] = forward.mode
        if forward.runner == 0:
            self._note_strayed(forward.event, rows[inside], ids[inside])
            self._owner[rows[inside]] = ids[inside]
            self._length[rows[inside]] = (forward.prefix_lens + np.maximum(forward.extend_lens, 0))[inside]
        begun = ids[inside].tolist(), forward.prefix_lens[inside].tolist(), forward.extend_lens[inside].tolist()
        for row, request_id, prefix, extend in zip(rows[inside].tolist(), *begun, strict=True):
            if request_id in self._requests:
                ended = self._running.get(request_id, prefix)
                if forward.runner == 0:
                    self._running[request_id] = prefix + max(extend, 0)
                    if forward.event in self._seen and prefix > ended:
                        self.facts.ahead[forward.event, request_id] = ended
                        self.facts.prefixes[forward.event, request_id] = prefix
                if request_id not in self.facts.begins:
                    self.facts.begins[request_id] = Begin(
                        event=forward.event,
                        forward=forward.forward,
                        prefix_len=prefix,
                        extend_len=extend,
                        filled=self._filled_of(row, forward.event),
                    )
                if asked:
                    self.facts.prefixes[forward.event, request_id] = prefix
        self._writes(forward)
        self._bytes.wrote(forward)

    def _filled_of(self, row: int, event: int) -> tuple[tuple[int, int], ...]:
        """Return the runs of a row's entries that change in an event, first and end."""
        at, rows, starts, ends = self._filled
        mine = rows == row
        return tuple(zip(starts[mine].tolist(), ends[mine].tolist(), strict=True)) if at == event else ()

    def _writes(self, forward: Forward) -> None:
        """Note which of the wanted slots a forward writes, in every group of its runner, and where its padding goes."""
        tokens = batch_tokens(forward)
        owner, real = tokens.request, len(tokens.request)
        if forward.runner == 0:
            ends = forward.prefix_lens + np.bincount(owner, minlength=len(forward.prefix_lens))
            first = np.cumsum(ends - forward.prefix_lens) - ends
            for r, request in enumerate(forward.request_ids.tolist()):
                wanted = self._positions.get(request)
                if wanted is not None:
                    for position in wanted[slice(*np.searchsorted(wanted, [forward.prefix_lens[r], ends[r]]))].tolist():
                        slot = int(forward.out_cache_loc[0][first[r] + position])
                        self.facts.wrote[request, position].append((forward.event, slot))
        for number, group in enumerate(self._header.groups):
            if group.runner != forward.runner:
                continue
            slots = full = forward.out_cache_loc[group.table]
            if group.lut < 0 and not group.window and forward.event in self._seen:
                for i in np.flatnonzero(full[:real] < 0).tolist():
                    request = int(forward.request_ids[owner[i]])
                    self.facts.nowhere[forward.event, request].add(int(tokens.position[i]))
            if group.lut >= 0:
                lut = self._tables.luts[group.lut]
                inside = (full >= 0) & (full < len(lut))
                slots = np.where(inside, lut[np.where(inside, full, 0)], 0)
            mask = self._slots[number]
            found = np.flatnonzero((slots > 0) & (slots < len(mask)))
            for i in found[mask[slots[found]]].tolist():
                fact = Fact(
                    event=forward.event,
                    what="written" if i < real else "padded",
                    request_id=int(forward.request_ids[owner[i]]) if i < real else NOBODY,
                    via=int(full[i]) if group.lut >= 0 else -1,
                    token=int(forward.input_ids[i]),
                    position=int(forward.positions[i]),
                )
                self._add(number, int(slots[i]), fact)
            if group.lut < 0 and mask[-1:].any() and bool((slots[real:] < 0).any()):
                self.facts.padding_nowhere.append(forward.event)

    def _note_strayed(self, event: int, rows: Int64Array, ids: Int64Array) -> None:
        """Note the requests that are computed on the row of another one of the batch, which was not filled anew for them."""
        owners = self._owner[rows]
        moved = (owners != ids) & np.isin(owners, ids) & np.isin(ids, self._owner)
        filled = [row for _, row, *_ in self._changed_rows]
        for row, request_id in zip(rows[moved].tolist(), ids[moved].tolist(), strict=True):
            if request_id in self._requests and row not in filled:
                self.facts.strayed[event, request_id] = int(np.flatnonzero(self._owner == request_id)[0])

    def _judge_changed_rows(self, rows: Int64Array, ids: Int64Array) -> None:
        """Table entries that changed inside what a request had computed: its, if it goes on with its next forward."""
        continuing = dict(zip(rows.tolist(), ids.tolist(), strict=True))
        for event, row, start, count in self._changed_rows:
            owner, length = int(self._owner[row]), int(self._length[row])
            if continuing.get(row) != owner or owner not in self._requests:
                continue
            found = self.facts.rewrites[owner]
            if len(found) < _MAX_REWRITES and start < length:
                inside = min(count, length - start)
                found.append(Rewrite(event=event, first_position=start, count=inside, length=length))
        self._changed_rows = [change for change in self._changed_rows if change[1] not in continuing][
            -_MAX_CHANGED_ROWS:
        ]
