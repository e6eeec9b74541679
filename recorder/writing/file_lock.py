"""A file that is being written is locked (`flock`): so others tell a recording under way from one that is over.

The lock ends with the process, however it ends; a forked child closes what it got of it. Where the file system knows no
locks, no file is locked.
"""

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import Final, Protocol

_TRIES: Final = 5  # somebody who asks for the state holds the lock for a moment
_PAUSE_S: Final = 0.001


class HasDescriptors(Protocol):
    """Whoever holds files open that a forked child must not hold."""

    def forget_files(self) -> None:
        """Close them, in a child, and do nothing else."""


_open: "weakref.WeakSet[HasDescriptors]" = weakref.WeakSet()


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


def close_in_children(owner: HasDescriptors) -> None:
    """Have forked children close what `owner` holds: a child that outlives the engine would hold its locks."""
    _open.add(owner)


def _forked() -> None:
    for owner in list(_open):
        with contextlib.suppress(Exception):
            owner.forget_files()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def is_locked(descriptor: int, *, unknown: bool = False) -> bool:
    """Say whether somebody else, a recording process as a rule, has locked an open file; `unknown` where no lock is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return unknown
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def is_being_written(path: Path) -> bool:
    """Say whether a process is writing a trace at this moment; False where it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return is_locked(descriptor)
    finally:
        os.close(descriptor)
