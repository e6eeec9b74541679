"""Slots whose bytes changed without a write, and the write, to another slot, whose bytes they hold since."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...recorder.capture.host_arrays import runs_to_slots
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView
from .facts import Fact

# Pool group and slot of a write, its event, its event's kind.
Twin = tuple[tuple[int, int], int, str]

NO_TWIN: Final[Twin] = ((-1, -1), -1, "")
# The write is looked for among the last events that wrote bytes: it must come shortly before the change was seen.
RECENT_EVENTS: Final = 12


class ChangedBytes:
    """Remembers the last events that wrote bytes, forwards and transfers that landed."""

    def __init__(self, header: TraceHeader) -> None:
        self._header = header
        self._recent: deque[EventView] = deque(maxlen=RECENT_EVENTS)

    def wrote(self, view: EventView) -> None:
        """Remember a forward, or a transfer that landed."""
        self._recent.append(view)

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
        done = set()
        for group, stream, slot in changes:
            content = data[at : at + stream.capture_bytes]
            at += stream.capture_bytes
            mask = wanted[group]
            if (group, slot) in done or not 0 < slot < len(mask) or not mask[slot]:
                continue
            done.add((group, slot))
            twin, event, kind = self._twin(view, content, group, slot)
            yield (
                group,
                slot,
                Fact(
                    event=view.number,
                    what="changed",
                    twin=twin,
                    twin_event=event,
                    twin_kind=kind,
                    together=len({other for of_group, _, other in changes if of_group == group}),
                ),
            )

    def _twin(self, view: EventView, content: ByteArray, group: int, slot: int) -> Twin:
        """Return the latest write of these very bytes elsewhere; one in another pool group says more than one beside."""
        beside = NO_TWIN
        if not content.any():
            return beside
        for event in reversed([*self._recent, *([view] if view.kind == "forward" else [])]):
            for of_group, width, data, slots in self._written(event):
                if width != len(content) or len(data) != len(slots) * width:
                    continue
                equal = np.flatnonzero((data.reshape(len(slots), width) == content).all(axis=1))
                for written in slots[equal].tolist():
                    if of_group != group:
                        return (of_group, written), event.number, event.kind
                    if written != slot and beside == NO_TWIN:
                        beside = (of_group, written), event.number, event.kind
        return beside

    def _written(self, event: EventView) -> Iterator[tuple[int, int, ByteArray, Int64Array]]:
        """Yield pool group, width, bytes and slots of each stream that an event wrote."""
        data, at = event.bytes("kv_bytes"), 0
        if event.kind == "transfer":
            for group, slots in named_slots(event, self._header).items():
                for stream in self._header.groups[group].streams:
                    part = data[at : at + len(slots) * stream.capture_bytes]
                    at += len(part)
                    yield group, stream.capture_bytes, part, slots
            return
        tokens, out = len(event.ints("input_ids")), event.ints("out_cache_loc")
        for group, stream in self._header.streams(int(event.scalar("runner"))):
            part = data[at : at + tokens * stream.capture_bytes]
            at += len(part)
            table = self._header.groups[group].table
            yield group, stream.capture_bytes, part, out[table * tokens : (table + 1) * tokens]


def named_slots(view: EventView, header: TraceHeader) -> dict[int, Int64Array]:
    """Return the slots that an event names, `{pool group: [n] int64}`, in its order; runs that leave their pool are none."""
    found: dict[int, Int64Array] = {}
    groups, starts, counts = (view.ints(f"slot_{name}") for name in ("group", "start", "count"))
    for number in np.unique(groups).tolist():
        if not 0 <= number < len(header.groups):
            continue
        limit = header.groups[number].num_slots
        mine = (groups == number) & (starts >= 0) & (counts > 0) & (starts < limit)
        mine &= counts <= limit - np.where(mine, starts, 0)
        if mine.any() and int(counts[mine].sum()) <= limit * 2:
            found[number] = runs_to_slots(starts[mine], counts[mine])
    return found
