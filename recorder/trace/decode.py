"""Bytes to checked schema and checked batches: whatever comes out of here is what the writer put in."""

import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from ..errors import UnreadableTraceError, first_line
from . import schema as keys
from .batch import TraceBatch
from .checksum import LeftBuffer, batch_crc32c, column_forms, stored_crc32c, text_crc32c
from .framing import Frame, FramingError, check_buffers, read_frame, read_message
from .header import TraceHeader
from .trace_bytes import TornError, TraceBytes

# What pyarrow raises on hostile bytes, beside its own exceptions.
ARROW_ERRORS: Final = (pa.ArrowException, OSError, MemoryError, ValueError, TypeError, KeyError, OverflowError)
_MAX_DIGITS: Final = 19
_OWN_SCHEMA: Final = keys.trace_schema()
LARGE_BYTES: Final = 4 << 20  # threads are not worth their start for less of a file
AHEAD: Final = 2  # batches in flight, each no larger in the file than the next: memory has a bound
_AHEAD_BYTES: Final = 16 << 20
_BYTES: Final = "kv_bytes"
_LEFT_BYTES: Final = 1 << 16  # of a batch: fewer are read with the rest
# Read at once by a thread that checks them, always in the same place: new memory for each batch would hold up all other threads.
_PART_BYTES: Final = 8 << 20
# In Arrow's threads a request for memory that fails would end the process.
_THIS_THREAD: Final = pa.ipc.IpcReadOptions(use_threads=False)


class DamagedBatchError(FramingError):
    """A batch that must not be given; `str()` completes the sentence "batch 17 ..."."""


def decode_schema(source: TraceBytes, frame: Frame) -> pa.Schema:
    """Return the schema that a schema message holds; raise `UnreadableTraceError`."""
    try:
        return pa.ipc.read_schema(read_message(source, frame)[0])
    except (TornError, FramingError, *ARROW_ERRORS) as error:
        raise UnreadableTraceError(f"its Arrow schema cannot be read ({first_line(error)})") from None


def check_schema(schema: pa.Schema) -> TraceHeader:
    """Return the header of a trace's schema; raise `UnreadableTraceError` when this build cannot read it. Columns that
    this build does not know are accepted (a newer minor version added them).
    """
    metadata = schema.metadata or {}
    if keys.HEADER_KEY not in metadata:
        raise UnreadableTraceError("an Arrow file, but its schema has no kvcanary.header: not a kvcanary trace")
    text = metadata[keys.HEADER_KEY]
    if metadata.get(keys.HEADER_CRC_KEY) != b"%d" % text_crc32c(text):
        # A major version from the future may have changed this very rule, so say so first if that is the case.
        TraceHeader.from_json(text)
        raise UnreadableTraceError("its header fails its CRC: the header is damaged")
    header = TraceHeader.from_json(text)
    if not schema.equals(_OWN_SCHEMA):
        _check_columns(schema, header.format_minor)
    return header


def _check_columns(schema: pa.Schema, format_minor: int) -> None:
    if not schema.equals(pa.schema(list(schema))):  # the byte order is all that a rebuilt schema can differ in
        raise UnreadableTraceError("its schema says big-endian; traces are little-endian: the header is damaged")
    try:
        _ = schema.names
    except UnicodeDecodeError:
        raise UnreadableTraceError("a column's name is not UTF-8: the header is damaged") from None
    for expected in _OWN_SCHEMA:
        found = [schema.field(index) for index in schema.get_all_field_indices(expected.name)]
        if not found and format_minor < keys.ADDED.get(expected.name, 0):
            continue
        if len(found) != 1:
            came = "missing" if not found else f"there {len(found)} times"
            raise UnreadableTraceError(f"column {expected.name} ({expected.type}) is {came}")
        if not found[0].equals(expected):
            raise UnreadableTraceError(f"column {expected.name} is {_field(found[0])}, expected {_field(expected)}")
    try:
        column_forms(schema)
    except ValueError as error:
        raise UnreadableTraceError(str(error)) from None


