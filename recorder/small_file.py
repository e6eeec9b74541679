"""Reading what people put into a file by hand: a name that leads elsewhere must neither hang nor fill the memory."""

import errno
import os
import stat
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 20


def read_small_file(path: Path) -> bytes:
    """Return what a file of at most `MAX_BYTES` holds; raises `OSError` as `read_regular_file`."""
    return read_regular_file(path, MAX_BYTES)


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return what a file of at most `max_bytes` holds.

    Raises:
        OSError: it cannot be read, is larger, or is a folder, a pipe or a device; `strerror` says what.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = bytearray()
        while part := os.read(descriptor, min(max_bytes + 1 - len(content), _READ_BYTES)):
            content += part
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return bytes(content)
