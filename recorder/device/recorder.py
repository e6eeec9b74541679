"""A recorder for an engine on a GPU: the engine's thread launches and queues, a thread of ours does all the rest.

Everything that is told goes through one queue, so that the trace has it in the order in which it was told. A forward
waits there until the device has come to its end; what was told after it waits behind it. Nothing on the engine's
thread waits for the device, the disk or this thread, but for `drain`.
"""

import functools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...kernels.kv_source import KvSource
from ..forward_input import CopiedForward, KvChange
from ..header import TraceHeader
from ..host_arrays import Int64Array
from ..outbox import RecorderStats
from ..recorder import Recorder
from ..schema import PHASE_AFTER
from .capture import DeviceCapture
from .forward import DeviceForward, Flight
from .landing import Landed, Landing, split_kv_changes
from .shadows import DeviceShadows
from .table_changes import TableChanges
from .truth import TruthBook

logger = logging.getLogger("kvcanary")

MAX_WAITING: Final = 65_536  # things told and not yet taken down; beyond it they are lost
FLIGHTS_LEFT_WAITING: Final = 2
AFTER_LAUNCH_S: Final = 0.001  # by then the engine has launched what follows a forward, and waits for an earlier one
IDLE_S: Final = 0.05
AT_ONCE: Final = -1
_NOTHING = np.empty(0, np.int64)


