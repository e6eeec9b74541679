"""A recorder for an engine on a GPU: the engine's thread launches and queues, a thread of ours does all the rest.

Everything goes through one queue, so that the trace has it in the order in which it happened. A forward waits there
until the device has come to its end; what happened after it waits behind it. Nothing on the engine's
thread waits for the device, the disk or this thread, but for `drain`.
"""

import dataclasses
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Concatenate, Final, ParamSpec

from ....kernels.arrays import Int64Array
from ....kernels.ops.hash.kv_source import KvSource
from ...process.endings import at_process_end
from ...trace.header import TraceHeader
from ...trace.schema import LATE, RAN_BEFORE, RECEIVE, TIER_POOL, TransferDirection, TransferStatus
from ...writing.outbox import RecorderStats
from ..forward_input import CopiedForward
from ..host_arrays import own_int64, runs_to_slots
from ..kv_tensor import KvTensor
from ..recorder import Recorder
from ..recording import beginning
from ..recurrent import StateChange
from ..slot_numbers import SlotsChanged
from .background import AT_ONCE, Background
from .capture import DeviceCapture
from .forward import DeviceForward
from .frame_decoder import FrameDecoder
from .host_copy import HostCopy, HostRoom
from .pauses import Pauses
from .queued import QueuedRecording, slots_changed
from .shadows import DeviceShadows

logger = logging.getLogger("kvcanary")

MAX_WAITING: Final = 16_384  # things queued; beyond it they are lost
_in_this_process: "weakref.WeakSet[DeviceRecorder]" = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """A forked child has neither our thread nor our file; asking for its process id in every step would take longer."""
    for recorder in list(_in_this_process):
        recorder.capture.off = recorder._foreign = True


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _record_with(record: Callable[..., Any], values: HostCopy, *args: Any) -> None:
    record(values.read(), *args)


_P = ParamSpec("_P")


