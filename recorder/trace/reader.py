"""Reading a trace: batch by batch, with everything that is missing or damaged said aloud."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self, cast

import pyarrow as pa
import pyarrow.ipc

from ..errors import TraceError, UnreadableTraceError
from ..remote import RemoteFile, RemotePath, as_path
from . import framing
from .batch import EventView, TraceBatch, TraceGap
from .decode import ARROW_ERRORS, BatchDecoder, check_schema, decode_schema
from .files import is_locked, recording_path, segment_path, split_segment_name
from .framing import Frame
from .header import TraceHeader
from .tail_reader import TailReader
from .trace_bytes import RemoteBytes, TraceBytes
from .walk import Walk

__all__ = ["EventView", "TraceBatch", "TraceGap", "TraceReader", "read_trace"]


class TraceReader:
    """A trace opened for reading; raises `UnreadableTraceError` when the file is no trace, or its header cannot be
    used. A torn or damaged trace opens; `complete` is then False, or `stream()` gives a `TraceGap`. `schema` is the
    file's own, with metadata; one of a newer minor version may have columns that we do not know.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = as_path(path)
        self._bytes, self.size_bytes = _open(self.path)  # the file's size when it was opened
        self._footer: framing.Footer | None = None
        self._header_damage = ""
        self._limit = self.size_bytes
        self._checker: BatchDecoder | None = None
        try:
            footer = framing.read_footer(self._bytes, self.size_bytes)
            self.header: TraceHeader = self._read_header(footer)
            if footer is not None and self._is_right(footer):
                self._footer, self._limit = footer, footer.start
        except BaseException as error:
            self.close()
            if isinstance(error, UnreadableTraceError | OSError):
                why = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else error
                raise UnreadableTraceError(f"{self.path}: {why}") from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; batches that were given stay good."""
        self._bytes.close()

    @property
    def complete(self) -> bool:
        """Whether the footer is there and right, so that the trace was closed; single batches may yet be damaged."""
        return self._footer is not None and not self._header_damage

    @property
    def num_batches_hint(self) -> int | None:
        """The number of batches by the footer, None without one."""
        return None if self._footer is None else len(self._footer.blocks)

    def stream(self) -> Iterator[TraceBatch | TraceGap]:
        """Yield every whole batch in order, and a gap wherever something is missing. Each call starts anew. The batch
        given is not held; drop it before asking for the next. Of a large file the next two are decoded meanwhile, in
        threads. A file that somebody cuts short meanwhile is torn from there on.
        """
        return cast("Iterator[TraceBatch | TraceGap]", self._walk(None))  # which follows nothing, so never None

    def stream_without_bytes(self, unchecked: Callable[[Frame], None]) -> Iterator[TraceBatch | TraceGap]:
        """Do what `stream` does, and leave KV bytes of forwards in the file where they are many; `unchecked` is given such batches, for
        `check`: nobody has looked at their CRC.
        """
        self._checker = BatchDecoder(self._bytes, self.schema, ahead=False)
        return cast("Iterator[TraceBatch | TraceGap]", self._walk(None, unchecked))

    def check(self, frame: Frame) -> bool:
        """Say whether a batch's CRC holds; any number of threads may ask."""
        assert self._checker is not None
        return self._checker.holds(frame)

    def read_at(self, data: memoryview, start: int) -> None:
        """Read so many bytes of the file as `data` has; raise `TornError` and `OSError`."""
        self._bytes.fill(data, start)

    def follow(self) -> Iterator[TraceBatch | TraceGap | None]:
        """Do what `stream` does, and go on for as long as the file is being written; None says that nothing more is there yet."""
        return self._walk(self._since_closed)

    def _walk(
        self,
        since_closed: Callable[[], tuple[int, int] | None] | None,
        unchecked: Callable[[Frame], None] | None = None,
    ) -> Iterator[TraceBatch | TraceGap | None]:
        source = self._bytes.again()  # this reader may be closed first
        try:
            walk = Walk(
                source=source,
                schema=self.schema,
                header=self.header,
                name=self.path.name,
                position=self._first_batch,
                limit=self._limit,
                listed=self.num_batches_hint,
                tail=self._tail(),
                being_written=lambda: self.being_written,
                since_closed=since_closed,
                unchecked=unchecked,
            )
            if self._header_damage:
                yield walk.header_gap(self._header_damage)
            yield from walk.run()
        finally:
            source.close()

    def _since_closed(self) -> tuple[int, int] | None:
        """Return how many batches the footer lists that was written meanwhile, and where it starts; None if none was."""
        self.size_bytes = self._bytes.size()
        footer = framing.read_footer(self._bytes, self.size_bytes)
        if footer is None or not self._is_right(footer):
            return None
        self._footer = footer
        return len(footer.blocks), footer.start

    @property
    def being_written(self) -> bool:
        """Whether the recording process is at work on the file: what is missing then is yet to come."""
        return self._footer is None and self._bytes.descriptor >= 0 and is_locked(self._bytes.descriptor)

    def _tail(self) -> TailReader | None:
        """Return what may hold what the process that died had recorded and not flushed; of segments, the last one's alone."""
        if self.header.segment is not None:
            if split_segment_name(self.path) is None:
                return None
            behind = segment_path(recording_path(self.path), self.header.segment.number + 1)
            with contextlib.suppress(OSError):
                if behind.stat().st_size > 0:  # it has its header: what waits goes there
                    return None
        return TailReader(self.path, self.header.trace_id)

    def _read_header(self, footer: framing.Footer | None) -> TraceHeader:
        try:
            self.schema, self._first_batch = self._leading_schema(footer)
            return check_schema(self.schema)
        except UnreadableTraceError as error:
            # There is a copy of the schema in the footer, for a file whose beginning is damaged.
            if footer is None or not len(footer.blocks):
                raise
            with contextlib.suppress(UnreadableTraceError, *ARROW_ERRORS):
                schema = pa.ipc.open_file(footer.as_file).schema
                header = check_schema(schema)
                self._header_damage = f"{error}; the footer's copy of the header was used"
                self.schema, self._first_batch = schema, int(footer.blocks[0, 0])
                return header
            raise

    def _leading_schema(self, footer: framing.Footer | None) -> tuple[pa.Schema, int]:
        _check_magic(self._bytes, self.size_bytes)
        try:
            frame = framing.read_frame(self._bytes, framing.FIRST_MESSAGE, self.size_bytes)
        except framing.FramingError as error:
            problem = f"its header is damaged: {error}; restore a copy or record again"
            if error.torn:
                problem = f"torn within its header, at byte {self.size_bytes}: no event can be read; record again"
            raise UnreadableTraceError(problem) from None
        if frame is None or frame.kind != framing.SCHEMA:
            raise UnreadableTraceError("its first message is no schema: the header is damaged; restore a copy")
        schema, end = decode_schema(self._bytes, frame), frame.end
        if footer is None or not framing.footer_lists(footer, end):
            # A schema message that claims too many bytes would swallow the first batches.
            found = next(
                framing.find_frames(self._bytes, framing.FIRST_MESSAGE + framing.PREFIX_BYTES, self.size_bytes), None
            )
            if found is not None and found.start < end:
                self._header_damage, end = "the length of its schema message is damaged", found.start
        return schema, end

    def _is_right(self, footer: framing.Footer) -> bool:
        if not framing.footer_lists(footer, self._first_batch):
            return False
        try:
            listed = pa.ipc.open_file(footer.as_file)
            same = listed.schema.equals(self.schema, check_metadata=True)
        except ARROW_ERRORS:
            return False
        return same and listed.num_record_batches == len(footer.blocks)


