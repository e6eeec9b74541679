"""Pools whose bytes stay in the file until somebody asks for them: a request's are few, and others' are most of a recording."""

from typing import Any, Final

import numpy as np

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.constants import KvHashMode
from ...recorder.state.apply import RecordedState, WriteStep
from ...recorder.state.events import CopyEvent, TransferEvent
from ...recorder.state.forward import Forward
from ...recorder.state.pools import Endpoint, GroupPool
from ...recorder.state.writes import KvChanges
from ...recorder.trace.batch import EventView
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import TraceReader
from ...recorder.trace.schema import TIER_HOST

_MANY_BYTES: Final = 1 << 20  # to write them to new memory twice takes longer than to read them


class LateBytes(RecordedState):
    """The state of a trace for one who asks for the bytes, token and position of some slots, and for no hash nor history.

    For each slot and stream is noted where in which file the bytes lie that were written last; `fetch` reads them. What changes bytes in
    another way than a forward's write has those that it needs read before.
    """

    def __init__(self, header: TraceHeader) -> None:
        super().__init__(header)
        self.state.history = None
        for pool in self.pools:
            pool.kv_hash_mode = KvHashMode.NONE
            pool.sources = dict.fromkeys(pool.group.halves, ())
            pool.pool.whole_hashes = pool.host.whole_hashes = {}
        self._starts = [np.full((len(pool.group.streams), pool.num_slots), -1, np.int64) for pool in self.pools]
        self._files = [np.zeros(pool.num_slots, np.int32) for pool in self.pools]
        self._readers: list[TraceReader] = []
        self._view: EventView | None = None
        self._changing: dict[int, Int64Array] = {}  # slots of a group that the event also changes otherwise

    def reads(self, reader: TraceReader | None) -> None:
        """Take note of the file that the next events are of, None if their batches hold all bytes."""
        if reader is not None and (not self._readers or self._readers[-1] is not reader):
            self._readers.append(reader)

    def leave(self, reader: TraceReader) -> None:
        """Read what is needed of a file that is closed then."""
        for number in [at for at, one in enumerate(self._readers) if one is reader]:
            for pool, starts, files in zip(self.pools, self._starts, self._files, strict=True):
                self.fetch(pool, np.flatnonzero((files == number) & (starts >= 0).any(axis=0)))

    def at(self, view: EventView) -> None:
        """Take note of the event that is applied next."""
        self._view = view

    def fetch(self, pool: GroupPool, slots: Int64Array) -> None:
        """Read the bytes of a group's slots that are still in a file."""
        starts, files = self._starts[pool.index], self._files[pool.index]
        if not len(slots):
            return
        for number, kv in enumerate(pool.pool.kv):
            late = np.unique(slots[starts[number, slots] >= 0])
            if not len(late):
                continue
            for file in np.unique(files[late]).tolist():
                some = late[files[late] == file]
                some = some[np.argsort(starts[number, some], kind="stable")]
                in_order = bool((np.diff(some) == 1).all())
                found = kv[some[0] : some[-1] + 1] if in_order else np.empty((len(some), kv.shape[1]), np.uint8)
                _read(self._readers[file], starts[number, some], found)
                if not in_order:
                    kv[some] = found
            starts[number, late] = -1

    def copies(self, pool: GroupPool, slots: Int64Array) -> list[ByteArray]:
        """Return the bytes of a group's slots, `[n, width]` by stream, as memory of one's own; many of one file do not go through the pool."""
        starts, files = self._starts[pool.index], self._files[pool.index]
        widths = [kv.shape[1] for kv in pool.pool.kv]
        many = len(slots) * sum(widths) >= _MANY_BYTES
        if not many or (files[slots] != files[slots[0]]).any() or (starts[:, slots] < 0).any():
            self.fetch(pool, slots)
            return [kv[slots] for kv in pool.pool.kv]
        found = [np.empty((len(slots), width), np.uint8) for width in widths]
        for number, one in enumerate(found):
            _read(self._readers[files[slots[0]]], starts[number, slots], one)
        return found

    def _store_bytes(self, steps: list[WriteStep], forward: Forward) -> None:
        view = self._view
        assert view is not None
        late, first = view.batch.unread_at >= 0, 0
        written: dict[int, tuple[Int64Array, Int64Array]] = {}
        for step in steps:
            tokens = np.flatnonzero((step.slots >= 0) & (step.slots < step.pool.num_slots))
            slots = step.slots[tokens]
            written[step.pool.index] = tokens, slots
            if late:
                self._files[step.pool.index][slots] = len(self._readers) - 1
            else:
                self._starts[step.pool.index][:, slots] = -1
        if not late:
            super()._store_bytes(steps, forward)
            return
        begin = view.batch.unread_at + int(view.batch.offsets("kv_bytes")[view.index])
        seen, total = dict.fromkeys(written, 0), len(forward.input_ids)
        for group, stream in self.header.streams(forward.runner):
            number, seen[group] = seen[group], seen[group] + 1
            tokens, slots = written[group]
            self._starts[group][number, slots] = tokens * stream.capture_bytes + (begin + first)
            first += stream.capture_bytes * total
        for group, slots in self._changing.items():
            self.fetch(self.pools[group], slots)

    def _plan(self, pool: GroupPool, forward: Forward, changes: KvChanges) -> WriteStep:
        slots = changes.slots_of(pool.index)
        self._changing[pool.index] = np.unique(slots) if len(slots) else slots
        self.fetch(pool, self._changing[pool.index])
        return super()._plan(pool, forward, changes)

    def _judge(self, forward: Forward, view: EventView, steps: list[WriteStep]) -> None:
        """Judge nothing."""

    def _write(self, endpoint: Endpoint, half: str, step: WriteStep, forward: Forward) -> None:
        if endpoint == "TAIL" and half == step.pool.group.halves[0]:  # all have the same tokens and positions
            super()._write(endpoint, half, step, forward)

    def _finish(self, step: WriteStep, forward: Forward) -> None:
        """Hash nothing."""

    def _apply_kv(self, changes: KvChanges) -> None:
        for pool in self.pools if changes else ():
            self.fetch(pool, np.unique(changes.slots_of(pool.index)))
        super()._apply_kv(changes)

    def _copy(self, event: CopyEvent) -> None:
        for copy in event.copies:
            pool = self.pools[copy.group]
            if copy.src_tier != TIER_HOST:
                self.fetch(pool, _inside(copy.src, pool))
            if copy.dst_tier != TIER_HOST:
                self.fetch(pool, _inside(copy.dst, pool))
        super()._copy(event)

    def _transfer(self, event: TransferEvent, view: EventView) -> None:
        if event.group >= 0:
            self.fetch(self.pools[event.group], _inside(event.slots, self.pools[event.group]))
        super()._transfer(event, view)


def _inside(slots: Any, pool: GroupPool) -> Int64Array:
    slots = np.asarray(slots, np.int64)
    return slots[(slots >= 0) & (slots < pool.num_slots)]


def _read(reader: TraceReader, starts: Int64Array, found: ByteArray) -> None:
    """Fill `found` `[n, width]` with the bytes from each place of a file on; those that follow one another are read at once."""
    width, flat = found.shape[1], found.reshape(-1).data
    cuts = np.flatnonzero(np.diff(starts) != width) + 1
    for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(starts)], strict=True):
        reader.read_at(flat[first * width : last * width], int(starts[first]))
