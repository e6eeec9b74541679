"""The recorder's own thread: it records what was queued, in order, while the engine's thread waits for the device.

Nobody wakes it step by step: a thread that is woken wants Python's lock, and gets it from the engine in the middle of
a launch. It looks by itself, at about the moment when the engine has launched a forward and waits for an earlier one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from .forward import FrameInFlight
from .pauses import Pauses

# When, what records it, and what that is called with: `(int, callable, *arguments)`. One object each, since all that
# piles up here brings the next garbage collection of the engine's process nearer.
Queued = tuple[Any, ...]

FRAMES_LEFT_WAITING: Final = 2
# Frames that are awaited and recorded at once, if it is known when the engine's thread waits: one by one each would have this
# thread wake up, ask the device and write a file, all with caches that have forgotten it.
FRAMES_TOGETHER: Final = 4
ROOM_SHARE: Final = 4  # frames of so large a part of their room are not awaited
MOST_TOGETHER: Final = 4_096  # things
BEHIND: Final = 256  # things that have piled up meanwhile: no waiting for a better moment then
AT_ONCE: Final = -1
STILL_THERE_S: Final = 0.1

AFTER_LAUNCH_NS: Final = 1_000_000  # by then the engine has launched what follows a forward
SHORTEST_REST_NS: Final = 2_000_000
LONGEST_REST_NS: Final = 20_000_000
LONGEST_FOR_ONE_NS: Final = 10_000_000  # frame that is awaited
IDLE_NS: Final = 50_000_000  # nothing new for so long: what waits is recorded


class Background:
    """A queue, whose things the thread has not yet seen, and the thread that empties it.

    Who appends to `queue` wakes the thread if it is `asleep`, as `put` does. The thread calls `begin` first, `record` with the
    things in order, many at once, and `on_look` each time it has looked into the queue; `on_death` with what they raised:
    nothing is recorded after. `room_words` are all that frames in flight have; while they are `crowded`, no pause is waited for.
    """

    def __init__(
        self,
        *,
        begin: Callable[[], None],
        record: Callable[[Sequence[FrameInFlight | Queued]], None],
        on_look: Callable[[], None],
        on_death: Callable[[BaseException], None],
        room_words: int,
        crowded: Callable[[], bool],
        pauses: Pauses,
    ) -> None:
        self._begin, self._record, self._on_look, self._on_death = begin, record, on_look, on_death
        self._room_words = room_words
        self._pauses = pauses
        self.pace = pauses.pace()
        self.pace.in_hurry = lambda: self._hurry or self._at_once or len(self.queue) > MOST_TOGETHER or crowded()
        self.queue: deque[FrameInFlight | Queued | None] = deque()
        self.asleep = False
        self._hurry = False  # something that was queued is to be recorded now
        # The thread's own.
        self._waiting: deque[FrameInFlight | Queued] = deque()
        self._frames = 0  # among those waiting
        self._newest_ns = 0  # when the newest frame's capture was launched
        self._step_ns = 0  # between two, of those that were last found in the queue
        self._together = 1  # frames that are awaited
        self._received_ns = 0  # when something was last found in the queue
        self._at_once = False
        self._all_queued = False
        self._thread = threading.Thread(target=self._run, name="kvcanary-recorder", daemon=True)
        self._thread.start()

    def put(self, item: FrameInFlight | Queued | None) -> None:
        """Queue something; None ends the thread once all before it is recorded."""
        self.queue.append(item)
        if self.asleep:
            self.wake()

    def put_at_once(self, item: Queued | None) -> None:
        """Queue something and have everything up to it recorded now; a time of `AT_ONCE` says so too."""
        self.queue.append(item)
        self._hurry = True
        self.wake()

    def drain(self, timeout: float) -> bool:
        """Wait until everything queued so far is recorded; False if that takes longer, or the thread has ended."""
        if threading.current_thread() is self._thread:
            return False
        reached = threading.Event()
        self.put_at_once((AT_ONCE, reached.set))
        end = time.monotonic() + timeout
        while not reached.wait(min(STILL_THERE_S, max(end - time.monotonic(), 0.0))):
            if not self._thread.is_alive() or time.monotonic() >= end:
                return reached.is_set()
        return True

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; return whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def wake(self) -> None:
        """Have the thread look into the queue now."""
        self.pace.wake()

    def _run(self) -> None:
        try:
            self._begin()
            while not self._all_queued or self._waiting:
                self._hurry = False  # before the look: what is queued after it says so again
                self._receive()
                while self._is_due():
                    self._record_waiting()
                self._at_once = False
                self._on_look()
                if not self._all_queued and len(self.queue) < BEHIND:
                    self._rest()
        except BaseException as error:  # noqa: BLE001  # the engine must go on whatever happens here
            self._waiting.clear()
            self._on_death(error)

    def _receive(self) -> None:
        """Take over what is queued, and see whether the engine is idle."""
        now = time.perf_counter_ns()
        if self.queue:
            self._received_ns = now
        elif now - self._received_ns >= IDLE_NS:
            self._at_once = True
        newest: FrameInFlight | None = None
        before = self._frames
        while self.queue:
            item = self.queue.popleft()
            if item is None:
                self._all_queued = self._at_once = True
                break
            self._waiting.append(item)
            if isinstance(item, FrameInFlight):
                self._frames += 1
                newest = item
            elif item[0] == AT_ONCE:
                self._at_once = True
        if newest is not None:
            self._step_ns = (newest.launched_ns - self._newest_ns) // (self._frames - before)
            self._newest_ns = newest.launched_ns
            fit = self._room_words // (ROOM_SHARE * max(newest.layout.words, 1))
            self._together = min(max(fit, 1), FRAMES_TOGETHER) if self._pauses.known else 1

    def _is_due(self) -> bool:
        many = self._frames > FRAMES_LEFT_WAITING or len(self._waiting) > MOST_TOGETHER
        return bool(self._waiting) and (many or self._at_once)

    def _record_waiting(self) -> None:
        """Record what is due, at most so many things and frames."""
        items: list[FrameInFlight | Queued] = []
        end = self._frames - FRAMES_TOGETHER
        while self._is_due() and self._frames > end and len(items) < MOST_TOGETHER:
            item = self._waiting.popleft()
            self._frames -= isinstance(item, FrameInFlight)
            items.append(item)
        self._record(items)

    def _rest(self) -> None:
        """Wait for a good moment; if nothing waits and nothing comes, until something is queued."""
        now = time.perf_counter_ns()
        if not self._waiting and now - self._received_ns >= IDLE_NS:
            self.asleep = True
            if not self.queue:  # else it came before anybody could know that this thread has to be woken
                self.pace.sleep()
            self.asleep = False
            return
        if self._pauses.known:
            others = self._newest_ns + (self._together - 1) * self._step_ns
            rest = min(max(others - now, SHORTEST_REST_NS), self._together * LONGEST_FOR_ONE_NS)
            if not self.pace.sleep(rest / 1e9):
                self.pace.await_pause()
            return
        moment = self._newest_ns + max(self._step_ns, SHORTEST_REST_NS) + AFTER_LAUNCH_NS
        self.pace.sleep(min(max(moment - now, SHORTEST_REST_NS), LONGEST_REST_NS) / 1e9)
