"""The message walk of an Arrow IPC file, with every length checked before anybody follows it.

An Arrow file is eight bytes of magic, then encapsulated messages (marker 0xFFFFFFFF, int32 metadata length, a
flatbuffer, a body), an end-of-stream mark, and a footer that lists the messages. A torn file has no footer, so the
walk goes by the messages alone. pyarrow does not give the offsets and the custom metadata of single messages, so the
few flatbuffer fields needed are read here; decoding is left to pyarrow. Bytes are read before they are checked, and what
was read is all that is used: see `trace_bytes`.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .schema import MAX_BATCH_METADATA_BYTES, MAX_BATCH_RATIO, MAX_FREE_BATCH_BYTES, MAX_METADATA_BYTES, MAX_SEARCHED
from .trace_bytes import TornError, TraceBytes, aligned

MAGIC: Final = b"ARROW1"
FIRST_MESSAGE: Final = 8
FILE_START: Final = MAGIC.ljust(FIRST_MESSAGE, b"\0")
PREFIX_BYTES: Final = 8
MARKER: Final = 0xFFFFFFFF
SCHEMA: Final = 1
RECORD_BATCH: Final = 3

# The most that one byte of a compressed buffer can become: a longer claim is damage, refused before allocating.
_MAX_RATIO: Final = {0: 256, 1: 1 << 16}  # 0 LZ4 frame, 1 zstd (a run of 128 KiB in four bytes)
_SMALL_BUFFER_BYTES: Final = 1 << 20
_FIRST_SCAN_WORDS: Final = 1 << 13  # the next batch is near, as a rule
_SCAN_WORDS: Final = 1 << 18
_FOOTER_END_BYTES: Final = 4 + len(MAGIC)  # its length and the magic behind it


class FramingError(Exception):
    """Bytes that are no whole message; `torn` says that the message would run past the end of the file."""

    def __init__(self, reason: str, *, torn: bool = False) -> None:
        super().__init__(reason)
        self.torn = torn


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One encapsulated message: where it lies and what its metadata, of which it has its own copy, claims. `head` is
    all before the body. Of a record batch are `num_rows`, `buffers`, [n, 2] int64 (offset in the body, length), and
    `null_counts`, [arrays] int64.
    """

    start: int
    body_start: int
    end: int
    head: memoryview
    kind: int
    num_rows: int
    buffers: npt.NDArray[np.int64]
    null_counts: npt.NDArray[np.int64]
    compression: int | None
    metadata: dict[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """A footer's own claims: where it starts and the messages it lists, [n, 3] int64 (offset, metadata, body).
    `as_file` is an Arrow file of that footer alone, for pyarrow to read its schema.
    """

    start: int
    blocks: npt.NDArray[np.int64]
    as_file: bytes


def read_frame(source: TraceBytes, position: int, limit: int) -> Frame | None:
    """Return the message at `position`, or None for the end-of-stream mark; raise `FramingError` for neither. `limit`
    is where messages must have ended: the footer's start, or the end of a file without one.
    """
    if position + PREFIX_BYTES > limit:
        raise _no_end_mark(limit)
    try:
        prefix = source.read(position, position + PREFIX_BYTES)
        body_start = _body_start(prefix, position, limit)
        if body_start is None:
            return None
        head = memoryview(bytearray(body_start - position))
        head[:PREFIX_BYTES] = prefix
        source.fill(head[PREFIX_BYTES:], position + PREFIX_BYTES)
    except TornError:
        raise _no_end_mark(min(limit, source.size())) from None
    except OSError as error:
        raise FramingError(f"the message at byte {position} cannot be read ({error.strerror})") from None
    return _parse_message(head, position, body_start, limit)


def find_frames(source: TraceBytes, position: int, limit: int) -> Iterator[Frame]:
    """Yield every whole message from `position` on, wherever it starts, trusting no length before it. It ends early
    where what looks like messages is, lying over one another, many times as long as the file.
    """
    start, words = (position + 7) // 8 * 8, _FIRST_SCAN_WORDS
    left = MAX_SEARCHED * limit
    while (data := source.data_from(start)) is not None:  # a hole is all zeros
        start = max(start, data // 8 * 8)
        if start + PREFIX_BYTES > limit:
            return
        words = min(words, (limit - start) // 8)
        try:
            window = source.read_some(start, min(limit, start + 8 * words + MAX_BATCH_METADATA_BYTES))
        except OSError:
            window = memoryview(b"")
        chunk = np.frombuffer(window, dtype="<u4", count=2 * min(words, len(window) // 8))
        length = chunk[1::2]
        # -1 as an int64 is all ones too: the length sorts such values out.
        found = np.flatnonzero((chunk[::2] == MARKER) & (length > 0) & (length <= MAX_BATCH_METADATA_BYTES))
        for at in (8 * found).tolist():
            try:
                body_start = _body_start(window[at : at + PREFIX_BYTES], start + at, limit)
                if body_start is None:
                    continue
                left -= body_start - start - at
                if left < 0:
                    return
                yield _parse_message(window[at : body_start - start], start + at, body_start, limit)
            except FramingError:
                continue
        start += 8 * words
        words = min(2 * words, _SCAN_WORDS)


def read_message(
    source: TraceBytes, frame: Frame, before: bytes = b"", *, but: tuple[int, int] = (0, 0)
) -> tuple[pa.Buffer, memoryview]:
    """Return `before` and a whole message behind it, in memory of their own, and its body in there, of which the bytes from one to the
    other of `but` are not read. Raises `FramingError`, `TornError`, `OSError` and `MemoryError`.
    """
    head, body_bytes = len(before) + len(frame.head), frame.end - frame.body_start
    if source.is_mostly_hole(body_bytes):
        raise FramingError(
            f"it would be {body_bytes:,} bytes, most of them a hole in a file that holds {source.held_bytes():,}"
        )
    data, view = aligned(head + body_bytes, head)
    view[: len(before)] = before
    view[len(before) : head] = frame.head
    first, last = but
    if not 0 <= first <= last <= body_bytes:
        raise FramingError("a buffer lies outside its body")
    source.fill(view[head : head + first], frame.body_start)
    source.fill(view[head + last :], frame.body_start + last)
    return data, view[head:]


def check_buffers(body: memoryview, frame: Frame, expected: int) -> None:
    """Raise `FramingError` when a record batch's buffers do not lie in its body or claim absurd sizes."""
    offsets, lengths = frame.buffers[:, 0], frame.buffers[:, 1]
    body_bytes = len(body)
    if len(offsets) != expected:
        raise FramingError(f"it holds {len(offsets)} buffers, expected {expected}")
    outside = (offsets < 0) | (lengths < 0) | (offsets % 8 != 0) | (offsets > body_bytes)
    if (outside | (lengths > body_bytes - offsets)).any():
        raise FramingError("a buffer lies outside its body")
    if frame.compression is None:
        return
    if frame.compression not in _MAX_RATIO:
        raise FramingError(f"its compression codec {frame.compression} is unknown")
    used = lengths > 0
    offsets, lengths = offsets[used], lengths[used]
    if (lengths < 8).any():
        raise FramingError("a compressed buffer is too short to hold its own length")
    claims = np.frombuffer(body, dtype="<i8", count=body_bytes // 8)[offsets // 8]
    ratio = _MAX_RATIO[frame.compression]
    # In float, since a hostile length times the ratio may pass 2^63; -1 says that the buffer is stored as it is.
    if (claims < -1).any() or (claims.astype(np.float64) > _SMALL_BUFFER_BYTES + ratio * lengths.astype(float)).any():
        raise FramingError("a compressed buffer claims an impossible size")
    whole = int(np.where(claims < 0, lengths, claims).sum())
    if whole > max(MAX_FREE_BATCH_BYTES, MAX_BATCH_RATIO * body_bytes):
        raise FramingError(f"it would be {whole:,} bytes of the {body_bytes:,} that it takes")


def read_footer(source: TraceBytes, size: int) -> Footer | None:
    """Return the footer at the end of a file of `size` bytes, or None when there is none that can be parsed."""
    try:
        end = source.read(max(size - _FOOTER_END_BYTES, 0), size)
        if len(end) < _FOOTER_END_BYTES or bytes(end[4:]) != MAGIC:
            return None
        (length,) = struct.unpack_from("<i", end)
        start = size - _FOOTER_END_BYTES - length
        if length <= 0 or start < FIRST_MESSAGE:
            return None
        footer = source.read(start, size)
        blocks = _Table.root(footer[:length]).structs(3, 24)
    except (TornError, OSError, MemoryError, struct.error, ValueError, OverflowError):
        return None
    rows = np.frombuffer(blocks, dtype="<i8").reshape(-1, 3).copy()
    rows[:, 1] &= 0xFFFFFFFF  # an int32 and four bytes of padding
    return Footer(start=start, blocks=rows, as_file=FILE_START + bytes(footer))


def footer_lists(footer: Footer, first: int) -> bool:
    """Return whether the listed messages lie end to end from `first` to the end-of-stream mark before the footer."""
    if ((footer.blocks < 0) | (footer.blocks > footer.start)).any():
        return False
    ends = footer.blocks.sum(axis=1)
    starts = np.append(footer.blocks[:, 0], footer.start - PREFIX_BYTES)
    return bool((starts == np.insert(ends, 0, first)).all())


def _no_end_mark(end: int) -> FramingError:
    return FramingError(f"the messages end at byte {end} without an end mark", torn=True)


def _body_start(prefix: memoryview, position: int, limit: int) -> int | None:
    """Return where a message's body begins, None for the end-of-stream mark; raise `FramingError`."""
    marker, metadata_bytes = struct.unpack_from("<Ii", prefix)
    if marker != MARKER:
        raise FramingError(f"no message starts at byte {position}")
    if metadata_bytes == 0:
        return None
    if not 0 < metadata_bytes <= MAX_METADATA_BYTES:
        raise FramingError(f"the message at byte {position} claims {metadata_bytes} bytes of metadata")
    body_start = position + PREFIX_BYTES + int(metadata_bytes)
    if body_start > limit:
        raise _runs_past(position, limit)
    return body_start


def _runs_past(position: int, limit: int) -> FramingError:
    return FramingError(f"the message at byte {position} runs past byte {limit}, where messages end", torn=True)


def _parse_message(head: memoryview, position: int, body_start: int, limit: int) -> Frame:
    damaged = FramingError(f"the message at byte {position} has damaged metadata")
    num_rows, compression = 0, None
    buffers = nodes = np.empty((0, 2), np.int64)
    if len(head) != body_start - position:
        raise damaged
    try:
        message = _Table.root(head[PREFIX_BYTES:])
        kind, body_bytes, batch = message.scalar(1, "<B", 0), message.scalar(3, "<q", 0), message.table(2)
        if kind == RECORD_BATCH and batch is not None:
            num_rows = batch.scalar(0, "<q", 0)
            nodes, buffers = (np.frombuffer(batch.structs(n, 16), dtype="<i8").reshape(-1, 2) for n in (1, 2))
            codec = batch.table(3)
            compression = None if codec is None else codec.scalar(0, "<b", 0)
        metadata = _custom_metadata(message, len(head))
    except (struct.error, ValueError, OverflowError):
        raise damaged from None
    if body_bytes > limit - body_start:
        raise _runs_past(position, limit)
    # No trace's columns need more metadata.
    whole = kind != RECORD_BATCH or (batch is not None and len(head) - PREFIX_BYTES <= MAX_BATCH_METADATA_BYTES)
    if body_bytes < 0 or not whole:
        raise damaged
    return Frame(
        start=position,
        body_start=body_start,
        end=body_start + body_bytes,
        head=head,
        kind=kind,
        num_rows=num_rows,
        buffers=buffers,
        null_counts=nodes[:, 1],
        compression=compression,
        metadata=metadata,
    )


def _custom_metadata(message: "_Table", left: int) -> dict[bytes, bytes]:
    """Return a message's own keys and values; texts that lie over one another must not cost more than the message."""
    found = {}
    for pair in message.tables(4):
        key, value = pair.string(0), pair.string(1)
        left -= len(key) + len(value)
        if left < 0:
            raise ValueError("metadata longer than its message")
        found[key] = value
    return found


@dataclass(frozen=True, slots=True)
class _Table:
    """A flatbuffer table; reading past the bytes that hold it raises `struct.error` or `ValueError`."""

    view: memoryview
    position: int

    @classmethod
    def root(cls, view: memoryview) -> "_Table":
        return cls(view, _unpack("<I", view, 0))

    def _field(self, number: int) -> int | None:
        vtable = self.position - _unpack("<i", self.view, self.position)
        if 4 + 2 * number + 2 > _unpack("<H", self.view, vtable):
            return None
        offset = _unpack("<H", self.view, vtable + 4 + 2 * number)
        return self.position + offset if offset else None

    def scalar(self, number: int, code: str, default: int) -> int:
        at = self._field(number)
        return default if at is None else _unpack(code, self.view, at)

    def _target(self, number: int) -> int | None:
        at = self._field(number)
        return None if at is None else at + _unpack("<I", self.view, at)

    def table(self, number: int) -> "_Table | None":
        target = self._target(number)
        return None if target is None else _Table(self.view, target)

    def structs(self, number: int, width: int) -> memoryview:
        """The bytes of a vector of structs."""
        target = self._target(number)
        if target is None:
            return self.view[:0]
        start = target + 4
        stop = start + width * _unpack("<I", self.view, target)
        if stop > len(self.view):
            raise ValueError("a vector runs past its message")
        return self.view[start:stop]

    def tables(self, number: int) -> "Iterator[_Table]":
        slots = self.structs(number, 4)
        base = 0 if not len(slots) else (self._target(number) or 0) + 4
        for index in range(0, len(slots), 4):
            yield _Table(self.view, base + index + _unpack("<I", slots, index))

    def string(self, number: int) -> bytes:
        return bytes(self.structs(number, 1))


def _unpack(code: str, view: memoryview, at: int) -> Any:
    if at < 0:  # struct would count from the end
        raise ValueError(at)
    return struct.unpack_from(code, view, at)[0]
