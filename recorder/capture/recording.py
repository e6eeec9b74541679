"""What keeps a recorder harmless: nothing is raised into the engine, nothing waits, a fault switches it off once.

Also the recorder's way out: every event goes through the outbox, which counts what the writer refuses.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.capture import changes, layers
from ...kernels.ops.state_hash import reference as state_hash
from ..errors import error_text
from ..process.endings import at_process_end
from ..trace.event import NO_LISTS, TraceEvent
from ..trace.header import CaptureInfo, TraceHeader
from ..trace.schema import PHASE_AFTER
from ..writing.outbox import Outbox, RecorderStats
from ..writing.writer import TraceWriter
from .forward_event import StateShadow, add_kv_changes, logprob_column
from .forward_input import CopiedForward, KvChange
from .kv_shadow import Source, compare, group_shadows, store_changes
from .privacy import Privacy, with_privacy
from .recurrent import RecurrentCapture
from .slot_numbers import LentRows, SlotNumbers

logger = logging.getLogger("kvcanary")

# A thread that has not come back from the recorder for so long, from a device that hangs say, will not: nobody else
# shall wait for it, least of all a process that is about to end.
WRITER_STOPPED: Final = "the writer stopped"  # how a reason to be off begins that lies with the file
LOCK_PATIENCE_S: Final = 10.0
SHORT_PATIENCE_S: Final = 1.0  # of whoever goes on without the lock

_P = ParamSpec("_P")
_R = TypeVar("_R", bound="Recording")


def prepare_kernels(backend: str = "cpu") -> None:
    """Compile the recorder's kernels, or load them from the disk cache; done once, before the engine runs."""
    changes.prepare(backend)


