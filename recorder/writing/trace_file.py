"""The file under a writer: batches go out whole, each in the page cache before the next one is made."""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.ipc

from ..errors import TraceError, TraceExistsError
from ..process.settings import COMPRESSIONS
from ..trace.files import base_name
from ..trace.framing import FILE_START
from .own_file import OwnFile

_ROOM_BYTES: Final = 1 << 20  # more than Arrow takes to write a batch, beside the batch
MAX_NAMES: Final = 100  # that are tried for a new trace

_T = TypeVar("_T")

EXISTS: Final = "it exists; choose another name, or have it replaced (--force, overwrite=True)"
_ADVICE: Final = {
    errno.ENOENT: "its folder does not exist; create it first",
    errno.ENOTDIR: "its folder is not a folder",
    errno.EEXIST: EXISTS,
    errno.EISDIR: "it is a folder; name a file",
    errno.EACCES: "its folder or the file may not be written by this user",
    errno.EROFS: "its file system is read-only",
    errno.ENOSPC: "the disk is full",
}


class DeletedError(OSError):
    """Nobody will ever read what is written: the file has lost its last name."""


class TraceFile:
    """An Arrow IPC file that is written batch by batch, with mode 0600. The schema message is written at once. A batch
    that fails half way is cut off again, so that the file ends with a whole one. Raises `TraceError` when it cannot be
    made, `ValueError` for an unknown `compression`. `named` is how errors name the file, if the user gave another name
    than `path`.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        *,
        compression: str = "lz4",
        overwrite: bool = False,
        named: Path | None = None,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression is {compression!r}, expected one of {', '.join(COMPRESSIONS)}")
        self.batches = 0
        self.size_bytes = 0
        self._pending = _Pending()
        # In Arrow's threads a request for memory that fails would end the process.
        codec = None if compression == "none" else compression
        options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
        self._beginning = b""
        self._own: OwnFile | None = None
        try:
            self._own = OwnFile(_create(path, overwrite))
            self._named = self._own.stat().st_nlink > 0
            self._sink = pa.PythonFile(self._pending, mode="w")
            self._writer = pa.ipc.new_file(self._sink, schema, options=options)
            # Arrow writes the beginning together with the first batch; a bad disk should show now, and a process
            # that is killed before its first flush should leave a trace that names its engine.
            self._beginning = FILE_START + schema.serialize().to_pybytes()
            self._put(memoryview(self._beginning))
        except OSError as error:
            self._drop(path)
            advice = _ADVICE.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
            kind = TraceExistsError if error.errno == errno.EEXIST else TraceError
            raise kind(f"{named or path}: cannot be written: {advice}") from None

    @property
    def deleted(self) -> bool:
        """Whether the file has been deleted; some file systems do not show it."""
        return self._named and not self._file.stat().st_nlink

    @property
    def regular(self) -> bool:
        """Whether it is a file: a pipe and a device are written to as well."""
        return stat.S_ISREG(self._file.stat().st_mode)

    @property
    def descriptor(self) -> int:
        """The open file, -1 once it is closed."""
        return -1 if self._own is None else self._own.descriptor

    @property
    def _file(self) -> OwnFile:
        if self._own is None:
            raise OSError(errno.EBADF, "the file is closed")
        return self._own

    def write(self, batch: pa.RecordBatch, metadata: dict[bytes, bytes]) -> None:
        """Append a batch; on return the operating system has its bytes. Raises `OSError`."""
        bytes(_ROOM_BYTES)  # raises if there is no memory; Arrow would end the process
        self._writer.write_batch(batch, custom_metadata=metadata)
        self._drain()
        self.batches += 1

    def close(self) -> None:
        """Write the end-of-stream mark and the footer, and close the file; raises `OSError`."""
        self._writer.close()
        self._drain()
        own, self._own = self._file, None
        own.close()

    def abandon(self) -> None:
        """Close the file as it is, without a footer."""
        own, self._own = self._own, None
        if own is not None:
            with contextlib.suppress(OSError):
                own.close()

    def _drop(self, path: Path) -> None:
        """Close a file that could not be begun, and leave nothing of it: it would be a trace that nobody can read."""
        with contextlib.suppress(OSError):
            if self._own is not None and self.regular:
                path.unlink()
        self.abandon()

    def _drain(self) -> None:
        data = memoryview(b"".join(self._pending.parts))
        self._pending.parts.clear()
        if self._beginning:
            if data[: len(self._beginning)] != self._beginning:
                raise RuntimeError("this pyarrow begins an Arrow file in an unknown way; use one that is supported")
            data = data[len(self._beginning) :]
            self._beginning = b""
        self._put(data)

    def _put(self, data: memoryview) -> None:
        try:
            self._file.write(data)
        except OSError:
            with contextlib.suppress(OSError):  # a pipe cannot be cut
                self._file.truncate(self.size_bytes)
            raise
        self.size_bytes += len(data)


class _Pending(io.RawIOBase):
    """The file object that Arrow writes to: it keeps the pieces until a whole batch is there."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self.parts.append(piece)
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._position


def _create(path: Path, overwrite: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    if not overwrite:
        return os.open(path, flags | os.O_EXCL, 0o600)
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            path.unlink()  # not truncated: a reader may be at the old file, or at what the link leads to
    return os.open(path, flags, 0o600)


def begin_new(path: Path, begin: Callable[[Path], _T]) -> _T:
    """Return what `begin` makes of a path, or if that is taken, of the first of `NAME-1.arrow` and so on that is not. A
    process's trace is named after the second and the process's id: containers that share a folder may have both alike.
    Raises `TraceError` and `FileExistsError` as `begin` does.
    """
    for number in range(MAX_NAMES):
        try:
            return begin(path.with_name(f"{base_name(path)}-{number}.arrow") if number else path)
        except (TraceExistsError, FileExistsError):
            continue
    return begin(path)