def harmless(
    method: Callable[Concatenate["DeviceRecorder", _P], None],
) -> Callable[Concatenate["DeviceRecorder", _P], None]:
    """Make a method of the engine's thread harmless: nothing is raised, and after the first fault nothing is done."""

    @functools.wraps(method)
    def call(self: "DeviceRecorder", /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self.capture.off:
            return
        begin = perf_counter_ns()
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            self.switch_off(f"{method.__name__}: {self.error_text(error)}", error)
        self._engine_thread_ns += perf_counter_ns() - begin

    return call


def recorded_later(
    method: Callable[Concatenate[Recorder, _P], None],
) -> Callable[Concatenate["DeviceRecorder", _P], None]:
    """Return a method that has one of `Recorder` called on the recorder's thread, after all that is queued so far."""

    @functools.wraps(method)
    def call(self: "DeviceRecorder", /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        self.later(functools.partial(method, self.recorder, *args, **kwargs))

    return call


class DeviceRecorder:
    """Records one engine whose block tables and pools are CUDA tensors; has the recording methods of `Recorder`.

    As there, no method raises after construction: a fault switches the recorder off, and the engine goes on.

    Args:
        path: as for `Recorder`, as are `header`, `kv_sources` and `writer_options`.
        header: what the engine is.
        tables: the engine's block table of each of the header's tables.
        luts: its full-to-SWA tables.
        kv_sources: where the bytes lie.
        state_sources: as for `Recorder`, on the device.
        kv_watch_every: forwards between two searches for bytes that nobody wrote, 0 never.
        frame_bytes: device memory for forwards in flight; those that do not fit are lost, and counted.
        writer_options: for the trace's writer.

    Raises:
        ValueError: an engine that cannot be recorded this way; the message says why.
        TraceError: the file cannot be created.
    """

    def __init__(
        self,
        path: str | Path,
        header: TraceHeader,
        *,
        tables: Sequence[Any],
        luts: Sequence[Any],
        kv_sources: Mapping[tuple[int, int], KvSource | KvTensor],
        state_sources: Mapping[int, Sequence[Any]] | None = None,
        kv_watch_every: int = 1,
        frame_bytes: int = 64 << 20,
        **writer_options: Any,
    ) -> None:
        shadows = DeviceShadows(header, tables=tables, luts=luts, sources=kv_sources, states=state_sources)
        self.recorder: Recorder = Recorder(
            path, header, kv_sources=kv_sources, kv_watch_every=kv_watch_every, **writer_options
        )
        self.header = self.recorder.header
        with beginning(self.recorder):
            self._capture = DeviceCapture(shadows, frame_bytes=frame_bytes, watch_every=kv_watch_every)
            self._capture.error_text = self.error_text
            self._capture.prepare()
            self._decoder = FrameDecoder(self.recorder, self._capture)
            self._room = HostRoom()
            self._foreign = False
            self._engine_thread_ns = 0
            self._queued = QueuedRecording(self.recorder, self._decoder)
            _in_this_process.add(self)
            # When the engine's thread waits for the device, if its adapter says so.
            self.pauses = Pauses()
            self._background = Background(
                begin=self._decoder.reader.use_device,
                record=self._queued.record,
                on_look=self._check,
                on_death=self._died,
                room_words=int(self._capture.frames.shape[0]),
                crowded=lambda: self._capture.crowded,
                pauses=self.pauses,
            )
            self._decoder.breathe = self._background.pace.breathe
            writer, pace = self.recorder.outbox.writer, self.pauses.pace()
            pace.in_hurry = lambda: not writer.has_room(writer.settings.max_queued_bytes // 2)
            writer.file.breathe = pace.breathe
            self._queue = self._background.queue
            self._capture.deliver = self._background.put
            self._capture.on_no_room = functools.partial(
                self._lose, "the device had no room for another forward in flight"
            )
            self._capture.on_not_carried = lambda one: self.later_with(one.record, one.values)
            self._capture.on_changed = functools.partial(
                self._lose, "what the engine gave out was overwritten before it was recorded"
            )
        self._no_close_at_end = at_process_end(self.close, priority=3)  # before the recorder's own

    # The engine's thread.

    @harmless
    def before_forward(self, forward: DeviceForward) -> None:
        """Capture what a forward is about to read and write; runs on the current stream, waits for nothing."""
        self._capture.before(forward)

    @harmless
    def after_forward(self, *, note: str = "", failed: bool = False) -> None:
        """Complete the forward that `before_forward` began; it failed if `failed` is true or a `note` says how."""
        self._capture.after(note or ("it failed" if failed else ""))

    @property
    def off(self) -> str:
        """Why nothing is recorded any more, empty while it is."""
        return self.recorder.off or ("the device is captured no more" if self._capture.off else "")

    @property
    def capture(self) -> DeviceCapture:
        """For callers that catch faults and take the time: its `before` and `after` do the same, and may raise."""
        return self._capture

    def later(self, record: Callable[..., Any], *args: Any) -> None:
        """Have `record` called with `args` on the recorder's thread once everything queued so far is recorded."""
        if self._capture.off:
            return
        if len(self._queue) < MAX_WAITING:
            self._queue.append((perf_counter_ns(), record, *args))
            if self._background.asleep:
                self._background.wake()
        else:
            self._lose("more happened than could be recorded")

    def later_with(self, record: Callable[..., Any], values: Any, *args: Any) -> None:
        """Have `record` called `later`, with what integers on the device or the host are by now and `args`."""
        if not self._capture.off:
            if self._capture.waiting:
                self._capture.carry_no_longer()
            self.later(_record_with, record, HostCopy(values, self._room), *args)

    def with_next_forward(self, record: Callable[[Int64Array], None], values: Any) -> None:
        """As `later_with`, of integers that nobody changes any more: the next forward's frame carries them, if it can.

        `record` is called right before that forward is recorded, or before what comes `later_with` others.
        """
        if not self._capture.off and not (hasattr(values, "device") and self._capture.carry(values, record)):
            self.later_with(record, values)

    def before_each(self, callback: Callable[[CopiedForward], None]) -> None:
        """Have `callback` called with each forward that can be recorded, right before it is, by the recorder's thread."""
        self._decoder.before_each = callback

    def record_sampled(self, forward: int, sampled: Callable[..., Mapping[str, Any]], *args: Any) -> None:
        """As `Recorder.sampled`, to be recorded `later`: `sampled(*args)` gives its other arguments."""
        said = sampled(*args)
        if said["sampled_tokens"].size:
            self.recorder.sampled(forward=forward, **said)

    request = recorded_later(Recorder.request)
    request_status = recorded_later(Recorder.request_status)
    sampled = recorded_later(Recorder.sampled)
    slots = recorded_later(Recorder.slots)

    def slot_changed(self, change: SlotsChanged) -> None:
        """As `Recorder.slot_changed`; those that follow one another are recorded at once."""
        self.later(slots_changed, change)

    mark = recorded_later(Recorder.mark)
    freeze = recorded_later(Recorder.freeze)

    @harmless
    def state_changed(self, change: StateChange, *, pool: int, slots: Any, sources: Any = ()) -> None:
        """As `Recorder.state_changed`, of slots on the device or the host; the bytes are hashed on the current stream."""
        self.states_hashed(
            change, pool, self._capture.shadows.hash_states(pool, slots, sources if change == "copy" else None)
        )

    @harmless
    def states_hashed(self, change: StateChange, pool: int, values: Any) -> None:
        """As `Recorder.states_hashed`, of what lies on the device: `[3 * n] int64`, which nobody changes any more."""
        self.with_next_forward(functools.partial(self.recorder.states_hashed, change, pool), values)

    give_up_states = recorded_later(Recorder.give_up_states)

    def lost(self, note: str) -> None:
        """As `Recorder.lost`."""
        if not self._capture.off:
            self._lose(note)

    @harmless
    def kv_copy(self, /, *, group: int, src: Any, dst: Any, count: Any, **kwargs: Any) -> None:
        """As `Recorder.kv_copy`; of what comes from another tier the bytes are not watched until they are written."""
        src, dst, count = own_int64(src), own_int64(dst), own_int64(count)
        self.later(functools.partial(self.recorder.kv_copy, group=group, src=src, dst=dst, count=count, **kwargs))
        if kwargs.get("dst_tier", TIER_POOL) == TIER_POOL:
            read = runs_to_slots(src, count) if kwargs.get("src_tier", TIER_POOL) == TIER_POOL else None
            self._capture.shadows.copy(group, read, runs_to_slots(dst, count))

    @harmless
    def kv_copy_later(
        self, /, copies: Callable[[], tuple[Int64Array, Int64Array, Int64Array]], *, filled: Any | None, **kwargs: Any
    ) -> None:
        """As `kv_copy` of slots that lie on the device yet: `copies` gives src, dst, count, on the recorder's thread.

        `filled` are the pool's slots that get bytes from another tier, any integer tensor; None for none.
        """

        def record() -> None:
            src, dst, count = copies()
            self.recorder.kv_copy(src=src, dst=dst, count=count, **kwargs)

        self.later(record)
        if filled is not None:
            self._capture.shadows.forget_slots(kwargs["group"], filled)

    def sweep(self, **kwargs: Any) -> None:
        """As `Recorder.sweep`; waits until everything queued so far is recorded, since it compares bytes with it."""
        if self._caught_up():
            self.recorder.sweep(**kwargs)

    @harmless
    def transfer(
        self, /, status: TransferStatus, *, direction: TransferDirection, group: int, slots: Any, **kwargs: Any
    ) -> None:
        """As `Recorder.transfer`; waits as `sweep` does."""
        if self._caught_up():
            own = own_int64(slots)
            self.recorder.transfer(status, direction=direction, group=group, slots=own, **kwargs)
            if direction == RECEIVE and status == "end":
                self._capture.shadows.learn(group, *self.recorder.known_bytes(group, own))

    @harmless
    def transfer_unread(
        self, /, status: TransferStatus, *, direction: TransferDirection, group: int, slots: Any, **kwargs: Any
    ) -> None:
        """As `Recorder.transfer` of slots on the host whose bytes nobody reads; waits for nothing."""
        own = own_int64(slots)
        transfer = functools.partial(self.recorder.transfer, status, direction=direction, group=group, slots=own)
        self.later(functools.partial(transfer, read=False, **kwargs))
        if direction == RECEIVE and status == "end":
            inside = (own >= 0) & (own < self.header.groups[group].num_slots)
            self._capture.shadows.forget_slots(group, own[inside])

    def forget_slots(self, group: int, slots: Any) -> None:
        """Take for unknown what lies in slots of a pool from here on: any integer tensor, whose outermost stand for those beyond."""
        self._capture.shadows.forget_slots(group, slots.clamp(0, self.header.groups[group].num_slots - 1))

    def _caught_up(self) -> bool:
        """Wait until everything queued so far is recorded, and return whether the trace can continue from it.

        If it cannot, a loss after which nothing is known is due, and stands for what is not recorded now. Whoever
        waited in vain is not kept waiting again: the recorder switches itself off.
        """
        if self._capture.off:
            return False
        if not self.drain():
            self.switch_off("what the device captured did not arrive in time")
        off: bool = self._capture.off  # since the drain, another thread may have set it
        return not off and self._decoder.continues

    def drain(self, timeout: float = 30.0) -> bool:
        """Wait until everything queued so far is recorded; False if that takes longer, or our thread has ended."""
        return self._background.drain(timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Write out what is queued and the file's end, waiting at most `timeout` seconds."""
        if self._foreign:
            return
        self._no_close_at_end()
        pending = self._capture.pending
        if pending is not None and get_ident() == self._capture.engine_thread:
            self.after_forward(note="recording ended during this forward")
        elif pending is not None:  # only the engine's own thread knows its stream
            self.mark(f"the recording ended during forward {pending.number}")
        self._capture.off = True
        self.pauses.stop()
        self._background.put_at_once(None)
        end = time.monotonic() + timeout
        if not self._background.join(timeout):
            logger.error("kvcanary: %s: what the device captured last did not arrive in time", self.path)
            self.recorder.lost("what the device captured last did not arrive in time")
        self.recorder.close(max(end - time.monotonic(), 1.0))

    def switch_off(self, reason: str, error: BaseException | None = None) -> None:
        """Stop recording for good and say so in the log and the trace."""
        self._capture.off = True
        self.pauses.stop()
        self._background.put_at_once((AT_ONCE, self.recorder.switch_off, reason, error))
        self._background.put_at_once(None)

    def error_text(self, error: BaseException) -> str:
        """As `Recorder.error_text`."""
        return self.recorder.error_text(error)

    @property
    def next_forward(self) -> int:
        """The number that the next `before_forward` will get."""
        return self._capture.next_forward

    @property
    def path(self) -> Path:
        """The trace."""
        return self.recorder.path

    def stats(self) -> RecorderStats:
        """Return what the recorder has done so far; `engine_thread_ns` counts the engine's thread alone."""
        return dataclasses.replace(self.recorder.stats(), engine_thread_ns=self._engine_thread_ns)

    @property
    def device_bytes(self) -> int:
        """Device memory of shadows and frames; of the engine's own, what waits for the next frame is held beside it."""
        probe = self._capture.probe
        return self._capture.shadows.bytes + 8 * int(self._capture.frames.shape[0]) + (probe.bytes if probe else 0)

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory."""
        return self._decoder.reader.pinned_bytes

    def begins_late(self) -> None:
        """As `Recorder.begins_late`."""
        self._background.put((perf_counter_ns(), self._decoder.record_loss, RAN_BEFORE, LATE))
        self._capture.reset()

    def _lose(self, note: str) -> None:
        if len(self._background.queue) < 2 * MAX_WAITING:  # else the forward that holds everything anew says it
            self._background.put((perf_counter_ns(), self._decoder.record_loss, note))
        self._capture.reset()  # after it, so that such a forward finds it recorded

    # Our own thread.

    def _check(self) -> None:
        self._queued.record_changes()
        if self.recorder.off:
            self._capture.off = True

    def _died(self, error: BaseException) -> None:
        self._capture.off = True
        self.recorder.moment = 0
        self.recorder.switch_off(f"the recorder's own thread: {self.error_text(error)}", error)
