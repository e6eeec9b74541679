"""What happens to slots outside of forwards: copies, transfers, changes that nobody wrote, losses."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import ByteArray, Int64Array
from ...recorder.state.events import CopyEvent, TransferEvent, read_known_event, read_lost_slots
from ...recorder.state.writes import KvChanges
from ...recorder.trace.header import KvStream, TraceHeader
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import PHASE_AFTER, PHASE_BEFORE, SEND
from .comparability import ComparedGroup
from .facts import MOVED, Sinks
from .names import LOST, SlotNames
from .observed import shown


class SlotTraffic:
    """Keeps the names of slots right between forwards, and records what events say of KV; raises `UnusableEventError`."""

    def __init__(
        self,
        header: TraceHeader,
        groups: Sequence[ComparedGroup],
        names: Sequence[SlotNames],
        sinks: Sinks,
        *,
        kv: bool,
        sends: bool,
    ) -> None:
        self._header = header
        self._groups = groups
        self._names = names
        self._sinks = sinks
        self._kv = kv
        # What a sender's slots were last written with: the bytes of a page that it shares may be another request's.
        self._sends = sends and kv
        sizes = [header.groups[g.index].num_slots if self._sends else 0 for g in groups]
        self._content = [np.zeros((n, sum(g.capture_bytes)), np.uint8) for n, g in zip(sizes, groups, strict=True)]

    def wrote(self, k: int, slots: Int64Array, content: ByteArray) -> None:
        """Take the bytes `[n, width]` that a forward wrote to slots of the pool, `[n]`."""
        if self._sends:
            inside = slots < len(self._content[k])
            self._content[k][slots[inside]] = content[inside]

    def changes(self, changes: KvChanges, view: EventView, phase: int, runner: int) -> None:
        """Record slots whose bytes changed without a write, by what they hold."""
        if not changes or not self._kv:
            return
        streams = self._header.streams(runner)
        of_phase = view.ints("kv_change_phase") == phase
        stream, slot = view.ints("kv_change_stream")[of_phase], view.ints("kv_change_slot")[of_phase]
        for k, group in enumerate(self._groups):
            numbers = [s for s in group.streams if streams[s][0] == group.index]
            if self._header.groups[group.index].runner != runner:
                continue
            slots, names = np.unique(slot[np.isin(stream, numbers)]), self._names[k]
            for sample in group.samples:
                if sample.kv:  # a slot whose leading bytes changed is said by these
                    mine = np.setdiff1d(slot[stream == sample.place], slots)
                    self._layer_changes(k, streams[sample.place][1], mine, view)
            if len(slots):
                writer = names.writers[0][slots]
                where = (writer[:, 0], k, writer[:, 1], slots, view.number, int(view.scalar("forward")))
                self._sinks.add("changes", *where, names.names[slots])

    def _layer_changes(self, k: int, stream: KvStream, slots: Int64Array, view: EventView) -> None:
        """Record slots whose bytes changed in the layer that a sampling stream shows of them."""
        writer, (layers, pieces) = self._names[k].writers[0][slots], shown(stream, slots)
        where = (writer[:, 0], k, writer[:, 1], slots, view.number, int(view.scalar("forward")))
        self._sinks.add("layer_changes", *where, stream.half, layers, pieces)

    def sweep(self, view: EventView) -> None:
        """Record the changes that a sweep, or a sender, saw."""
        runner = int(view.scalar("runner"))
        if 0 <= runner < len(self._header.runners):
            changes = KvChanges(view, self._header, runner)
            for phase in (PHASE_BEFORE, PHASE_AFTER):
                self.changes(changes, view, phase, runner)

    def transfer(self, view: EventView) -> None:
        """Take what was received, and what was sent."""
        event = read_known_event(view, self._header.groups)
        if not isinstance(event, TransferEvent):
            return
        sent = event.direction == SEND
        if sent:
            self.sweep(view)  # what it says of changed bytes reads alike
        k = next((k for k, group in enumerate(self._groups) if group.index == event.group), None)
        if k is None or event.status != ("start" if sent else "end"):
            return
        group = self._groups[k]
        if not sent:
            self._names[k].receive(event.slots, event.request_id, event.start_position)
        if sent and self._sends and group.streams:
            inside = np.flatnonzero(event.slots < len(self._content[k]))
            self._moved(k, event, inside, self._content[k][event.slots[inside]])
        elif not sent and self._kv and group.streams:
            # A receiver's bytes are those of its group's streams only.
            runner = self._header.groups[group.index].runner
            places = [place for place, (owner, _) in enumerate(self._header.streams(runner)) if owner == group.index]
            parts = dict(zip(places, event.landed, strict=True))
            chosen = [parts[s][:, :width] for s, width in zip(group.streams, group.capture_bytes, strict=True)]
            self._moved(k, event, np.arange(len(event.slots)), np.concatenate(chosen, axis=1))

    def _moved(self, k: int, event: TransferEvent, which: npt.NDArray[np.intp], content: ByteArray) -> None:
        requests = np.full(len(which), event.request_id, np.int64)
        where = (requests, k, event.start_position + which, event.event, event.forward)
        self._sinks.add("kv", *where, MOVED, content)

    def kv_copy(self, view: EventView) -> None:
        """Copy names with their slots."""
        event = read_known_event(view, self._header.groups)
        for copy in event.copies if isinstance(event, CopyEvent) else ():
            for k, chosen in enumerate(self._groups):
                if chosen.index == copy.group:
                    self._names[k].copy(copy.src_tier, copy.src, copy.dst_tier, copy.dst)
                    if self._sends and not copy.src_tier and not copy.dst_tier:
                        self._content[k][copy.dst] = self._content[k][copy.src]

    def lost(self, view: EventView) -> None:
        """Forget the slots that a loss names."""
        runs = read_lost_slots(view, self._header.groups)
        for names, chosen in zip(self._names, self._groups, strict=True):
            lost = np.zeros(len(names.names), np.bool_)  # runs may name a slot again and again
            for group, start, end in runs:
                if group == chosen.index:
                    lost[start:end] = True
            names.spoil(np.flatnonzero(lost), LOST)
