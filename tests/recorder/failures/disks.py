"""Disks that fail as real ones do: the kernel says no in the middle of a write, or takes its time."""

import contextlib
import fcntl
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OFTEN: dict[str, Any] = {"flush_interval_ns": 1_000_000, "compression": "none"}


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """What a full disk is to the writer: the kernel takes a part of a write, and then none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


class PipeDisk:
    """A disk that takes what it is allowed to, and after `at_most` bytes breaks; keeps what it took.

    A trace's first few kB are written before its engine runs: so much must be allowed.
    """

    def __init__(self, path: Path, *, allowed: int = 1 << 40, at_most: int = 1 << 40) -> None:
        os.mkfifo(path)
        self.content = bytearray()
        self._allowed = allowed
        self._at_most = at_most
        self._changed = threading.Event()
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(self._end, fcntl.F_SETPIPE_SZ, 4096)
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        begun = False
        while len(self.content) < self._at_most:
            part = None
            if len(self.content) < self._allowed:
                with contextlib.suppress(BlockingIOError):
                    part = os.read(self._end, 4096)
            if part == b"" and begun:  # the writer has closed it
                break
            begun = begun or bool(part)
            self.content += part or b""
            if not part:
                self._changed.wait(0.001)
                self._changed.clear()
        os.close(self._end)

    def allow(self, num_bytes: int) -> None:
        """Let it take so many more; a pipe's worth of bytes goes in beside what it takes."""
        self._allowed += num_bytes
        self._changed.set()

    def hurry(self) -> None:
        """Take the rest at once."""
        self.allow(1 << 40)

    def save(self, path: Path) -> Path:
        """Wait for the end of what is written, and keep it in a file."""
        self._thread.join()
        path.write_bytes(self.content)
        return path