def read_trace(path: str | os.PathLike[str]) -> Iterator[EventView]:
    """Yield each event of a whole trace; raise `TraceError` at the first gap."""
    with TraceReader(path) as reader:
        for item in reader.stream():
            if isinstance(item, TraceGap):
                raise TraceError(item.reason)
            yield from item


def _open(path: Path) -> tuple[TraceBytes, int]:
    if isinstance(path, RemotePath):
        return _open_remote(path)
    try:
        # A pipe that nobody writes to must not make anybody wait.
        source = TraceBytes(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except FileNotFoundError:
        raise UnreadableTraceError(f"{path}: no such file") from None
    except PermissionError:
        advice = "traces are written with mode 0600, so ask their owner"
        raise UnreadableTraceError(f"{path}: may not be read by this user; {advice}") from None
    except (OSError, ValueError) as error:
        raise UnreadableTraceError(f"{path}: cannot be opened ({error})") from None
    found = os.fstat(source.descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size:
        return source, found.st_size
    source.close()
    problem = "not a regular file; a trace is read at many places, so copy it to one first"
    if stat.S_ISDIR(found.st_mode):
        problem = "a folder, expected a trace file"
    elif stat.S_ISREG(found.st_mode):
        problem = "empty, expected a kvcanary trace; was the recorder ever started?"
    raise UnreadableTraceError(f"{path}: {problem}")


def _open_remote(path: RemotePath) -> tuple[TraceBytes, int]:
    try:
        file = RemoteFile(path)
    except OSError as error:
        raise UnreadableTraceError(f"{path}: {error.strerror}") from None
    if not file.size:
        file.close()
        raise UnreadableTraceError(f"{path}: empty, expected a kvcanary trace")
    return RemoteBytes(file), file.size


_FOREIGN = {
    b"PAR1": "a Parquet file",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG": "a PNG image",
    b"\x1f\x8b": "gzip data; gunzip it first",
    b"\x28\xb5\x2f\xfd": "zstd data; run unzstd on it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\xff\xff\xff\xff": "an Arrow stream without the file format's start",
}


def _check_magic(source: TraceBytes, size: int) -> None:
    head = bytes(source.read_some(0, min(framing.FIRST_MESSAGE, size)))
    if head[: len(framing.MAGIC)] == framing.MAGIC:
        return
    if framing.MAGIC.startswith(head):
        raise UnreadableTraceError(f"torn after {size} bytes: no event can be read; record again")
    for start, what in _FOREIGN.items():
        if head.startswith(start):
            raise UnreadableTraceError(f"not a kvcanary trace but {what}")
    raise UnreadableTraceError(f"not a kvcanary trace: expected an Arrow file, which starts with ARROW1, came {head!r}")
