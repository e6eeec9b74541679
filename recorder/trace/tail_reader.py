"""Reading the tail that a process left beside its trace; whoever made it may have been somebody else, so nothing in it is trusted."""

import contextlib
import functools
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from crc32c import crc32c

from ..files import regular_file
from ..remote import RemotePath
from .batch import TraceBatch, TraceGap
from .event import TraceEvent, encode_events
from .files import tail_paths
from .schema import BYTE_LISTS, EVENT_KINDS, INT_LISTS, SCALARS

TAIL_MAGIC: Final = b"KVCTAIL1"
STATE_AT: Final = 24
STATE: Final = struct.Struct("<q")  # from which event on nothing is put, -1 while all is
HEADER_BYTES: Final = STATE_AT + STATE.size
RECORD_MAGIC: Final = b"KVCR"
RECORD: Final = struct.Struct("<4sIQQ")  # magic, CRC-32C of all behind it, the event's number, bytes of its body
NUMBERS: Final = struct.Struct("<QQ")  # the part of `RECORD` that the CRC covers
LAYOUT_BYTES: Final = struct.Struct("<I")
MAX_BODY_BYTES: Final = 1 << 28  # a larger event waits in memory alone

_BATCH_BYTES: Final = 4 << 20
_BATCH_EVENTS: Final = 4096
_MAX_LAYOUT_BYTES: Final = 1 << 14
MAX_LAYOUTS: Final = 512
TEXTS: Final = frozenset(name for name, (_, default) in SCALARS.items() if isinstance(default, str)) - {"kind"}
_INTS: Final = frozenset(SCALARS) - TEXTS - {"kind", "event", "time_ns"}


def tail_header(trace_id: str) -> bytes:
    """Return how the tail files of a recording begin; `STATE` is behind it."""
    return TAIL_MAGIC + hashlib.sha256(trace_id.encode()).digest()[:16]


class _NoEventError(ValueError):
    """A record that no event can be made of."""


class _Layout(NamedTuple):
    kind: str
    ints: list[str]
    texts: list[str]
    int_lists: list[str]
    byte_lists: list[str]


class TailReader:
    """The tail of a recording that is over: the events that are not in its trace, if there is one. Files that are
    missing, linked, or of another recording are passed over. `whole` says whether the process put all that it recorded
    there. Nothing is raised.
    """

    def __init__(self, trace: Path, trace_id: str) -> None:
        self._trace = trace if isinstance(trace, RemotePath) else Path(os.path.realpath(trace))
        self._trace_id = trace_id
        self.whole = False

    def events(self, after: int) -> Iterator[tuple[int, TraceEvent]]:
        """Yield the engine's events from number `after` on, in order, with their numbers. A record that is not whole
        ends its file.
        """
        with contextlib.ExitStack() as opened:
            found = [_open(opened, path, self._trace_id) for path in tail_paths(self._trace)]
            files = [file for file in found if file is not None]
            self.whole = len(files) == len(found) and all(file.whole for file in files)
            last = after - 1
            for file in sorted(files, key=lambda file: (file.head(HEADER_BYTES) or (0, -1))[1]):
                for number, event in file.events(after):
                    if number <= last:
                        break
                    last = number
                    yield number, event

    def batches(self, after: int, first_event: int, schema: pa.Schema) -> Iterator[TraceBatch | TraceGap]:
        """Yield `events` as batches in a trace's own schema, numbered from `first_event`. A gap stands where the tail
        lacks some, which the process has lost.
        """
        held: list[TraceEvent] = []
        size = 0
        for number, event in self.events(after):
            if held and (number != after + len(held) or size >= _BATCH_BYTES or len(held) >= _BATCH_EVENTS):
                yield TraceBatch(encode_events(held, first_event, schema), first_event=first_event)
                first_event, after = first_event + len(held), after + len(held)
                held, size = [], 0
            if not held and number > after:
                missing = number - after
                cause = f"{self._trace.name}: {missing:,} events were lost with the process: its tail lacks them"
                yield TraceGap(after_event=first_event - 1, missing_events=missing, kind="torn", cause=cause)
                first_event, after = first_event + missing, number
            held.append(event)
            size += event.nbytes
        if held:
            yield TraceBatch(encode_events(held, first_event, schema), first_event=first_event)


