"""Slots whose bytes changed without a write, and the write, to another slot, whose bytes they hold since."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...recorder.state.events import TransferEvent
from ...recorder.state.forward import Forward
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView
from .facts import Fact

# Pool group and slot of a write, its event, its event's kind.
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

    def wrote(self, forward: Forward) -> None:
        """Remember a forward."""
        streams = zip(self._header.streams(forward.runner), forward.kv_bytes, strict=True)
        parts = [(group, data, forward.out_cache_loc[self._header.groups[group].table]) for (group, _), data in streams]
        self._recent.append(_Written(event=forward.event, kind="forward", parts=parts))

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
        done = set()
        for group, stream, slot in changes:
            content = data[at : at + stream.capture_bytes]
            at += stream.capture_bytes
            mask = wanted[group]
            if (group, slot) in done or not 0 < slot < len(mask) or not mask[slot]:
                continue
            done.add((group, slot))
            together = len({other for of_group, _, other in changes if of_group == group})
            twin, event, kind = self._twin(content, group, slot)
            fact = Fact(
                event=view.number, what="changed", twin=twin, twin_event=event, twin_kind=kind, together=together
            )
            yield group, slot, fact

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
