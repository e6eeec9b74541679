"""What an engine's process attaches to itself: the recordings, the hooks that still work, and how the recordings end."""

import contextlib
import importlib
import importlib.metadata
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from ...errors import error_text
from ...process.environment import is_wanted, read_environment, share_run_id
from ...process.settings import RecordingSettings
from .hooking import EngineError
from .stopping import PATIENCE_S, serve_stop, stop_on_sigterm

logger = logging.getLogger("kvcanary")

STEP_S: Final = 2.0  # a step that takes longer is not waited for when traces are to end


class EngineAttachment:
    """The recordings of one process. A subclass has a method `on_<hook>` for each function of the engine that it hooks.

    A hook is called with the arguments of the function that it is around. One that fails is logged once, and what it
    feeds is switched off: a failure of one in `ending` ends the recording; for another the trace says that events are
    missing, and the rest goes on.
    """

    engine: ClassVar[str]
    ending: ClassVar[frozenset[str]] = frozenset()  # hooks without which the trace would be judged wrongly

    def __init__(self) -> None:
        self.off: set[str] = set()
        self._ends = False  # the process is about to be killed
        self._paused = threading.Event()  # the engine is held before a step
        self._stepped = 0.0  # when its last step began
        self.windows: Any = None  # a `Windows`; None records all the time
        self._in_window = True
        self._closing: list[threading.Thread] = []

    def recorders(self) -> Sequence[Any]:
        """Return the open recorders."""
        raise NotImplementedError

    def fault(self, hook: str, error: Exception) -> None:
        """Switch off a hook that failed; one whose function raised goes on, and the traces say what they lack."""
        if hook in self.off:
            return
        recorders, raised = self.recorders(), isinstance(error, EngineError)
        if not raised:
            self.off.add(hook)
        if not recorders and not raised:
            logger.error("kvcanary: not recording: %s: %s", hook, error_text(error), exc_info=error)
        for recorder in recorders:
            self.fail(recorder, hook, error, ends=hook in self.ending)

    def fail(self, recorder: Any, hook: str, error: Exception, *, ends: bool) -> None:
        """Have a trace say that a hook failed; `ends` says that nothing after it can be recorded."""
        what, said = f"{self.engine} adapter, {hook}", recorder.error_text(error)
        if isinstance(error, EngineError):
            recorder.lost(f"{what}: {error}")
        elif ends:
            recorder.switch_off(f"{what}: {said}", error)
        else:
            logger.error("kvcanary: %s is no longer recorded: %s", what, said, exc_info=error)
            recorder.lost(f"{what} is no longer recorded: {said}")

    def close(self) -> None:
        """End the traces."""
        for recorder in self.recorders():
            recorder.close()

    def end_with_process(self) -> None:
        """End the traces if the engine is about to kill this process, or SIGTERM does."""
        serve_stop(self._stop)
        stop_on_sigterm(self._stop)

    def _stop(self) -> None:
        """End the traces behind the step that the engine is in, if that ends in time: its clients get its tokens."""
        self._ends = True
        self._paused.wait(max(0.0, self._stepped + STEP_S - time.monotonic()))
        self.close()
        for thread in self._closing:
            thread.join()

    def sample(self, settings: RecordingSettings) -> bool:
        """Begin to look at the clock if that decides when to record; return whether to record now."""
        if settings.in_windows and self.windows is None:
            from ...capture.recorder import prepare_kernels
            from ...writing.sampling import Windows

            prepare_kernels()  # now, not in the step before which a window begins
            self.windows = Windows(settings)
            self.windows.start()
            self._in_window = self.windows.wanted
            logger.info("kvcanary: recording in windows: %s", "now" if self._in_window else "not now")
        return self._in_window

    def look_at_window(self) -> None:
        """To be called before a step of a process that samples: a window may begin or end there."""
        if self.windows.wanted != self._in_window and not self.off & self.ending:
            self._in_window = self.windows.wanted
            self.begin_window() if self._in_window else self.end_window()

    def begin_window(self) -> None:
        """Begin to record in the midst of an engine's life; nothing for an adapter that begins with the next step."""

    def end_window(self) -> None:
        """End the recordings, and have the engine's objects as they were."""
        raise NotImplementedError

    def close_behind(self, recorder: Any) -> None:
        """End a trace without the engine waiting for the disk."""
        thread = threading.Thread(target=recorder.close, name="kvcanary-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            recorder.close(timeout=STEP_S)
            return
        self._closing = [*filter(threading.Thread.is_alive, self._closing), thread]

    def next_step(self) -> None:
        """Note that the engine begins a step; hold it there if its process is about to be killed."""
        self._stepped = time.monotonic()
        if self._ends and not self._paused.is_set():
            self._paused.set()
            time.sleep(PATIENCE_S)  # nothing of this step would be recorded


def begin_plugin(engine: str, package: str) -> None:
    """Set an engine's hooks, by `install` of an adapter's module `hooks`, if a recording is asked for; never raises."""
    if is_wanted():
        try:
            share_run_id()
            importlib.import_module(".hooks", package).install()
        except Exception as error:  # noqa: BLE001  # the engine comes first
            not_recording(engine, error)


def not_recording(engine: str, error: Exception) -> None:
    """Say in the log why an adapter records nothing: one line for what its operator can change, a traceback for the rest."""
    if isinstance(error, (ValueError, OSError, ImportError)):
        logger.error("kvcanary: not recording: %s", error)
    else:
        logger.error("kvcanary: not recording: the %s adapter could not be set up", engine, exc_info=error)


def settings_here() -> RecordingSettings | None:
    """Return the settings if a recording is asked for, and of this server; raise `ValueError` as `read_environment` does."""
    settings = read_environment()
    if settings is None or settings.server_chosen:
        return settings
    logger.info("kvcanary: not recording: server %s is not one of %s", settings.server_name, settings.servers_said)
    return None


def installed_version(*packages: str) -> str:
    """Return the version of the first of these packages that is installed; empty for none, as of a checkout."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def trace_name(engine: str, header: Any, number: int = 0) -> str:
    """Return the name of a process's trace: when, role, ranks, process; `number` counts the traces of one process."""
    ranks = header.ranks
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    role, more = f"-{header.role}" if header.role else "", f"-{number}" if number else ""
    place = f"dp{ranks.dp_rank}-pp{ranks.pp_rank}-tp{ranks.tp_rank}"
    return f"{engine}-{when}{role}-{place}-{os.getpid()}{more}.arrow"
