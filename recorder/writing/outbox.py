"""Between recorder and writer: events go in whole or not at all, and what was dropped is said before what follows."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.arrays import Int64Array
from ..capture.host_arrays import fewer_runs, runs_to_slots
from ..capture.kv_shadow import GroupKvShadow
from ..trace.event import AnyEvent, EventRows, TraceEvent, loss_event, num_rows
from ..trace.schema import SLOTS_LISTED
from .writer import TraceWriter

QUEUE_FULL = "the writer's queue was full, or an event was not fit for the trace"
MAX_REQUESTS_KEPT = 1024
HELD_BYTES = 1 << 14  # beyond it there is no use in waiting for more
BYTES_OF_A_RUN = 24  # in a loss event: its group, start and count
HOST_TIER_LOST = "these slots were loaded back from an offload tier whose content was lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderStats:
    """What the recorder has done so far: `engine_thread_ns` inside it on the engine's thread; `off` is why it is, or empty."""

    forwards: int
    events: int
    dropped_events: int
    engine_thread_ns: int
    off: str


class Outbox:
    """Hands events to a writer that may refuse them, and keeps account of what it refused. Before the first event that
    is taken after a refusal goes a loss event: how many were dropped, and the slots that they may have written, as the
    groups' shadows remember them. Behind it go the last of the request events that were dropped: they name what all
    others speak of.
    """

    __slots__ = (
        "_groups",
        "_held",
        "_held_bytes",
        "_holds",
        "_loss_bytes",
        "_requests",
        "_unsaid",
        "dropped",
        "taken",
        "writer",
    )

    def __init__(self, writer: TraceWriter, groups: list[GroupKvShadow]) -> None:
        self.writer = writer
        self._groups = groups
        self._unsaid = 0
        self._loss_bytes = 0  # of the loss event that the writer refused last
        self._requests: deque[TraceEvent] = deque(maxlen=MAX_REQUESTS_KEPT)
        # What the writer will get at once: there is room for it, and nothing else to be said before it.
        self._held: list[AnyEvent] = []
        self._held_bytes = 0
        self._holds = False
        self.dropped = 0
        self.taken = 0

    def hold(self) -> None:
        """Hand nothing to the writer from now on that can wait for `let_go`. Nobody else may append to the writer meanwhile."""
        self._holds = True

    def let_go(self) -> None:
        """Hand over what is held."""
        self._holds = False
        self.hand_over()

    def hand_over(self) -> None:
        """Hand what is held to the writer now."""
        held, size = self._held, self._held_bytes
        if held:
            self._held, self._held_bytes = [], 0
            if not self.writer.append(*held, checked_bytes=size):  # there was room: it has failed or ended meanwhile
                rows = num_rows(held)
                self.taken -= rows
                self.dropped += rows
                self._unsaid += rows

    def _keep(self, event: AnyEvent) -> bool:
        """Hold an event if there is room for it."""
        if not self._holds or event.problem() is not None:
            return False
        size = event.nbytes
        if self._held_bytes + size > HELD_BYTES:
            self.hand_over()
        if not self.writer.has_room(self._held_bytes + size):
            return False
        self._held.append(event)
        self._held_bytes += size
        self.taken += event.rows
        return True

    def _owes_loss(self) -> bool:
        return self._unsaid > 0 or any(group.any_lost for group in self._groups)

    def put(self, event: TraceEvent) -> bool:
        """Hand over an event; return whether the trace will hold it. Never waits."""
        due = self._owes_loss()
        if not due and not self._requests and self._keep(event):
            return True
        self.hand_over()
        said = not due or self._put_loss(event.time_ns)
        if said and self._put_requests(event.time_ns) and self.writer.append(event):
            self.taken += 1
            return True
        self.drop()
        most = self.writer.settings.max_queued_bytes  # one that never fits would keep back everything behind it
        if event.kind == "request" and event.problem() is None and event.nbytes <= most:
            self._requests.append(event)
        return False

    def put_all(self, events: Sequence[EventRows]) -> None:
        """Hand over events as `put` does, in one go if there is nothing else to be said and room for all."""
        left = deque([some for some in events if some.rows])
        due = self._owes_loss() or self._requests
        while left and not due and self._keep(left[0]):
            left.popleft()
        if left:
            self.hand_over()
        rows = num_rows(left)
        if not due and rows > 1 and self.writer.append(*left):
            self.taken += rows
            return
        for some in left:
            for event in some.events():
                self.put(event)

    def drop(self) -> None:
        """Count an event that the trace will not hold."""
        self.dropped += 1
        self._unsaid += 1

    def _put_requests(self, time_ns: int) -> bool:
        """Hand over the request events that were dropped, now that there is room."""
        while self._requests:
            self._requests[0].time_ns = time_ns  # time never runs backwards in a trace
            if not self.writer.append(self._requests[0]):
                self.drop()
                return False
            self._requests.popleft()
            self.taken += 1
        return True

    def put_unknown_loss(self, note: str, time_ns: int, status: str = "") -> bool:
        """Hand over a loss event that says that nobody knows what is missing; all state is unknown after it."""
        self.hand_over()
        event = loss_event(lost_events=-1, note=note, time_ns=time_ns)
        event.scalars["status"] = status
        if not self.writer.append(event):
            return False
        self._said()
        return True

    def _put_loss(self, time_ns: int) -> bool:
        """Hand over a loss event for what was dropped so far, with the slots that it may have written. To find those
        takes a look at every slot, on the engine's thread: not before there may be room to name them.
        """
        if not self.writer.has_room(self._loss_bytes):
            return False
        note = QUEUE_FULL if self._unsaid else HOST_TIER_LOST
        event = loss_event(lost_events=self._unsaid, note=note, time_ns=time_ns)
        event.scalars["status"] = SLOTS_LISTED
        runs = [(number, *self._lost_runs(group)) for number, group in enumerate(self._groups) if group.any_lost]
        if runs:
            numbers, starts, counts = zip(*runs, strict=True)
            event.ints["slot_group"] = np.repeat(np.array(numbers, np.int64), [one.size for one in starts])
            event.ints["slot_start"] = np.concatenate(starts)
            event.ints["slot_count"] = np.concatenate(counts)
        if not self.writer.append(event):
            self._loss_bytes = event.nbytes
            return False
        self._said()
        return True

    def _lost_runs(self, group: GroupKvShadow) -> tuple[Int64Array, Int64Array]:
        """Return a group's lost slots as runs; if the queue would never hold so many, with slots between them."""
        starts, counts = group.lost_runs()
        most = max(1, self.writer.settings.max_queued_bytes // (4 * BYTES_OF_A_RUN * len(self._groups)))
        if starts.size > most:
            starts, counts = fewer_runs(starts, counts, most)
            group.lose(runs_to_slots(starts, counts))
        return starts, counts

    def _said(self) -> None:
        self.taken += 1
        self._unsaid = self._loss_bytes = 0
        for group in self._groups:
            group.clear_lost()

    def end(self, note: str, time_ns: int) -> None:
        """Say that nobody knows what is missing from here on, and let the writer end the file without being waited for."""
        said = self.put_unknown_loss(note, time_ns)
        self.writer.end("" if said else note)

    def close(self, time_ns: int, timeout: float) -> None:
        """Say what is not yet said and close the writer, waiting at most `timeout` seconds."""
        until = time.monotonic() + timeout
        self.hand_over()
        self._put_requests(time_ns)
        if self._unsaid and not self._put_loss(time_ns) and self.writer.flush(timeout):
            self._put_loss(time_ns)  # now there is room; a disk that is stuck leaves a torn file, which says as much
        self.writer.close(max(until - time.monotonic(), 0.0))
