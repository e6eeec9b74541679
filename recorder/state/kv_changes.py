"""KV bytes that changed without a write, as an event observed them."""

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.state import store_bytes
from ..trace.header import TraceHeader
from ..trace.reader import EventView
from ..trace.schema import PHASE_AFTER, PHASE_BEFORE
from .forward import UnusableEventError
from .pools import GroupPool

Int64Array = npt.NDArray[np.int64]


class KvChanges:
    """An event's observed changes, checked and sorted out by stream; streams are those of `runner`."""

    def __init__(self, view: EventView, header: TraceHeader, runner: int) -> None:
        """Raise `UnusableEventError` where the columns contradict one another or the header."""
        self._streams = header.streams(runner)
        self._stream = view.ints("kv_change_stream")
        self._slot = view.ints("kv_change_slot")
        self._phase = view.ints("kv_change_phase")
        self._bytes = view.bytes("kv_change_bytes")
        if not (len(self._stream) or len(self._slot) or len(self._phase) or len(self._bytes)):
            return  # by far the most frequent
        if not len(self._stream) == len(self._slot) == len(self._phase):
            raise UnusableEventError("the kv_change columns differ in length")
        if not set(np.unique(self._phase).tolist()) <= {PHASE_BEFORE, PHASE_AFTER}:
            raise UnusableEventError(f"kv_change_phase names a phase other than {PHASE_BEFORE} and {PHASE_AFTER}")
        if len(self._stream) and not 0 <= self._stream.min() <= self._stream.max() < len(self._streams):
            raise UnusableEventError(f"kv_change_stream names stream {self._stream.max()} of {len(self._streams)}")
        widths = np.array([stream.capture_bytes for _, stream in self._streams] or [0], dtype=np.int64)[self._stream]
        if len(self._bytes) != int(widths.sum()):
            raise UnusableEventError(f"kv_change_bytes has {len(self._bytes)} bytes, expected {int(widths.sum())}")
        slots = np.array([header.groups[group].num_slots for group, _ in self._streams] or [0], dtype=np.int64)
        if bool(((self._slot < 0) | (self._slot >= slots[self._stream])).any()):
            raise UnusableEventError("kv_change_slot names a slot that its pool does not have")
        self._offsets = np.cumsum(widths) - widths

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return len(self._stream) > 0

    @property
    def slots(self) -> Int64Array:
        """The slots that changed, each once."""
        return np.unique(self._slot)

    def slots_of(self, group: int) -> Int64Array:
        """The slots of a group that changed, `[n] int64`."""
        if not self:
            return self._slot
        mine = [number for number, (index, _) in enumerate(self._streams) if index == group]
        return self._slot[np.isin(self._stream, mine)]

    def apply(self, phase: int, pools: list[GroupPool], *, backend: str) -> None:
        """Put the bytes observed in `phase` into the pools."""
        if not self:
            return
        seen: dict[int, int] = {}
        for number, (group, stream) in enumerate(self._streams):
            place = seen.get(group, 0)
            seen[group] = place + 1
            chosen = np.flatnonzero((self._stream == number) & (self._phase == phase))
            if len(chosen):
                columns = self._offsets[chosen, None] + np.arange(stream.capture_bytes)
                store_bytes(
                    slots=self._slot[chosen],
                    data=self._bytes[columns],
                    pool=pools[group].pool.kv[place],
                    backend=backend,
                )