def _only_of_forwards(batch: TraceBatch) -> bool:
    """Say whether only forwards have KV bytes: of a transfer they are read with the event."""
    some = np.diff(batch.offsets(_BYTES)) > 0
    return all(kind == "forward" for kind, there in zip(batch.kinds, some.tolist(), strict=True) if there)


def claimed_events(frame: Frame) -> tuple[int, int] | None:
    """Return the first event number and event count that a batch's metadata claims, or None."""
    try:
        return _decimal(frame, keys.FIRST_EVENT_KEY), _decimal(frame, keys.NUM_EVENTS_KEY)
    except DamagedBatchError:
        return None


def _decimal(frame: Frame, key: bytes) -> int:
    text = frame.metadata.get(key)
    if text is None or not text.isdigit() or len(text) > _MAX_DIGITS or int(text) >= 1 << 63:
        raise DamagedBatchError(f"has no usable {key.decode()} in its metadata")
    return int(text)


def _field(field: pa.Field) -> str:
    return f"{field.type}{' with nulls' if field.nullable else ''}"


class BatchDecoder:
    """Gives frames and their batches, some of them decoded before they are asked for; `close` ends its threads. What a
    batch holds does not depend on who decodes it, so nothing but time changes: frames are asked for in order, and a
    batch that was decoded and is not asked for (a file that was cut, damage before it) is forgotten. Only compressed
    batches are: to read what lies in the file as it is takes less than to hand it to a thread.

    With `unchecked` the bytes of KV that forwards wrote stay in the file, where they are many and not compressed; it is given such
    batches, for `holds`: nobody has looked at their CRC.
    """

    def __init__(
        self,
        source: TraceBytes,
        schema: pa.Schema,
        *,
        ahead: bool = True,
        unchecked: Callable[[Frame], None] | None = None,
    ) -> None:
        self._source, self._names, self._forms = source, schema.names, column_forms(schema)
        self._pending: dict[int, tuple[Frame, Future[TraceBatch]]] = {}
        workers = min(AHEAD, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        threads = ahead and source.size() >= LARGE_BYTES and workers > 1
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="decode ahead") if threads else None
        self._head = schema.serialize().to_pybytes()  # the message before a batch in a stream
        ends = np.cumsum([form.num_buffers for form in self._forms])
        self._last = [
            (name, int(end) - 1) for name, form, end in zip(self._names, self._forms, ends, strict=True) if form.nested
        ]
        self._unread = int(ends[schema.names.index(_BYTES)]) - 1 if _BYTES in schema.names else -1
        self._unchecked = unchecked
        self._parts = threading.local()

    def frame(self, position: int, limit: int) -> Frame | None:
        """Return what `read_frame` does."""
        known = self._pending.get(position)
        return known[0] if known and known[0].end <= limit else read_frame(self._source, position, limit)

    def batch(self, frame: Frame, limit: int) -> TraceBatch:
        """Return what `decode` does, and have what follows decoded meanwhile; `limit` is where messages end."""
        known = self._pending.pop(frame.start, None)
        if self._threads is not None and frame.compression is not None:
            self._look_ahead(frame, limit, self._threads)
        return known[1].result() if known and known[0] is frame else self.decode(frame)

    def decode(self, frame: Frame) -> TraceBatch:
        """Return a batch if its bytes, numbers and CRC hold; else raise `DamagedBatchError` saying which does not."""
        if self._unchecked is not None and self._leaves(frame):
            batch = self._decode(frame, left_out=True)
            if _only_of_forwards(batch):
                self._unchecked(frame)
                return batch
        return self._decode(frame)

    def holds(self, frame: Frame) -> bool:
        """Say whether the CRC holds of a batch that was given without its bytes of KV; any number of threads may ask."""
        first, size = frame.buffers[self._unread].tolist()
        try:
            _, body = read_message(self._source, frame, but=(first, first + size))
            check_buffers(body, frame, sum(form.num_buffers for form in self._forms))
            left = LeftBuffer(self._unread, lambda begin, end: self._in_parts(frame.body_start, begin, end))
            crc = stored_crc32c(body, frame, _decimal(frame, keys.FIRST_EVENT_KEY), self._forms, left)
        except (TornError, FramingError, struct.error, *ARROW_ERRORS):
            return False
        return crc == _decimal(frame, keys.CRC_KEY)

    def _in_parts(self, body_start: int, begin: int, end: int) -> Iterator[memoryview]:
        """Yield bytes of a body, each part in the place of the one before."""
        if not hasattr(self._parts, "place"):
            self._parts.place = memoryview(bytearray(_PART_BYTES))
        for at in range(begin, end, _PART_BYTES):
            part: memoryview = self._parts.place[: end - at]
            self._source.fill(part, body_start + at)
            yield part

    def _leaves(self, frame: Frame) -> bool:
        """Say whether a batch's bytes of KV are to stay in the file."""
        plain = self._unread >= 0 and frame.compression is None and len(frame.buffers) > self._unread
        return plain and int(frame.buffers[self._unread, 1]) >= _LEFT_BYTES

    def _decode(self, frame: Frame, *, left_out: bool = False) -> TraceBatch:
        first_event, num_events, crc = (
            _decimal(frame, key) for key in (keys.FIRST_EVENT_KEY, keys.NUM_EVENTS_KEY, keys.CRC_KEY)
        )
        if frame.num_rows != num_events:
            raise DamagedBatchError(f"says {num_events} events and holds {frame.num_rows} rows")
        forms = self._forms
        try:
            first, size = frame.buffers[self._unread].tolist() if left_out else (0, 0)
            data, body = read_message(self._source, frame, self._head, but=(first, first + size))
            check_buffers(body, frame, sum(form.num_buffers for form in forms))
            batch = pa.ipc.open_stream(data, options=_THIS_THREAD).read_next_batch()
            batch.validate(full=True)
        except TornError as error:
            raise DamagedBatchError(str(error), torn=True) from None
        except FramingError as error:
            raise DamagedBatchError(f"cannot be decoded ({error})") from None
        except (StopIteration, *ARROW_ERRORS) as error:
            raise DamagedBatchError(f"cannot be decoded ({first_line(error)})") from None
        if frame.null_counts.any():
            names = [name for name, form in zip(self._names, forms, strict=True) for _ in range(1 + form.nested)]
            name = names[int(np.flatnonzero(frame.null_counts)[0])]
            raise DamagedBatchError(f"holds nulls in column {name}, where none may be")
        plain = frame.compression is None
        if not left_out and crc != (
            stored_crc32c(body, frame, first_event, forms) if plain else batch_crc32c(batch, first_event, forms)
        ):
            raise DamagedBatchError("fails its CRC")
        sizes = frame.buffers[:, 1].tolist()
        numbers = batch.column("event").to_numpy(zero_copy_only=True)
        if not np.array_equal(numbers, np.arange(first_event, first_event + num_events)):
            raise DamagedBatchError("has event numbers that do not follow one another")
        return TraceBatch(
            batch,
            first_event=first_event,
            end_byte=frame.end,
            buffer_bytes=frame.buffers[:, 1].copy(),
            engine_events=_decimal(frame, keys.ENGINE_EVENTS_KEY) if keys.ENGINE_EVENTS_KEY in frame.metadata else None,
            unread_at=frame.body_start + first if left_out else -1,
            empty=frozenset(name for name, last in self._last if not sizes[last]),
        )

    def close(self) -> None:
        """Forget what was not asked for, and wait for what is under way."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        self._pending.clear()

    def _look_ahead(self, frame: Frame, limit: int, threads: ThreadPoolExecutor) -> None:
        self._pending = {start: other for start, other in self._pending.items() if start >= frame.end}
        position = max((other.end for other, _ in self._pending.values()), default=frame.end)
        while len(self._pending) < AHEAD:
            try:
                other = read_frame(self._source, position, limit)
            except FramingError:  # the walk reports it when it comes there
                return
            if other is None or other.compression is None or other.end - other.start > _AHEAD_BYTES:
                return
            self._pending[position] = other, threads.submit(self.decode, other)
            position = other.end
