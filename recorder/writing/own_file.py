"""A file that is being written, which the descriptor may no longer lead to.

Code in the engine's process that closes descriptors by their numbers closes ours too, and the system gives the number to
the next file that is opened: what is written then would land in a stranger's file.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

_TRIES: Final = 5  # somebody who asks for the state holds the lock for a moment
_PAUSE_S: Final = 0.001
_STAT_BYTES: Final = 512  # more than any system's struct stat
_IDENTITY: Final = struct.Struct("@QQ")  # how it begins on 64-bit Linux


class ForeignFileError(OSError):
    """The descriptor leads to another file than the one that was opened."""

    def __init__(self) -> None:
        super().__init__(
            errno.EBADF, "code in this process closed the file, and its descriptor leads to another one now"
        )


class OwnFile:
    """An open file and which one it is; takes the descriptor over. A forked child has it closed. Raises `OSError`."""

    __slots__ = ("__weakref__", "_begins", "_found", "_identity", "_pointer", "descriptor")

    def __init__(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self.descriptor = descriptor
        self._identity = found.st_dev, found.st_ino
        self._found = bytearray(_STAT_BYTES)
        self._pointer = (ctypes.c_char * _STAT_BYTES).from_buffer(self._found)
        self._begins = _IDENTITY.pack(*self._identity)
        if not self._is_seen_at_once():
            self._begins = b""
        _open.add(self)

    def check(self) -> None:
        """Raise `ForeignFileError` if the descriptor leads to another file, `OSError` if it leads to none."""
        if not self._begins or not self._is_seen_at_once():
            self.stat()

    def _is_seen_at_once(self) -> bool:
        """Whether what the system says of the open file first is what it said before."""
        return (
            fstat_now is not None
            and fstat_now(self.descriptor, self._pointer) == 0
            and self._found.startswith(self._begins)
        )

    def stat(self) -> os.stat_result:
        """Return the file's state; raises as `check` does."""
        found = os.fstat(self.descriptor)
        if not self.is_at(found):
            raise ForeignFileError
        return found

    def is_at(self, found: os.stat_result) -> bool:
        """Whether `found` is this file's state."""
        return (found.st_dev, found.st_ino) == self._identity

    def write(self, data: Any, at: int = -1) -> None:
        """Write all of `data`, at the end or at byte `at`; raises as `check` does, and `OSError`."""
        left = memoryview(data)
        while left:
            self.check()
            written = os.write(self.descriptor, left) if at < 0 else os.pwrite(self.descriptor, left, at)
            left, at = left[written:], at + written if at >= 0 else at

    def write_at_once(self, data: bytes, at: int) -> None:
        """Write some kilobytes at byte `at`, before another thread runs; raises as `write` does."""
        self.check()
        if pwrite_now is None or pwrite_now(self.descriptor, data, len(data), at) != len(data):
            self.write(data, at)

    def truncate(self, size: int) -> None:
        """Cut the file off at `size` bytes; raises as `check` does, and `OSError`."""
        self.check()
        os.ftruncate(self.descriptor, size)

    def close(self) -> None:
        """Close the file, and no other one; raises `OSError` as closing does."""
        descriptor, ours = self.descriptor, False
        with contextlib.suppress(OSError):
            self.check()
            ours = True
        self.descriptor = -1
        if ours:
            os.close(descriptor)


def _at_once(name: str, returns: Any, *takes: Any) -> Callable[..., int] | None:
    """Return a system call without what Python puts around it. `os` lets another thread run first: the engine would
    wait for the interpreter, as a rule for longer than for the call.
    """
    try:
        call = getattr(ctypes.PyDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    call.argtypes, call.restype = takes, returns
    return call


fstat_now: Final = _at_once("fstat64", ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
pwrite_now: Final = _at_once(
    "pwrite64", ctypes.c_ssize_t, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64
)


_open: "weakref.WeakSet[OwnFile]" = weakref.WeakSet()


def hold(descriptor: int) -> None:
    """Lock a file that is being written, until it is closed."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
            continue
        except OSError:
            pass
        return


def _forked() -> None:
    """Close them all in a child: one that outlives the engine would hold its locks."""
    for own in list(_open):
        with contextlib.suppress(Exception):
            own.close()
    _open.clear()


os.register_at_fork(after_in_child=_forked)