def guarded(
    method: Callable[Concatenate[_R, _P], None],
) -> Callable[Concatenate[_R, _P], None]:
    """Make a method harmless: nothing is raised, and after the first fault nothing is done; of a strict recorder, it raises."""

    @functools.wraps(method)
    def call(self: _R, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if os.getpid() != self._pid:  # a forked child may not even take the lock
            return
        if self._off:
            self.wrong_call(f"{method.__name__}() was called, but the recorder is off: {self._off}")
            return
        begin, before = time.perf_counter_ns(), self._engine_thread_ns
        try:
            self._take_lock(LOCK_PATIENCE_S)
            try:
                if not self._off:  # another thread may have closed the recorder meanwhile
                    method(self, *args, **kwargs)
            finally:
                self.lock.release()
        except Exception as error:  # the engine must go on whatever happens here
            if self._strict:
                if self._last_raised != id(error):  # else a call within this one has said it
                    self._last_raised = id(error)
                    # Whoever catches it has a trace that lacks what was to be said.
                    with contextlib.suppress(Exception):
                        self.start_over(f"{method.__name__}: {self.error_text(error)}", tables=False)
                raise
            self.switch_off(f"{method.__name__}: {self.error_text(error)}", error)
        self._engine_thread_ns = before + time.perf_counter_ns() - begin  # what is called inside counts once

    return call


@contextlib.contextmanager
def beginning(recorder: Any) -> Iterator[None]:
    """If what follows raises, have the trace say that it is none, so that nobody takes it for a whole one; raise."""
    try:
        yield
    except BaseException:
        recorder.lost("the recording could not begin")
        recorder.close()
        raise


class Recording:
    """An open trace and the state of what was recorded so far; `Recorder` adds what an engine does."""

    def __init__(
        self,
        path: str | Path,
        header: TraceHeader,
        *,
        kv_sources: Mapping[tuple[int, int], Source] | None = None,
        state_sources: Mapping[int, Sequence[Any]] | None = None,
        kv_watch_every: int = 1,
        backend: str = "cpu",
        privacy: Privacy | None = None,
        strict: bool = False,
        **writer_options: Any,
    ) -> None:
        if kv_watch_every < 0:
            raise ValueError(f"kv_watch_every is {kv_watch_every}, expected 0 (never) or a number of forwards")
        prepare_kernels(backend)
        if any(stream.samples for group in header.groups for stream in group.streams):
            layers.prepare(backend)
        if header.states:
            state_hash.prepare(backend)
        self.path = Path(path)
        header = header if privacy is None else with_privacy(header, privacy)
        self._strict = strict
        # A strict recorder's: an adapter is tried out with few.
        self._last_raised = 0
        self._said_requests: set[int] = set()
        self._said_rows: dict[int, int] = {}  # of each forward
        self._numbers = SlotNumbers(header)
        self._lent_rows = LentRows(min([table.rows for table in header.tables], default=1))
        header = self._numbers.header(header)
        self.kv = group_shadows(header, kv_sources or {}, backend=backend)
        self.state = StateShadow(header, backend=backend)
        self._recurrent = RecurrentCapture(header, state_sources or {}, privacy, backend)
        header = dataclasses.replace(header, states=self._recurrent.with_zeros())
        self._kv_watch_every = kv_watch_every
        self._privacy = privacy
        # Wall-clock time that cannot run backwards: one reading of the clock, then the monotonic one.
        self._clock_offset_ns = time.time_ns() - time.perf_counter_ns()
        # What is recorded now happened at this reading of `clock`, and has waited since; 0: it happens now.
        self.moment = 0
        self.header = dataclasses.replace(
            header,
            created_ns=header.created_ns or self._now(),
            capture=CaptureInfo(kv_watch_every=kv_watch_every, truth_tokens=header.truth_table is not None),
        )
        self._pid = os.getpid()
        self.lock = threading.RLock()
        self._off = ""
        self._closed = False
        self._pending: CopiedForward | None = None
        self._forwards = 0
        self._engine_thread_ns = 0
        writer = TraceWriter(self.path, self.header, **writer_options)
        self.header = writer.header
        self.outbox = Outbox(writer, self.kv)
        # Registered after the writer's own, so run before it: a forward that killed the engine is still recorded.
        self._no_close_at_end = at_process_end(self.close, priority=2)

    def start_over(self, note: str, *, tables: bool = True, status: str = "") -> bool:
        """As `lost`, for a caller that must know whether it was taken; may raise.

        Without `tables` the copy of the tables stays, which may be large: for a caller that has its own. `status` is the loss
        event's.
        """
        with self.lock:
            if not self.outbox.put_unknown_loss(note, self._now(), status):
                return False
            if tables:
                self.state.tables.forget()
            for kv in self.kv:
                kv.forget()
            self._recurrent.lose()
            return True

    def _end_pending(self, note: str) -> None:
        """Complete a forward that was begun, if the recording ends during it."""

    def close(self, timeout: float = 30.0) -> None:
        """Write out what is queued and the file's end, waiting at most `timeout` seconds; a second call does nothing."""
        if os.getpid() != self._pid:
            return
        self._no_close_at_end()
        until = time.monotonic() + timeout
        try:
            self._take_lock(min(timeout, LOCK_PATIENCE_S))
            try:
                if self._closed:
                    return
                self._closed = True
                self._end_pending("recording ended during this forward")
                self._off = self._off or "closed"
            finally:
                self.lock.release()
        except TimeoutError as busy:
            self._closed = True
            self.switch_off(f"close: {busy}")
        try:
            self.outbox.close(self._now(), max(until - time.monotonic(), 1.0))
        except Exception:
            logger.exception("kvcanary: the trace %s could not be closed", self.path)
        if self.outbox.writer.failed and self._off == "closed":
            self._off = f"{WRITER_STOPPED}: {self.outbox.writer.failed}"
        self.kv.clear()  # the engine's pools must not live on through our views of them
        self._recurrent.drop()

    def _take_lock(self, patience_s: float) -> None:
        """Take the lock; raise `TimeoutError` if another thread holds it for `patience_s` seconds."""
        if not self.lock.acquire(timeout=patience_s):
            raise TimeoutError(f"another thread has not come back from the recorder for {patience_s:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def next_forward(self) -> int:
        """The number that the next `before_forward` will get."""
        return self._forwards

    def stats(self) -> RecorderStats:
        """Return what the recorder has done so far."""
        return RecorderStats(
            forwards=self._forwards,
            events=self.outbox.taken,
            dropped_events=self.outbox.dropped,
            engine_thread_ns=self._engine_thread_ns,
            off=self._off,
        )

    @property
    def off(self) -> str:
        """Why nothing is recorded any more, empty while it is."""
        return self._off

    def wrong_call(self, what: str) -> None:
        """Raise a `ValueError` if the recorder is strict: whoever wrote the adapter is to know."""
        if self._strict:
            raise ValueError(what)

    def error_text(self, error: BaseException) -> str:
        """Return what the trace may say of an exception: if it has hashes, not what may hold a token or a name."""
        return error_text(error) if self._privacy is None else type(error).__name__

    def clock(self) -> int:
        """Return the wall-clock time in nanoseconds; it never runs backwards."""
        return self._clock_offset_ns + time.perf_counter_ns()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Hand what is recorded meanwhile to the writer at once, at the end; other threads record nothing meanwhile."""
        with self.lock:
            self.outbox.hold()
            try:
                yield
            finally:
                self.outbox.let_go()
                self._stop_with_writer()

    def _now(self) -> int:
        return self.moment or self.clock()

    def _hash_tokens(self, tokens: Int64Array) -> Int64Array:
        """Return tokens as the trace may hold them."""
        return tokens if self._privacy is None else self._privacy.hash_tokens(tokens)

    def _logprobs(self, values: Any, kind: str | Int64Array, count: int) -> Int64Array:
        """Return log-probabilities as the trace may hold them: with a checkpoint at hand they give tokens away."""
        if self._privacy is not None and self._privacy.tokens:
            values = ()
        return logprob_column(values, kind, count) if len(values) else np.empty(0, np.int64)

    def _put_watched(self, event: TraceEvent, runner: int, compared: list[tuple[int, Int64Array]]) -> None:
        """Send an event off with what changed, without a write, of the slots that it names."""
        changes: list[KvChange] = []
        for group, slots in compared if self._kv_watch_every else ():
            changes += compare(self.kv, runner, group, slots, slots[:0], PHASE_AFTER)
        add_kv_changes(event, changes)
        if self._put(event):
            store_changes(changes, self.kv, runner)

    def _event(self, kind: str, ints: dict[str, Int64Array], **scalars: int | str) -> TraceEvent:
        return TraceEvent(kind=kind, time_ns=self._now(), scalars=scalars, ints=ints)

    def _record(self, kind: str, ints: dict[str, Int64Array] = NO_LISTS, **scalars: int | str) -> bool:
        lists = ints or NO_LISTS
        return self._put(TraceEvent(kind=kind, time_ns=self._now(), scalars=scalars, ints=lists, bytes=NO_LISTS))

    def _put(self, event: TraceEvent) -> bool:
        if self._privacy is not None:
            self._privacy.hash_kv(event, self.header)
        if self.outbox.put(event):
            return True
        self._stop_with_writer()
        return False

    def _stop_with_writer(self) -> None:
        if self.outbox.writer.failed:  # the writer has logged it
            self._off = f"{WRITER_STOPPED}: {self.outbox.writer.failed}"

    def switch_off(self, reason: str, error: BaseException | None = None) -> None:
        """Stop recording for good and say so in the log and the trace: for an integrator whose own hook failed."""
        if os.getpid() != self._pid:  # a forked child may not even take the lock
            return
        try:
            locked = self.lock.acquire(timeout=SHORT_PATIENCE_S)  # else without it
            try:
                if self._off:
                    return
                self._off = reason
                self._pending = None
            finally:
                if locked:
                    self.lock.release()
            logger.error("kvcanary: the recorder of %s switched itself off: %s", self.path, reason, exc_info=error)
            self.outbox.end(f"the recorder switched itself off: {reason}", self._now())
        except Exception:  # nothing may reach the engine
            logger.exception("kvcanary: switching off failed")
