"""When our threads run: while the engine's thread waits for the device, if it is known when that is.

The engine's thread gives Python's lock up for a moment in each operation of torch's, and then waits for it as long as
whoever has got it computes, up to Python's switch interval of 5 ms. So our threads compute in short slices, let go of the lock
for real between two, and stop as soon as the engine's thread goes on.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

SLICE_NS: Final = 100_000
LET_GO_S: Final = 0.00002  # a sleep: somebody who waits for the lock has it before this thread asks for it again
PATIENCE_S: Final = (
    0.05  # an engine's thread that has not waited for so long does not run, or waits where nobody sees it
)


class Pauses:
    """The pauses of one engine's thread, which says when it waits for the device."""

    def __init__(self) -> None:
        self.open = False
        self.known = False  # whether it says so at present
        self._stopped = False
        self._paces: tuple[Pace, ...] = ()

    def pace(self) -> "Pace":
        """Return what another of our threads keeps to."""
        pace = Pace(self)
        self._paces = (*self._paces, pace)
        return pace

    def begin(self) -> None:
        """Say, on the engine's thread, that it is about to wait."""
        self.open, self.known = True, not self._stopped
        for pace in self._paces:
            if pace.waits:
                pace.waits = False
                pace.wake()

    def end(self) -> None:
        """Say that it goes on."""
        self.open = False

    def stop(self) -> None:
        """Have nobody wait for another pause: the recording ends."""
        self._stopped, self.known = True, False
        for pace in self._paces:
            pace.wake()


class Pace:
    """How one of our threads keeps to the pauses; `in_hurry` says that somebody waits for it, who comes first."""

    def __init__(self, pauses: Pauses) -> None:
        self.in_hurry: Callable[[], bool] = lambda: False
        self.waits = False  # for a pause
        self._pauses = pauses
        self._gate = threading.Lock()  # held, but for the moment in which somebody wakes the thread
        self._gate.acquire()
        self._begun_ns = 0  # the slice

    def wake(self) -> None:
        """End the thread's sleep; any thread may."""
        with contextlib.suppress(RuntimeError):  # somebody else was quicker
            self._gate.release()

    def sleep(self, seconds: float | None = None) -> bool:
        """Sleep, at most so long; return whether somebody has woken the thread."""
        return self._gate.acquire(timeout=-1 if seconds is None else max(seconds, 0))

    def breathe(self) -> None:
        """Let the engine's thread go on if it is its turn; to be called often."""
        if not self._pauses.known or time.perf_counter_ns() - self._begun_ns < SLICE_NS or self.in_hurry():
            return
        time.sleep(LET_GO_S)
        self.await_pause()

    def await_pause(self) -> None:
        """Sleep until the engine's thread waits for the device; not for long."""
        end = time.monotonic() + PATIENCE_S
        self.waits = True  # before the look: who opens a pause after it sees that somebody waits
        while not (self._pauses.open or self.in_hurry()) and self._pauses.known:
            if not self.sleep(end - time.monotonic()) and time.monotonic() >= end:
                self._pauses.known = False
            self.waits = True
        self.waits = False
        self._begun_ns = time.perf_counter_ns()
