"""Writing a trace from inside an engine: a bounded queue, a background thread, and a file that is whole at any time."""

import dataclasses
import logging
import os
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from ..errors import TraceError, error_text
from ..process.endings import at_process_end
from ..process.freezing import POLL_SECONDS, FreezeFile, FreezeSignal
from ..process.settings import WriterSettings
from ..trace.event import AnyEvent, TraceEvent, loss_event, num_rows
from ..trace.header import TraceHeader
from .segments import Segments, SingleFile
from .tail import open_tail
from .trace_file import DeletedError

_log = logging.getLogger("kvcanary")

MAX_NOTES: Final = 2000  # characters of what those say who ask for a freeze


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterStats:
    """What a writer has done so far; `queued_bytes` includes what is being written; `frozen` are folders, or the one file."""

    appended_events: int
    written_events: int
    dropped_events: int
    queued_bytes: int
    written_batches: int
    written_bytes: int
    frozen: tuple[str, ...]
    failed: str | None


class TraceWriter:
    """A trace being written; `append` never blocks and never raises.

    Events go to a queue of at most `max_queued_bytes`; a thread writes them out in batches, once `flush_bytes` are
    there or the oldest has waited `flush_interval_ns`. What a batch holds is in the page cache when the next one
    begins; what waits lies in the tail beside the file (`tail=False`: in memory alone), so that a killed process loses
    nothing that `append` took. The files have mode 0600. With `segment_bytes` or `segment_ns` there are several,
    `trace.000000.arrow` and so on for `trace.arrow`. `settings` are those of `WriterSettings`.

    Raises `TraceError` when the file cannot be made: it exists (without `overwrite`), its folder is missing or cannot
    be written, the disk is full; `ValueError` for settings out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: TraceHeader,
        *,
        overwrite: bool = False,
        tail: bool = True,
        **settings: Any,
    ) -> None:
        self.settings = WriterSettings(**settings)
        self.path = Path(path)
        names = ("flush_bytes", "flush_interval_ns", "compression")
        self.header = completed_header(header, **{name: getattr(self.settings, name) for name in names})
        files = Segments if self.settings.cut else SingleFile
        self.file = files(self.path, self.header, self.settings, overwrite=overwrite)
        self._tail = open_tail(self.path, self.header.trace_id) if tail and self.file.regular else None
        self._triggers: list[FreezeFile | FreezeSignal] = []
        if self.settings.freeze_file is not None:
            self._triggers.append(FreezeFile(Path(self.settings.freeze_file)))
        if self.settings.freeze_signal:
            self._triggers.append(FreezeSignal(self.settings.freeze_signal))
        self._flush_seconds = self.settings.flush_interval_ns / 1e9
        self._pid = os.getpid()
        self.changed = threading.Condition()
        # All below are guarded by `changed`.
        self._queue: deque[AnyEvent] = deque()
        self._queued_bytes = 0  # of the queue, and of the batch in the making
        self._waiting_bytes = 0  # of the queue alone
        self._oldest = 0.0
        self._appended = 0
        self._settled = 0  # appended events that are in the file, or never will be
        self._written = 0
        self._dropped = 0
        self._reported = 0  # dropped events that an accepted loss event reports
        self._flush_until = 0
        self._freeze: tuple[str, int] | None = None  # why, and how many appended events it must wait for
        self._frozen: list[str] = []
        self._closing = False
        self._unknown_loss = ""
        self._failed: str | None = None
        self._bad_event_logged = False
        self.thread = threading.Thread(target=self._run, name="kvcanary-writer", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # the system has no more threads
            self.file.abandon()
            if self._tail is not None:
                self._tail.remove()
            raise TraceError(f"{self.path}: cannot be written: {error}") from None
        self._no_close_at_end = at_process_end(self.close, priority=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failed(self) -> str | None:
        """Why the writer writes no more, or None."""
        return "forked: a child process does not write its parent's trace" if self._forked() else self._failed

    def has_room(self, num_bytes: int) -> bool:
        """Say whether the queue would take so many bytes more at this moment."""
        return self._queued_bytes + num_bytes <= self.settings.max_queued_bytes

    def append(self, *events: AnyEvent, checked_bytes: int = -1) -> bool:
        """Queue an event; return False when it was dropped: the queue is full, or the writer failed or is closed.

        Of several all are queued, or none, and then none counts as dropped: they may be offered one by one. `checked_bytes` are
        the `nbytes` of events that are known to have no `problem`.
        """
        if self._forked():  # before the lock, which a fork may have copied while it was held
            return False
        problem, size, rows = None, max(checked_bytes, 0), len(events)
        try:
            for event in events if checked_bytes < 0 else ():
                problem = problem or event.problem()
                size += 0 if problem else event.nbytes
            rows = num_rows(events)
        except Exception as error:  # noqa: BLE001  # nothing may reach the engine
            problem, size = error_text(error), 0
        with self.changed:
            one = rows == 1
            if problem is not None and one and not self._bad_event_logged:
                self._bad_event_logged = True
                _log.error("kvcanary: %s: an event was left out: %s (said once)", self.path, problem)
            full = self._queued_bytes + size > self.settings.max_queued_bytes
            if problem is not None or full or self._closing or self._failed is not None:
                self._dropped += one and getattr(events[0], "kind", None) != "loss"
                return False
            if one and isinstance(events[0], TraceEvent) and events[0].kind == "loss":
                self._reported += max(0, int(events[0].scalars.get("lost_events", 0)))
            if self._tail is not None:
                self._tail.put(self._appended, size, *events)
            was_empty = not self._queue
            self._queue.extend(events)
            self._queued_bytes += size
            self._waiting_bytes += size
            self._appended += rows
            if was_empty:
                self._oldest = time.monotonic()
                self.changed.notify_all()
            elif self._waiting_bytes >= self.settings.flush_bytes:
                self.changed.notify_all()
            return True

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until every event appended so far is in the file; return False if it is not within `timeout` s."""
        if self._forked():
            return False
        with self.changed:
            target = self._appended
            self._flush_until = max(self._flush_until, target)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._settled >= target or self._failed is not None, timeout)
            return self._settled >= target and self._failed is None

    def freeze(self, note: str) -> bool:
        """Ask for what is there, and was appended so far, to be kept from deletion; return False if nothing is written any more."""
        if self._forked():
            return False
        with self.changed:
            if self._failed is not None or self._closing:
                return False
            notes = note if self._freeze is None else f"{self._freeze[0]}; {note}"
            # While a keyframe is written many may ask; what they say must not pile up.
            self._freeze = notes[:MAX_NOTES], self._appended
            self._flush_until = max(self._flush_until, self._appended)
            self.changed.notify_all()
            return True

    def end(self, unknown_loss: str = "") -> None:
        """Take no more events; what is queued and the footer are written without anybody waiting for it. `unknown_loss`
        becomes a last loss event, for whose kind a full queue has no room.
        """
        if self._forked():
            return
        with self.changed:
            self._closing = True
            self._unknown_loss = self._unknown_loss or unknown_loss
            self.changed.notify_all()

    def close(self, timeout: float = 30.0) -> bool:
        """Write what is queued and the footer; return False when the file could not be made whole in `timeout` s. May
        be called again. A stuck disk keeps the thread, which is a daemon, and leaves a torn file at worst.
        """
        if self._forked():
            return False
        for trigger in self._triggers:
            trigger.remove()
        self.end()
        self.thread.join(timeout)
        if self.thread.is_alive():
            stuck = "the disk is stuck; the trace may be torn"
            _log.error("kvcanary: %s: not closed within %g s, %s", self.path, timeout, stuck)
            return False
        self._no_close_at_end()
        return self._failed is None

    def stats(self) -> WriterStats:
        """Return the counts so far."""
        return WriterStats(
            appended_events=self._appended,
            written_events=self._written,
            dropped_events=self._dropped,
            queued_bytes=self._queued_bytes,
            written_batches=self.file.batches,
            written_bytes=self.file.size_bytes,
            frozen=tuple(self._frozen),
            failed=self.failed,
        )

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _run(self) -> None:
        try:
            while True:
                events, size = self._next_events()
                if events:
                    self._write(events)
                    with self.changed:
                        self._settled += num_rows(events)
                        self._queued_bytes -= size
                        self.changed.notify_all()
                        outdated = None if self._tail is None else self._tail.outdated(self._settled)
                    if self._tail is not None and outdated is not None:
                        self._tail.empty(outdated)
                    events.clear()
                for trigger in self._triggers:  # outside the lock: a look at a file takes as long as its disk likes
                    note = trigger.asked()
                    if note is not None:
                        self.freeze(note)
                if self._freeze_is_due():
                    self._freeze_now()
                elif self._closing and not self._queue:
                    break
            self._write_last_losses()
            self.file.close()
            self._end_tail()
        except DeletedError as error:
            self._fail(error_text(error), "nothing of it is left")
            self._end_tail()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the engine must go on
            self._fail(error_text(error), f"the first {self._written} events are kept (run kvcanary recover)")

    def _next_events(self) -> tuple[list[AnyEvent], int]:
        """Wait for a batch's worth of events; an empty list says that there is something else to do."""
        poll = POLL_SECONDS if self._triggers else None
        with self.changed:
            while not self._due():
                times = [] if poll is None else [poll]
                if self._queue:
                    times.append(max(self._oldest + self._flush_seconds - time.monotonic(), 0.0))
                if not self.changed.wait(min(times, default=None)) and poll is not None and not self._due():
                    return [], 0
            events, size = list[AnyEvent](), 0
            if self._waiting_bytes < self.settings.flush_bytes:
                events, size = list(self._queue), self._waiting_bytes
                self._queue.clear()
            while self._queue and size < self.settings.flush_bytes:
                events.append(self._queue.popleft())
                size += events[-1].nbytes
            self._waiting_bytes -= size
            self._oldest = time.monotonic()
            return events, size

    def _due(self) -> bool:
        if not self._queue:
            return self._closing or self._freeze_is_due()
        return (
            self._closing
            or self._waiting_bytes >= self.settings.flush_bytes
            or self._flush_until > self._settled
            or time.monotonic() - self._oldest >= self._flush_seconds
        )

    def _write(self, events: list[AnyEvent]) -> None:
        self.file.write(events)
        self._written += num_rows(events)

    def _freeze_is_due(self) -> bool:
        return self._freeze is not None and self._settled >= self._freeze[1]

    def _freeze_now(self) -> None:
        with self.changed:
            asked, self._freeze = self._freeze, None
        if asked is None:
            return
        where = self.file.freeze(asked[0])
        if where:
            self._frozen.append(where)
            _log.warning("kvcanary: %s: frozen (%s): %s", self.path, asked[0], where)

    def _write_last_losses(self) -> None:
        with self.changed:
            lost = self._dropped - self._reported
        dropped = "events were dropped: the writer's queue was full or an event was not fit for the trace"
        for count, note in ((max(lost, 0), dropped), (-1, self._unknown_loss)):
            if count and note:
                self._write([loss_event(lost_events=count, note=note, time_ns=self.file.last_ns)])

    def _end_tail(self) -> None:
        with self.changed:
            if self._tail is not None:
                self._tail.remove()

    def _fail(self, reason: str, left: str) -> None:
        with self.changed:
            self._failed = reason
            self._dropped += self._appended - self._settled
            self._settled = self._appended
            self._queue.clear()
            self._queued_bytes = self._waiting_bytes = 0
            self.changed.notify_all()
            if self._tail is not None:
                self._tail.leave(self._appended)
        _log.error("kvcanary: %s: recording stopped: %s; %s, the engine goes on", self.path, reason, left)
        self.file.abandon()


def completed_header(header: TraceHeader, **capture: int | str) -> TraceHeader:
    """Return the header with what only a writer knows, such as fields of its `CaptureInfo`."""
    from ... import __version__

    changes: dict[str, Any] = capture
    return dataclasses.replace(
        header,
        capture=dataclasses.replace(header.capture, **changes),
        recorder_version=header.recorder_version or __version__,
        trace_id=header.trace_id or uuid.uuid4().hex,
        created_ns=header.created_ns or time.time_ns(),
    )
