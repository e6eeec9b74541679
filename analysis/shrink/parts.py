"""A part of a trace in memory, and its events as they are read and changed."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.capture.host_arrays import ragged_index
from ...recorder.trace.batch import EventView, TraceBatch, TraceGap
from ...recorder.trace.event import TraceEvent, encode_events, loss_event
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS, TABLE_CHANGES, trace_schema

NOBODY, PADDING = -1, -2  # members of an event that are no request's
LEFT_OUT: Final = "left out by kvcanary shrink"
ADDED_EVENT: Final = -1  # the number of an event that the whole trace does not have

NOTHING: Final = np.empty(0, np.int64)
_SCHEMA: Final = trace_schema()
_INTS: Final = frozenset(INT_LISTS)
_NOTES_KEPT: Final = frozenset({"alloc", "free", "evict", "kv_copy"})  # why: the adapter's own words

Slots = Mapping[int, Int64Array]  # by pool group


class Part(NamedTuple):
    """A trace in memory: its events, and the number that each has in the whole trace, `ADDED_EVENT` for losses."""

    header: TraceHeader
    events: list[TraceEvent]
    numbers: list[int]

    def size(self) -> int:
        """Return about how many bytes it takes."""
        return sum(event.nbytes for event in self.events)

    def views(self) -> Iterator[tuple[EventView, int]]:
        """Yield each event as a reader gives it, with its number in the whole trace."""
        batch = TraceBatch(encode_events(self.events, 0, _SCHEMA), first_event=0)
        return zip(batch, self.numbers, strict=True)


def views_of(items: Iterable[TraceBatch | TraceGap]) -> Iterator[tuple[EventView, int]]:
    """Yield the events of a reader's stream with their numbers; a gap as a loss of everything."""
    for item in items:
        if isinstance(item, TraceBatch):
            yield from ((view, view.number) for view in item)
        elif item.missing_events != 0:
            lost = encode_events([loss_event(lost_events=-1, note="a gap of the whole trace")], 0, _SCHEMA)
            yield TraceBatch(lost, first_event=0).event(0), ADDED_EVENT


def members_of(view: EventView) -> list[int]:
    """Return of whom an event is: the requests of a forward and its padding, or the one that another event names."""
    if view.kind != "forward":
        return [int(view.scalar("request_id"))]
    rows, lens = view.ints("req_pool_indices"), view.ints("extend_lens")
    named = dict.fromkeys(np.where(rows > 0, view.ints("request_ids"), PADDING).tolist())
    padded = len(view.ints("input_ids")) > int(np.where(rows > 0, np.maximum(lens, 0), 0).sum())
    return list(named | {PADDING: None} if padded or not named else named)


class EventCopies:
    """Makes events of what a reader gives."""

    def __init__(self) -> None:
        self._batch: TraceBatch | None = None
        self._filled: dict[int, list[str]] = {}

    def copy(self, view: EventView) -> TraceEvent:
        """Return an event without table changes between forwards, texts for people and labels."""
        if view.batch is not self._batch:
            self._batch, self._filled = view.batch, {}
            for name in (*INT_LISTS, *BYTE_LISTS):
                for index in np.flatnonzero(np.diff(view.batch.offsets(name))).tolist():
                    self._filled.setdefault(index, []).append(name)
        filled = self._filled.get(view.index, [])
        scalars = {name: view.scalar(name) for name in SCALARS if name not in ("event", "kind", "time_ns", "labels")}
        scalars = {name: value for name, value in scalars.items() if value != SCALARS[name][1]}
        if view.kind not in _NOTES_KEPT and scalars.get("note") != LEFT_OUT:
            scalars.pop("note", None)
        lists = {n: view.ints(n) for n in filled if n in _INTS and (view.kind == "forward" or n not in TABLE_CHANGES)}
        data = {name: view.bytes(name) for name in filled if name not in _INTS}
        return TraceEvent(kind=view.kind, time_ns=view.time_ns, scalars=scalars, ints=lists, bytes=data)


class EventLists:
    """An event's lists, as tables ask for them."""

    def __init__(self, event: TraceEvent) -> None:
        self._lists: dict[str, Int64Array] = event.ints

    def ints(self, name: str, /) -> Int64Array:
        """Return a list, empty if the event has none of that name."""
        return self._lists.get(name, NOTHING)


def keep_runs(ints: dict[str, Int64Array], table: str, chosen: Any, at: Int64Array, values: str | None) -> None:
    """Keep of runs of a forward's requests those of chosen ones, by their new numbers."""
    if f"{table}_request" not in ints:
        return
    mine = chosen[ints[f"{table}_request"]]
    if values is not None:
        ints[values] = ints[values][np.repeat(mine, ints[f"{table}_count"])]
    for name in ("group", "request", "start", "count"):
        ints[f"{table}_{name}"] = ints[f"{table}_{name}"][mine]
    ints[f"{table}_request"] = at[ints[f"{table}_request"]]


def changed_slots(view: EventView, header: TraceHeader) -> dict[int, Int64Array]:
    """Return the slots whose bytes an event says were changed, by pool group."""
    of, slots = view.ints("kv_change_stream"), view.ints("kv_change_slot")
    if not len(of):
        return {}
    runner = int(view.scalar("runner"))
    if view.kind == "transfer" and len(view.ints("slot_group")):
        runner = header.groups[int(view.ints("slot_group")[0])].runner
    groups = np.array([group for group, _ in header.streams(runner)], np.int64)[of]
    return {group: np.unique(slots[groups == group]) for group in np.unique(groups).tolist()}


def listed_slots(view: EventView) -> dict[int, Int64Array]:
    """Return the slots that a loss lists, by pool group."""
    groups, starts, counts = (view.ints(f"slot_{name}") for name in ("group", "start", "count"))
    of = np.repeat(groups, counts)
    return {group: ragged_index(starts, counts)[of == group] for group in np.unique(groups).tolist()}
