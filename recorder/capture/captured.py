"""What a caller tells that has taken a whole forward down by itself, on the device; it must know what became of it."""

from collections.abc import Mapping

import numpy as np

from .forward_event import forward_event
from .forward_input import CopiedForward
from .host_arrays import ByteArray, Int64Array, wrapped
from .kv_watch import take_forward
from .recording import Recording

_NOTHING = np.empty(0, np.int64)


class CapturedRecording(Recording):
    """A recording that takes forwards as they were captured elsewhere; none of its methods is guarded."""

    def start_over(self, note: str, *, tables: bool = True) -> bool:
        """As `lost`, for a caller that must know whether it was taken; may raise.

        Without `tables` the picture of the tables stays, which may be large: for a caller that has its own.
        """
        with self._lock:
            if not self._outbox.put_unknown_loss(note, self._now()):
                return False
            if tables:
                self._state.forget()
            for kv in self._kv:
                kv.forget()
            return True

    def put_captured(self, forward: CopiedForward, gathered: Mapping[int, list[ByteArray]]) -> bool:
        """Tell of a whole forward whose changes were found on the device; may raise.

        Args:
            forward: with its `changes` and `kv_changes`.
            gathered: for each of the runner's groups, each stream's `[T, capture_bytes]` written bytes.

        Returns:
            Whether the trace will hold it. If not, nothing after it may go on from it: `start_over`.
        """
        with self._lock:
            if self._off:
                return False
            if self._numbers.differ:
                raise ValueError("padding_slots other than (0,) cannot be recorded on the device; use Recorder")
            forward.input_ids = self._hash_tokens(forward.input_ids)
            if "truth_tokens" in forward.changes:
                forward.changes["truth_tokens"] = wrapped(self._hash_tokens(forward.changes["truth_tokens"]))
            self._forwards = forward.number + 1
            if not self._put(forward_event(forward, _NOTHING, _NOTHING, gathered)):
                return False
            take_forward(forward, self._kv, gathered)
            return True

    def known_bytes(self, group: int, slots: Int64Array) -> tuple[Int64Array, list[ByteArray]]:
        """Return those of a group's slots whose bytes the trace has, and of each stream `[n, capture_bytes]`."""
        with self._lock:
            return self._kv[group].known_bytes(slots) if self._kv else (slots[:0], [])

    def drop_captured(self, number: int, written: Mapping[int, Int64Array]) -> None:
        """Count a forward that was taken down and cannot be told; `written[group]` are the slots that it wrote."""
        with self._lock:
            self._forwards = number + 1
            for group, slots in written.items():
                self._kv[group].lose(slots)
            self._outbox.drop()