def _open(opened: contextlib.ExitStack, path: Path, trace_id: str) -> "_TailFile | None":
    """Return a tail file, which is closed with `opened`; None for one that is not usable."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = opened.enter_context(regular_file(path, links=False))
        head = os.pread(descriptor, HEADER_BYTES, 0)
        if len(head) == HEADER_BYTES and head.startswith(tail_header(trace_id)):
            return _TailFile(descriptor, STATE.unpack_from(head, STATE_AT)[0] == -1)
    return None


class _TailFile(NamedTuple):
    descriptor: int
    whole: bool  # nothing was left out of it

    def events(self, after: int) -> Iterator[tuple[int, TraceEvent]]:
        """Yield whole records from event `after` on, up to the first that is not."""
        at = HEADER_BYTES
        while (head := self.head(at)) is not None:
            crc, number, size = head
            at += RECORD.size
            if number >= after:
                try:
                    body = os.pread(self.descriptor, size, at)
                    if len(body) != size or crc32c(body, crc32c(NUMBERS.pack(number, size))) != crc:
                        return
                    event = _event(body)
                except (_NoEventError, OSError, MemoryError):
                    return
                yield number, event
            at += size

    def head(self, at: int) -> tuple[int, int, int] | None:
        """Return CRC, number and size of the record at `at`, None if there is none whose body is in the file."""
        try:
            head = os.pread(self.descriptor, RECORD.size, at)
            left = os.fstat(self.descriptor).st_size - at - RECORD.size
        except OSError:
            return None
        if len(head) < RECORD.size:
            return None
        magic, crc, number, size = RECORD.unpack(head)
        if magic != RECORD_MAGIC or size > min(left, MAX_BODY_BYTES) or number >= 1 << 62:
            return None
        return crc, number, size


def _event(body: bytes) -> TraceEvent:
    try:
        (length,) = LAYOUT_BYTES.unpack_from(body)
        at = LAYOUT_BYTES.size + length
        layout = _checked_layout(body[LAYOUT_BYTES.size : at])
        count = 1 + sum(map(len, layout[1:]))
        time_ns, *numbers = struct.unpack_from(f"<{count}q", body, at)
    except struct.error:
        raise _NoEventError from None
    at += 8 * count
    event = TraceEvent(kind=layout.kind, time_ns=time_ns, scalars=dict(zip(layout.ints, numbers, strict=False)))
    lengths = iter(numbers[len(layout.ints) :])
    parts: tuple[tuple[list[str], str, dict[str, Any]], ...] = (
        (layout.texts, "u1", event.scalars),
        (layout.int_lists, "<i8", event.ints),
        (layout.byte_lists, "u1", event.bytes),
    )
    for names, items, into in parts:
        dtype = np.dtype(items)
        for name in names:
            values = next(lengths)
            if not 0 <= values <= (len(body) - at) // dtype.itemsize:
                raise _NoEventError
            found = np.frombuffer(body, dtype, values, at)
            into[name] = found if into is not event.scalars else found.tobytes().decode("utf-8", "replace")
            at += values * dtype.itemsize
    if at != len(body):
        raise _NoEventError
    return event


@functools.lru_cache(maxsize=MAX_LAYOUTS)
def _checked_layout(text: bytes) -> _Layout:
    """Return the names that a record begins with; raise `_NoEventError` for others than those of a trace's columns."""
    if len(text) > _MAX_LAYOUT_BYTES:
        raise _NoEventError
    try:
        layout = msgspec.json.decode(text, type=_Layout)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise _NoEventError from None
    for given, known in zip(layout[1:], (_INTS, TEXTS, INT_LISTS, BYTE_LISTS), strict=True):
        if layout.kind not in EVENT_KINDS or len(set(given)) != len(given) or not set(known).issuperset(given):
            raise _NoEventError
    return layout
