"""When a process records: in windows of time that a hash chooses, within a budget of bytes a day, and around an incident.

A thread looks at clock, budget and trigger file; the engine's thread reads one attribute before a step.
"""

import dataclasses
import fcntl
import logging
import os
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ..process.freezing import FreezeFile, FreezeSignal
from ..process.settings import RecordingSettings
from ..trace.files import segments_of
from ..trace.header import NotWatched, Sampling, TraceHeader
from ..trace.schema import RAN_BEFORE
from .segments import keep_aside

BUDGET_FILE: Final = ".kvcanary-bytes"
LOOK_SECONDS: Final = 1.0
_RECORDINGS: Final = 1000

_log = logging.getLogger("kvcanary")


class Budget:
    """The bytes that all processes that record into a folder have written today (UTC), counted in a file there."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / BUDGET_FILE
        self._here: tuple[str, int] = ("", 0)  # what this process knows of, if the file cannot be had
        self._said = False

    def spend(self, count: int, today: str) -> int:
        """Count bytes; return how many it are today."""
        before = self._here[1] if self._here[0] == today else 0
        self._here = (today, before + count)
        try:
            self._here = (today, self._in_file(count, today))
        except OSError as error:
            if not self._said:
                said = f"cannot be used ({error.strerror}): the bytes of this process alone are counted (said once)"
                _log.error("kvcanary: %s: %s", self._path, said)
            self._said = True
        return self._here[1]

    def _in_file(self, count: int, today: str) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            day, _, spent = os.pread(file, 64, 0).partition(b" ")
            total = (int(spent) if day == today.encode() and spent.strip().isdigit() else 0) + count
            if count or day != today.encode():
                os.pwrite(file, b"%s %020d\n" % (today.encode(), total), 0)
            return total
        finally:
            os.close(file)


class Windows:
    """Says by `wanted` whether this process is to record now, and by `reason` why; `start` begins to look, in a thread.

    A freeze keeps what this process has recorded and still has, has the window under way and the next one recorded
    whatever the hash says, and keeps them too. The budget ends a recording within some `LOOK_SECONDS`.
    """

    def __init__(self, settings: RecordingSettings) -> None:
        self._settings = settings
        self._budget = Budget(settings.folder) if settings.bytes_a_day else None
        self._triggers: list[FreezeFile | FreezeSignal] = []
        if settings.freeze_file is not None:
            self._triggers.append(FreezeFile(settings.freeze_file))
        if settings.freeze_signal:
            self._triggers.append(FreezeSignal(settings.freeze_signal))
        self._open: dict[Any, int] = {}  # writers, and how much of what they wrote is counted
        self._mine: deque[Path] = deque(maxlen=_RECORDINGS)  # begun here; something of them may be left
        self._until = 0.0  # recorded for an incident
        self._said_spent = ""
        self._lock = threading.Lock()
        self.wanted = False
        self.reason = "window"

    def start(self) -> None:
        """Look once, and go on in a thread; a process that has no more threads records nothing."""
        self.look(time.time())
        try:
            threading.Thread(target=self._run, name="kvcanary-windows", daemon=True).start()
        except RuntimeError as error:
            self.wanted = False
            _log.error("kvcanary: not recording: no thread that looks at the clock: %s", error)

    def begun(self, recorder: Any) -> None:
        """Count what a recorder writes from now on, and know its recording."""
        with self._lock:
            self._mine.append(recorder.path)
            self._open[getattr(recorder, "recorder", recorder).outbox.writer] = 0

    def _run(self) -> None:
        window = self._settings.window_seconds
        while True:
            # At a window's beginning by the clock, so that the processes of a server begin together.
            time.sleep(min(LOOK_SECONDS, window - time.time() % window))
            try:
                self.look(time.time())
            except Exception:  # noqa: BLE001  # the engine goes on, and so does a recording under way
                _log.exception("kvcanary: looking for the window failed; it is tried again")

    def look(self, now: float) -> None:
        """Find out what is wanted at a time, in seconds since 1970."""
        settings = self._settings
        number = int(now // settings.window_seconds)
        notes = [note for note in [trigger.asked() for trigger in self._triggers] if note is not None]
        if notes:
            self._until = (number + 2.0) * settings.window_seconds
            self._keep("; ".join(notes))
        elif 0 < self._until <= now:
            self._until = 0.0
            self._keep("what followed")
        chosen = settings.window_chosen(number)
        today = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d")
        spent = self._spent(today)
        if spent and self._said_spent != today:
            self._said_spent = today
            limit = f"{settings.bytes_a_day / (1 << 20):g} MiB"
            _log.warning("kvcanary: nothing more is recorded today: %s a day are spent (bytes_a_day)", limit)
        self.reason = "incident" if not chosen and now < self._until else "window"
        self.wanted = (chosen or now < self._until) and not spent

    def _spent(self, today: str) -> bool:
        """Count what was written since the last look; say whether the day's budget is spent."""
        written = 0
        with self._lock:
            for writer, before in list(self._open.items()):
                alive = writer.thread.is_alive()  # asked first: what it writes until then is counted
                self._open[writer] = total = writer.stats().written_bytes
                written += total - before
                if not alive:
                    del self._open[writer]
        return self._budget is not None and self._budget.spend(written, today) >= self._settings.bytes_a_day

    def _keep(self, note: str) -> None:
        """Put what is left of this process's recordings aside, where nothing deletes it."""
        with self._lock:
            mine, writers = [*self._mine], [*self._open]
            self._mine = deque((writer.path for writer in writers), maxlen=_RECORDINGS)
        frozen = [writer.path for writer in writers if writer.freeze(note)]
        for recording in mine:
            files = segments_of(recording) or [path for path in (recording,) if path.exists()]
            if not files or recording in frozen:
                continue
            try:
                folder = keep_aside(recording, files)
            except OSError as error:
                _log.error("kvcanary: %s: could not be kept: %s", recording, error)
                continue
            _log.warning("kvcanary: %s: kept (%s): %s", recording, note, folder)


def sampled_header(header: TraceHeader, settings: RecordingSettings, windows: Any, *, late: bool) -> TraceHeader:
    """Return a header that says which sampling is in force, and what a recording that begins late does not see."""
    sampling, not_watched = header.sampling, header.not_watched
    if settings.sample_servers < 1 or settings.in_windows:
        sampling = Sampling(
            fleet=settings.fleet,
            server=settings.server_name,
            servers=settings.sample_servers,
            windows=settings.sample_windows,
            window_seconds=settings.window_seconds if settings.in_windows else 0,
            bytes_a_day=settings.bytes_a_day,
            reason="window" if windows is None else windows.reason,
        )
    if late:
        not_watched += (NotWatched(what="other", name="what the engine had cached before", reason=RAN_BEFORE),)
    return dataclasses.replace(header, sampling=sampling, not_watched=not_watched)
