"""What asks a recording to keep what it has: a signal, or a file that appears."""

import contextlib
import logging
import os
import signal
import stat
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ..files import regular_file

_log = logging.getLogger("kvcanary")

POLL_SECONDS: Final = 0.2
MAX_NOTE: Final = 200

# What differs between a file and another that has its name later on.
_Identity = tuple[int, int]


class FreezeFile:
    """A trigger file: whoever makes it freezes every recording that looks for it; its first line is the note. Each
    process sees a file once. The first one to see it renames it to `NAME.seen`, where the others find it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken = path.with_name(path.name + ".seen")
        # What somebody else took before we began is not for us; what nobody took is.
        self._known: set[_Identity | None] = {None, _identity(self._taken)}

    def asked(self) -> str | None:
        """Return the note of a file that was not seen before, None if there is none."""
        for path in (self._path, self._taken):
            identity = _identity(path)
            if identity in self._known:
                continue
            self._known.add(identity)
            note = _first_line(path) or f"file {self._path.name}"
            if path is self._path:
                with contextlib.suppress(OSError):  # another process was quicker, or the folder is not ours
                    path.rename(self._taken)
            return note
        return None

    def remove(self) -> None:
        """Do nothing: there is nothing to put back."""


class FreezeSignal:
    """A signal that freezes; whoever handled it before is called as well. Installed by the main thread alone, which is
    Python's rule; elsewhere it says so in the log and does nothing.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._count = self._seen = 0
        self._installed = False
        self._before: Any = None
        if threading.current_thread() is not threading.main_thread():
            why = "the recording was begun outside the main thread, where Python lets nobody handle signals"
            _log.warning("kvcanary: signal %d freezes nothing: %s; use the trigger file", number, why)
            return
        try:
            self._before = signal.getsignal(number)
            signal.signal(number, self._handle)
            self._installed = True
        except (OSError, ValueError) as error:
            _log.warning("kvcanary: signal %d freezes nothing: %s", number, error)

    def asked(self) -> str | None:
        """Return a note if the signal came since the last call, else None."""
        seen, self._seen = self._seen, self._count
        if seen == self._seen:
            return None
        try:
            return f"signal {signal.Signals(self._number).name}"
        except ValueError:  # a real-time signal, of which most have no name
            return f"signal {self._number}"

    def remove(self) -> None:
        """Put back the handler from before, unless somebody put another one over ours."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(self._number) == self._handle:
            with contextlib.suppress(OSError, ValueError, TypeError):
                signal.signal(self._number, self._before if self._before is not None else signal.SIG_DFL)
                self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Nothing but a count: a handler runs between any two steps of the main thread, which may hold any lock.
        self._count += 1
        if callable(self._before):
            self._before(number, frame)


def _identity(path: Path) -> _Identity | None:
    """Return what differs from file to file; a folder is none, and must not be renamed: it may hold the traces. A link
    is looked at, and never what it leads to.
    """
    try:
        found = path.lstat()
    except OSError:
        return None
    return None if stat.S_ISDIR(found.st_mode) else (found.st_ino, found.st_mtime_ns)


def _first_line(path: Path) -> str:
    # Not of a link: its target's first line would stand in the engine's log.
    with contextlib.suppress(OSError), regular_file(path, links=False) as descriptor:
        return os.read(descriptor, MAX_NOTE).decode("utf-8", "replace").partition("\n")[0].strip()
    return ""
