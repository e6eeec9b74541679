"""What happens to slots outside of forwards: copies, transfers, changes that nobody wrote, losses."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ...recorder.capture.host_arrays import runs_to_slots
from ...recorder.state.forward import UnusableEventError
from ...recorder.state.writes import KvChanges
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import PHASE_AFTER, PHASE_BEFORE, SEND
from .comparability import ComparedGroup
from .facts import MOVED, Sinks
from .names import LOST, Int64Array, SlotNames

_SLOT_COLUMNS: Final = ("slot_group", "slot_start", "slot_count")
_COPY_COLUMNS: Final = tuple(f"copy_{c}" for c in ("group", "src_tier", "src", "dst_tier", "dst", "count"))


class SlotTraffic:
    """Keeps the names of slots right between forwards, and records what the events there say of KV bytes.

    Its methods raise `UnusableEventError` if an event contradicts itself.
    """

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

    def wrote(self, k: int, slots: Int64Array, content: npt.NDArray[np.uint8]) -> None:
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
            slots = np.unique(slot[np.isin(stream, numbers)])
            if len(slots):
                names = self._names[k]
                writer = names.writers[0][slots]
                where = (writer[:, 0], k, writer[:, 1], slots, view.number, int(view.scalar("forward")))
                self._sinks.add("changes", *where, names.names[slots])

    def sweep(self, view: EventView) -> None:
        """Record the changes that a sweep, or a sender, saw."""
        runner = int(view.scalar("runner"))
        if 0 <= runner < len(self._header.runners):
            changes = KvChanges(view, self._header, runner)
            for phase in (PHASE_BEFORE, PHASE_AFTER):
                self.changes(changes, view, phase, runner)

    def transfer(self, view: EventView) -> None:
        """Take what was received, and what was sent."""
        sent, status = view.scalar("mode") == SEND, view.scalar("status")
        if sent:
            self.sweep(view)  # what it says of changed bytes reads alike
        if status != ("start" if sent else "end"):
            return
        groups, starts, counts = (view.ints(column) for column in _SLOT_COLUMNS)
        k = next((k for k, group in enumerate(self._groups) if len(groups) and group.index == groups[0]), None)
        if k is None or not self._runs_fit(groups, starts, counts):
            return
        slots, first = runs_to_slots(starts, counts), view.ints("prefix_lens")
        start, request_id = int(first[0]) if len(first) else 0, int(view.scalar("request_id"))
        if not sent:
            self._names[k].receive(slots, request_id, start)
            self._landed_bytes(k, view, slots, request_id, start)
        elif self._sends and self._groups[k].streams:
            inside = slots < len(self._content[k])
            self._moved(k, view, request_id, start + np.flatnonzero(inside), self._content[k][slots[inside]])

    def _moved(
        self, k: int, view: EventView, request_id: int, positions: Int64Array, content: npt.NDArray[np.uint8]
    ) -> None:
        where = (np.full(len(positions), request_id, np.int64), k, positions, view.number, int(view.scalar("forward")))
        self._sinks.add("kv", *where, MOVED, content)

    def _landed_bytes(self, k: int, view: EventView, slots: Int64Array, request_id: int, start: int) -> None:
        """A receiver's bytes are those of its group's streams only."""
        group, data = self._groups[k], view.bytes("kv_bytes")
        streams = self._header.groups[group.index].streams
        runner = self._header.groups[group.index].runner
        places = [place for place, (owner, _) in enumerate(self._header.streams(runner)) if owner == group.index]
        if not self._kv or len(data) != len(slots) * sum(stream.capture_bytes for stream in streams):
            return
        parts, begin = {}, 0
        for place, stream in zip(places, streams, strict=True):
            end = begin + len(slots) * stream.capture_bytes
            parts[place] = data[begin:end].reshape(len(slots), stream.capture_bytes)
            begin = end
        if group.streams:
            content = np.concatenate(
                [parts[s][:, :w] for s, w in zip(group.streams, group.capture_bytes, strict=True)], axis=1
            )
            self._moved(k, view, request_id, start + np.arange(len(slots)), content)

    def kv_copy(self, view: EventView) -> None:
        """Copy names with their slots."""
        columns = [view.ints(name) for name in _COPY_COLUMNS]
        if len({len(column) for column in columns}) != 1:
            raise UnusableEventError("the copy columns differ in length")
        group, src_tier, src, dst_tier, dst, count = columns
        for k, chosen in enumerate(self._groups):
            names = self._names[k]
            largest = max(len(tier) for tier in names.tiers)
            for i in np.flatnonzero(group == chosen.index).tolist():
                if not (0 <= src_tier[i] <= 1 and 0 <= dst_tier[i] <= 1 and 0 <= count[i] <= largest):
                    raise UnusableEventError(
                        f"a copy of {count[i]} slots from tier {src_tier[i]} to tier {dst_tier[i]}"
                    )
                run = np.arange(count[i])
                names.copy(int(src_tier[i]), src[i] + run, int(dst_tier[i]), dst[i] + run)
                if self._sends and not src_tier[i] and not dst_tier[i]:
                    inside = run[
                        (src[i] >= 0) & (dst[i] >= 0) & (np.maximum(src[i], dst[i]) + run < len(self._content[k]))
                    ]
                    self._content[k][dst[i] + inside] = self._content[k][src[i] + inside]

    def lost(self, view: EventView) -> None:
        """Forget the slots that a loss names."""
        groups, starts, counts = (view.ints(column) for column in _SLOT_COLUMNS)
        if not self._runs_fit(groups, starts, counts):
            raise UnusableEventError("a run of slots lies outside of its pool")
        for k, chosen in enumerate(self._groups):
            mine = groups == chosen.index
            self._names[k].spoil(runs_to_slots(starts[mine], counts[mine]), LOST)

    def _runs_fit(self, groups: Int64Array, starts: Int64Array, counts: Int64Array) -> bool:
        if not len(groups) == len(starts) == len(counts):
            raise UnusableEventError("the slot columns differ in length")
        sizes = np.array([group.num_slots for group in self._header.groups])
        if not bool(((groups >= 0) & (groups < len(sizes)) & (starts >= 0) & (counts >= 0)).all()):
            return False
        return bool((counts <= sizes[groups]).all()) and int(counts.sum()) <= int(sizes.max())
