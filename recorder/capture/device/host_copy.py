"""Integers on the device, copied to the host without waiting: the engine's thread asks, the recorder's reads them later."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ....kernels.arrays import Int64Array
from ..host_arrays import own_int64
from .capture import FrameBuffer

ROOM_WORDS: Final = 1 << 17


class HostCopy:
    """What integers are where the current stream comes to this point, copied to the host; nothing waits for it here."""

    __slots__ = ("_back", "_there", "_values")

    def __init__(self, values: Any, room: "HostRoom | None" = None) -> None:
        self._there: Any = None
        self._values: Any
        self._back: Callable[[], None] | None = None
        if getattr(getattr(values, "device", None), "type", "") != "cuda":
            self._values = own_int64(values)
            return
        taken = None if room is None else room.take(values.numel())
        if taken is None:
            self._values = values.to("cpu", non_blocking=True)  # pinned
            self._there = _new_event()
        else:
            self._values, self._there, self._back = taken
            self._values.copy_(values.reshape(-1), non_blocking=True)
        self._there.record()

    def read(self) -> Int64Array:
        """Return them, to be called once; waits until they are there."""
        if self._there is None:
            return self._values
        if not self._there.query():
            self._there.synchronize()
        found = own_int64(self._values)
        if self._back is not None:
            self._back()
        return found


class HostRoom:
    """Pinned memory for copies under way, and their events: to take them anew takes longer than to copy.

    One thread takes, another gives back, in the same order.
    """

    def __init__(self) -> None:
        self._buffer = FrameBuffer(ROOM_WORDS)
        self._memory: Any = None
        self._events: deque[Any] = deque()

    def take(self, words: int) -> tuple[Any, Any, Callable[[], None]] | None:
        """Return room for so many, an event, and what gives both back; None if there is no room."""
        place = self._buffer.take(words)
        if place is None:
            return None
        if self._memory is None:
            import torch

            self._memory = torch.empty(ROOM_WORDS, dtype=torch.int64, pin_memory=True)
        at, event = place % ROOM_WORDS, self._events.popleft() if self._events else _new_event()

        def back() -> None:
            self._buffer.give_back(place, words)
            self._events.append(event)

        return self._memory[at : at + words], event, back


def _new_event() -> Any:
    import torch

    return torch.cuda.Event()
