"""What the recorder's thread does with what was queued: in order, many things at once."""

from collections import deque
from collections.abc import Sequence
from time import perf_counter_ns

from ..recorder import Recorder
from ..slot_numbers import SlotsChanged
from .background import AT_ONCE, Queued
from .forward import FrameInFlight
from .frame_decoder import FrameDecoder


def slots_changed(_: SlotsChanged) -> None:
    """What is queued with a change of slots."""


class QueuedRecording:
    """Puts forwards and what else was queued into the trace; for the recorder's own thread."""

    def __init__(self, recorder: Recorder, decoder: FrameDecoder) -> None:
        self._recorder = recorder
        self._decoder = decoder
        self._clock_ahead_ns = recorder.clock() - perf_counter_ns()
        self._latest_ns = 0
        self._changes: list[SlotsChanged] = []
        self._change_times_ns: list[int] = []

    def record(self, items: Sequence[FrameInFlight | Queued]) -> None:
        """Record things in order, their frames read and their events written many at once."""
        frames = [item for item in items if isinstance(item, FrameInFlight)]
        left = deque(items)
        while left:
            with self._recorder.together():
                while left and self._can_record(left[0]):
                    self._record_one(left.popleft())
                    self._decoder.breathe()
            self._decoder.breathe()
            if left and isinstance(left[0], FrameInFlight):
                del frames[: self._decoder.fetch(frames)]
            elif left:
                self._record_one(left.popleft())

    def _can_record(self, item: FrameInFlight | Queued) -> bool:
        """Say whether a thing can be recorded together with others: for some, others wait until all before is written."""
        return bool(self._decoder.fetched) if isinstance(item, FrameInFlight) else item[0] != AT_ONCE

    def _record_one(self, item: FrameInFlight | Queued) -> None:
        queued_ns = item.launched_ns if isinstance(item, FrameInFlight) else item[0]
        # What happened during a forward was queued after its beginning, but comes before it.
        if queued_ns != AT_ONCE:
            self._latest_ns = max(self._latest_ns, queued_ns + self._clock_ahead_ns)
        if not isinstance(item, FrameInFlight) and item[1] is slots_changed:
            self._changes.append(item[2])
            self._change_times_ns.append(self._latest_ns)
            return
        self.record_changes()
        self._recorder.moment = self._latest_ns if queued_ns != AT_ONCE else 0
        if isinstance(item, FrameInFlight):
            self._decoder.decode(item, self._latest_ns)
        else:
            self._decoder.record_due_loss()
            item[1](*item[2:])
        self._recorder.moment = 0

    def record_changes(self) -> None:
        """Record the changes of slots that wait for others to follow."""
        if self._changes:
            changes, times_ns = self._changes, self._change_times_ns
            self._changes, self._change_times_ns = [], []
            self._recorder.moment = times_ns[0]
            self._decoder.record_due_loss()
            self._recorder.slots_changed(changes, times_ns)
            self._recorder.moment = 0