class DeviceRecorder:
    """Records one engine whose block tables and pools are CUDA tensors; has the telling methods of `Recorder`.

    Args:
        path: the trace to write.
        header: what the engine is.
        tables: the engine's block table of each of the header's tables.
        luts: its full-to-SWA tables.
        kv_sources: for each `(group, stream)`, where the bytes lie.
        kv_watch_every: forwards between two looks for bytes that nobody wrote, 0 never.
        frame_bytes: device memory for forwards in flight; where they do not fit, forwards are lost, and said to be.
        writer_options: as for `Recorder`.

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
        kv_sources: Mapping[tuple[int, int], KvSource],
        kv_watch_every: int = 1,
        frame_bytes: int = 64 << 20,
        **writer_options: Any,
    ) -> None:
        shadows = DeviceShadows(header, tables=tables, luts=luts, sources=kv_sources)
        self._recorder = Recorder(path, header, kv_sources=kv_sources, kv_watch_every=kv_watch_every, **writer_options)
        self.header = self._recorder.header
        self._capture = DeviceCapture(
            shadows, frame_bytes=frame_bytes, watch_every=kv_watch_every, clock=self._recorder.clock
        )
        self._capture.prepare()
        self._landing = Landing(self._capture)
        self._truth = TruthBook(header.truth_table)
        self._changes = TableChanges(header, [(runner.table, runner.luts) for runner in shadows.runners])
        self._pending: Flight | None = None
        self._queue: queue.SimpleQueue[Flight | tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._off = False
        # Our thread's: whether a frame's changes go on from what the trace has, and whether the last thing that the
        # trace took was a loss after which nothing is known.
        self._follows = True
        self._said_lost = False
        self._waiting: deque[Flight | tuple[int, Callable[[], None]]] = deque()
        self._flights = 0  # among those waiting
        self._at_once = False
        self._told_all = False
        self._engine_thread_ns = 0
        self._thread = threading.Thread(target=self._run, name="kvcanary-landing", daemon=True)
        self._thread.start()

    # The engine's thread.

    def before_forward(self, told: DeviceForward) -> None:
        """Take down what a forward is about to read and write; runs on the current stream, waits for nothing."""
        begin = time.perf_counter_ns()
        if self._live():
            if self._pending is not None:
                self.after_forward(note="the engine told of no end of this forward")
            self._pending = self._capture.before(told)
            if self._pending is None:
                self._lose("the device had no room for another forward in flight")
        self._engine_thread_ns += time.perf_counter_ns() - begin

    def after_forward(self, *, note: str = "") -> None:
        """Complete the forward that `before_forward` began."""
        begin = time.perf_counter_ns()
        flight, self._pending = self._pending, None
        if flight is not None and self._live():
            flight.note = note
            self._capture.after(flight)
            self._queue.put(flight)
        self._engine_thread_ns += time.perf_counter_ns() - begin

    def later(self, tell: Callable[[], None]) -> None:
        """Have `tell` called on the recorder's thread once everything told so far is taken down."""
        if not self._live():
            return
        if self._queue.qsize() >= MAX_WAITING:
            self._lose("more was told than could be taken down")
        else:
            self._queue.put((self._recorder.clock(), tell))

    def sampled_later(self, forward: int, sampled: Callable[[], tuple[Int64Array, Int64Array]]) -> None:
        """As `Recorder.sampled`; `sampled` gives tokens and lens, and is called on the recorder's thread."""

        def tell() -> None:
            tokens, lens = sampled()
            if tokens.size:
                self._recorder.sampled(forward=forward, sampled_tokens=tokens, sampled_lens=lens)

        self.later(tell)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in _TOLD_LATER:
            raise AttributeError(name)
        method = getattr(self._recorder, name)
        return lambda **kwargs: self.later(functools.partial(method, **kwargs))

    def slots(self, kind: str, **kwargs: Any) -> None:
        """As `Recorder.slots`."""
        self.later(functools.partial(self._recorder.slots, kind, **kwargs))

    def mark(self, note: str, labels: Mapping[str, Any] | None = None) -> None:
        """As `Recorder.mark`."""
        self.later(functools.partial(self._recorder.mark, note, labels))

    def lost(self, note: str) -> None:
        """As `Recorder.lost`."""
        if self._live():
            self._lose(note)

    def sweep(self, **kwargs: Any) -> None:
        """As `Recorder.sweep`; waits until everything told so far is taken down, since it compares bytes with it."""
        if self._live() and self.drain():
            self._recorder.sweep(**kwargs)

    def transfer(self, status: str, **kwargs: Any) -> None:
        """As `Recorder.transfer`; waits as `sweep` does."""
        if self._live() and self.drain():
            self._recorder.transfer(status, **kwargs)

    def drain(self, timeout: float = 30.0) -> bool:
        """Wait until everything told so far is taken down; False where that takes longer."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return not self._thread.is_alive()
        reached = threading.Event()
        self._queue.put((AT_ONCE, reached.set))
        return reached.wait(timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Write out what is queued and the file's end, waiting at most `timeout` seconds."""
        if os.getpid() != self._pid:
            return
        if self._pending is not None:
            self.after_forward(note="recording ended during this forward")
        self._off = True
        self._queue.put(None)
        end = time.monotonic() + timeout
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.error("kvcanary: %s: what the device took down last did not arrive in time", self.path)
        self._recorder.close(max(end - time.monotonic(), 1.0))

    def switch_off(self, reason: str, error: BaseException | None = None) -> None:
        """Stop recording for good and say so in the log and the trace."""
        self._off = True
        self._queue.put((AT_ONCE, functools.partial(self._recorder.switch_off, reason, error)))
        self._queue.put(None)

    @property
    def next_forward(self) -> int:
        """The number that the next `before_forward` will get."""
        return self._capture.next_forward

    @property
    def path(self) -> Path:
        """The trace."""
        return self._recorder.path

    def stats(self) -> RecorderStats:
        """Return what the recorder has done so far; `engine_thread_ns` counts the engine's thread alone."""
        stats = self._recorder.stats()
        return RecorderStats(
            forwards=stats.forwards,
            events=stats.events,
            dropped_events=stats.dropped_events,
            engine_thread_ns=self._engine_thread_ns,
            off=stats.off,
        )

    @property
    def device_bytes(self) -> int:
        """Device memory of shadows and frames."""
        return self._capture.shadows.bytes + 8 * int(self._capture.frames.shape[0])

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory."""
        return self._landing.pinned_bytes

    def _live(self) -> bool:
        return not self._off and os.getpid() == self._pid

    def _lose(self, note: str) -> None:
        self._capture.reset()
        self._queue.put((self._recorder.clock(), functools.partial(self._say_lost, note)))

    # Our own thread.

    def _run(self) -> None:
        """Take down what was told, in order, while the engine's thread waits for the device: it needs the interpreter.

        That is while the forward after next is in flight, a moment after its launch; or when nothing more comes.
        """
        try:
            while not self._told_all:
                self._receive()
                while self._waiting and (self._flights > FLIGHTS_LEFT_WAITING or self._at_once):
                    self._take_next()
                self._at_once = self._at_once and bool(self._waiting)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            self._off = True
            self._recorder.switch_off(f"what the device took down: {type(error).__name__}: {error}", error)

    def _receive(self) -> None:
        """Wait for something told, or for so long that the engine seems to be idle."""
        try:
            item = self._queue.get(timeout=IDLE_S if self._waiting else None)
        except queue.Empty:
            self._at_once = True
            return
        if item is None:
            self._told_all = self._at_once = True
        elif isinstance(item, Flight):
            self._flights += 1
            self._waiting.append(item)
            if self._capture.on_gpu and not self._at_once:
                time.sleep(AFTER_LAUNCH_S)
        else:
            self._waiting.append(item)
            self._at_once |= item[0] == AT_ONCE

    def _take_next(self) -> None:
        item = self._waiting.popleft()
        if isinstance(item, Flight):
            self._flights -= 1
            with self._recorder.as_of(item.time_ns):
                self._take(item)
        else:
            time_ns, tell = item
            with self._recorder.as_of(max(time_ns, 0)):
                tell()

    def _take(self, flight: Flight) -> None:
        try:
            landed = self._landing.land(flight)
        finally:
            self._capture.release(flight)
        if flight.fresh:
            if not self._said_lost:
                self._say_lost("forwards were dropped, the writer's queue was full")
            self._follows = self._said_lost
            if not self._follows:
                self._capture.reset()
        if not self._follows:
            self._recorder.drop_captured(flight.number, {})
        elif not landed.complete:
            # What did not fit is told with the next forward that has room; until then nothing can be judged by it.
            self._changes.keep(flight.told.runner, landed)
            self._recorder.drop_captured(flight.number, self._written(flight.told.runner, landed))
            self._capture.catch_up(still=True)
        elif self._put(flight, landed):
            self._said_lost = False
            self._capture.catch_up(still=False)
        else:
            self._break_off()

    def _break_off(self) -> None:
        """Pass over what is in flight; the next forward of the engine tells everything anew."""
        self._follows = False
        self._capture.reset()

    def _say_lost(self, note: str) -> None:
        """Say that something is missing, nobody knows what."""
        self._truth.forget()
        self._changes.forget()
        self._said_lost = self._recorder.start_over(note)

    def _put(self, flight: Flight, landed: Landed) -> bool:
        told, runner = flight.told, self._capture.shadows.runners[flight.told.runner]
        elsewhere = np.full(landed.out_cache_loc.size, -1, np.int64)
        tables = len(self.header.tables)
        ids = np.full(landed.rows.size, -1, np.int64)
        ids[: told.request_ids.size] = told.request_ids[: landed.rows.size]
        forward = CopiedForward(
            mode=told.mode,
            runner=told.runner,
            number=flight.number,
            time_ns=flight.time_ns,
            rows=landed.rows,
            request_ids=ids,
            prefix_lens=landed.prefix_lens,
            extend_lens=landed.extend_lens,
            input_ids=landed.input_ids,
            positions=landed.positions,
            out_cache_loc=tuple(landed.out_cache_loc if t == runner.table else elsewhere for t in range(tables)),
            reads=(),
            luts=(),
            truth=None,
            kv_watched=flight.watched,
            note="; ".join(part for part in (flight.note, landed.note) if part),
        )
        forward.changes = self._changes.take(told.runner, landed)
        forward.changes |= self._truth.changes(landed.rows, told.truth, _truth_lens(told))
        forward.kv_changes = [
            KvChange(stream=stream, phase=PHASE_AFTER, slots=slots, content=content)
            for stream, slots, content in split_kv_changes(landed, flight.layout)
        ]
        written = iter(landed.written)
        gathered = {g: [next(written) for _ in self.header.groups[g].streams] for g in runner.groups}
        written_to = self._written(told.runner, landed)
        forward.written = tuple(written_to.get(g, _NOTHING) for g in range(len(self.header.groups)))
        return self._recorder.put_captured(forward, gathered)

    def _written(self, runner: int, landed: Landed) -> dict[int, Int64Array]:
        """Return the slots that a forward wrote, of each of its runner's groups."""
        groups = self._capture.shadows.runners[runner].groups
        return {g: self._changes.in_group(g, landed.out_cache_loc) for g in groups}


_TOLD_LATER: Final = ("request", "request_status", "sampled", "kv_copy")


def _truth_lens(told: DeviceForward) -> list[int]:
    if told.known_lens is None:
        return list(told.truth_lens)
    return [int(n) for n in told.known_lens + np.array(told.truth_lens, np.int64)]
