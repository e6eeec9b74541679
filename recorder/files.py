"""Small files that people wrote, and files that hold what is private, in folders where a stranger may have been before.

Traces and reports travel. A folder that came with one may hold links, pipes and files of any name, so nothing is written
through a name that is there already, and a name that leads elsewhere neither hangs a reader nor fills its memory.
"""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from .remote import RemotePath

MAX_BYTES: Final = 1 << 20  # of what people put into a file by hand
_READ_BYTES: Final = 1 << 20
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ForeignFolderError(PermissionError):
    """A folder that is not to be written to; `strerror` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


def new_private_file(path: Path) -> IO[bytes]:
    """Make a file for writing as `new_private_descriptor` does."""
    return os.fdopen(new_private_descriptor(path), "wb")


def new_private_descriptor(path: Path) -> int:
    """Make a file for writing that only this user can read, in place of a file or link that is there; raise `OSError`.
    What is there is removed and never written to; its folder is opened first, and is no link.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        return os.open(path.name, _NEW_FILE, 0o600, dir_fd=folder)
    finally:
        os.close(folder)


def partial_path(path: Path) -> Path:
    """Return a name beside a file's that nobody has, and a short one: its own may be as long as a name can be."""
    return path.with_name(f".kvcanary-{uuid.uuid4().hex}.part")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file beside `path` that only this user can read; it takes that place once all is written, else nothing does.

    So a full disk leaves what was there, and two processes that write the same file leave one of the two. Raises `OSError`.
    """
    partial = partial_path(path)
    try:
        with new_private_file(partial) as file:
            yield file
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file in place of another, as `replacing` does."""
    with replacing(path) as file:
        file.write(content)


def is_regular(path: Path) -> bool:
    """Whether a name is a file's own: no folder, pipe or device, and no link, wherever it leads."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def check_folder(folder: Path, is_ours: Callable[[str, int], bool]) -> None:
    """Check that a folder is this user's own and holds nothing but what we would write there. `is_ours` says whether an
    entry may be there, from its name and its mode (of the entry, not of what a link leads to). Raises
    `ForeignFolderError` for a link, a folder of somebody else's or one with something else in it, and `OSError`.
    """
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise ForeignFolderError("it is a link; name the folder that it leads to")
    if status.st_uid != os.geteuid():
        raise ForeignFolderError("it belongs to another user")
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_ours(entry.name, entry.stat(follow_symlinks=False).st_mode):
                raise ForeignFolderError(f"it holds {entry.name!r}, which kvcanary did not write")


def read_small_file(path: Path) -> bytes:
    """Return what a file of at most `MAX_BYTES` holds; raises `OSError` as `read_regular_file`."""
    return read_regular_file(path, MAX_BYTES)


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return what a file of at most `max_bytes` holds; raises `OSError` as `regular_file`, or if it is larger."""
    with regular_file(path) as descriptor:
        content = bytearray()
        while part := os.read(descriptor, min(max_bytes + 1 - len(content), _READ_BYTES)):
            content += part
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return bytes(content)


@contextlib.contextmanager
def regular_file(path: Path, *, links: bool = True) -> Iterator[int]:
    """Open a file for reading, for whom no pipe or device makes anybody wait; `links` says whether it may be one.

    Raises `OSError` if it cannot be read, or is a folder, a pipe or a device; `strerror` says what.
    """
    if isinstance(path, RemotePath):
        with path.open("rb") as copy:
            yield copy.fileno()
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)
