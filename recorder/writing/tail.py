"""The tail of a trace that is being written: what was recorded and is not yet in the trace, where it outlives the process.

Beside `trace.arrow` lie `trace.arrow.tail0` and `trace.arrow.tail1`. Each event is appended to one of them before the
engine goes on: a write into the page cache, which no end of the process undoes. Once a file is long enough, and all that
the other holds is in the trace, the other is emptied and takes what follows. So the two hold little more than what waits
in the writer's queue, and have its bound. docs/reference/trace-format.md describes them; `tail_reader` reads them.
"""

import contextlib
import functools
import json
import logging
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from crc32c import crc32c

from ..files import new_private_descriptor
from ..trace import tail_reader as layout
from ..trace.event import AnyEvent, TraceEvent
from ..trace.files import tail_paths
from .own_file import OwnFile

_log = logging.getLogger("kvcanary")

_SWITCH_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 1 << 18  # written in one piece, without letting other threads run first
_SLOW_NS: Final = 50_000_000
_MOST_SLOW: Final = 3
_REST_NS: Final = 10_000_000_000


def open_tail(trace: Path, trace_id: str) -> "Tail | None":
    """Begin the tail of a trace that was just begun; None, with a line in the log, if it cannot be."""
    made: list[int] = []
    paths = tail_paths(trace)
    try:
        for path in paths:
            made.append(new_private_descriptor(path))  # in place of an earlier trace's of this name, which is gone
            os.pwrite(made[-1], layout.tail_header(trace_id) + layout.STATE.pack(-1), 0)
    except OSError as error:
        for descriptor, path in zip(made, paths, strict=False):
            os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
        lost = "a process that dies loses what it has not flushed"
        _log.warning("kvcanary: %s: %s: its tail cannot be made: %s", trace, lost, error.strerror)
        return None
    return Tail(trace, paths, made)


class Tail:
    """The two files; all but `empty` is called with the writer's lock held. No method raises. Where the disk takes no
    more, or makes the engine wait again and again, events are put no longer, for good or for a while; what follows a
    rest is put again, and the numbers show the gap.
    """

    def __init__(self, trace: Path, paths: tuple[Path, Path], descriptors: Sequence[int]) -> None:
        self._trace = trace
        self._paths = paths
        self._files = list(map(OwnFile, descriptors))
        self._sizes = [layout.HEADER_BYTES, layout.HEADER_BYTES]
        self._last = [-1, -1]  # the last event in each
        self._empty = [False, True]
        self._now = 0
        self._off = False
        self._slow = 0
        self._rests_until = 0

    def put(self, number: int, nbytes: int, *events: AnyEvent) -> None:
        """Append events of about so many bytes, the engine's `number`th from 0 on; very large ones wait in memory alone."""
        if self._off or nbytes > layout.MAX_BODY_BYTES:
            return
        begin = time.perf_counter_ns()
        if self._rests_until:
            if begin < self._rests_until:
                return
            self._rests_until = 0
            self._say_state(-1)
        now = self._now
        if self._sizes[now] >= _SWITCH_BYTES and self._empty[1 - now]:
            now = self._now = 1 - now
            self._empty[now] = False
        own, size = self._files[now], self._sizes[now]
        try:
            bodies = [body for event in events for body in _bodies(event)]
            self._sizes[now] = size + append_records(own, size, number, bodies)
            self._last[now] = number = number + len(bodies) - 1
        except Exception as error:  # noqa: BLE001  # nothing may reach the engine
            self._off = True
            with contextlib.suppress(OSError):
                self._files[now].truncate(self._sizes[now])
            self._say_state(number)
            lost = "from here on a process that dies loses what it has not flushed: its tail cannot be written"
            why = getattr(error, "strerror", None) or type(error).__name__
            _log.warning("kvcanary: %s: %s: %s", self._trace, lost, why)
            return
        self._rest_if_slow(begin, number)

    def _rest_if_slow(self, begin: int, number: int) -> None:
        end = time.perf_counter_ns()
        self._slow = 0 if end - begin < _SLOW_NS else self._slow + 1
        if self._slow >= _MOST_SLOW:
            self._slow = 0
            self._rests_until = end + _REST_NS
            self._say_state(number + 1)
            lost = f"for {_REST_NS // 10**9} s a process that dies loses what it has not flushed"
            _log.warning("kvcanary: %s: the disk made the engine wait; %s", self._trace, lost)

    def _say_state(self, first_missing: int) -> None:
        for own in self._files:
            with contextlib.suppress(OSError):
                own.write(layout.STATE.pack(first_missing), layout.STATE_AT)

    def outdated(self, events: int) -> int | None:
        """Return which file holds nothing but what is in the trace, now that it has the first `events` events."""
        other = 1 - self._now
        return other if not self._empty[other] and self._last[other] < events else None

    def empty(self, which: int) -> None:
        """Empty an outdated file; without the lock, since `put` does not take it before."""
        with contextlib.suppress(OSError):
            self._files[which].truncate(layout.HEADER_BYTES)
            self._sizes[which] = layout.HEADER_BYTES
            self._empty[which] = True

    def remove(self) -> None:
        """Delete the files: all is in the trace, or nobody will ever read it."""
        for path, own in zip(self._paths, self._files, strict=True):
            with contextlib.suppress(OSError):
                if own.is_at(path.lstat()):
                    path.unlink()
        self._off = True
        self._close()

    def leave(self, first_missing: int) -> None:
        """Close the files and leave them: they hold what the trace lacks, up to event `first_missing`."""
        if not self._off:
            self._say_state(first_missing)
        self._off = True
        self._close()

    def _close(self) -> None:
        for own in self._files:
            with contextlib.suppress(OSError):
                own.close()


def _bodies(event: AnyEvent) -> list[bytes]:
    """Return the body of each event's record."""
    if isinstance(event, TraceEvent):
        return [_body(event)]
    rows, scalars = event.rows, event.scalars
    numbers = [values for values in scalars.values() if isinstance(values, np.ndarray)]
    texts = [values.encode("utf-8", "replace") for values in scalars.values() if isinstance(values, str)]
    lens = [int(lens[0]) for _, lens in event.ints.values()]
    alike = len(numbers) + len(texts) == len(scalars) and 0 not in lens
    if not alike or any((own != one).any() for one, (_, own) in zip(lens, event.ints.values(), strict=True)):
        return list(map(_body, event.events()))
    # As many values of each column in each row: the records are the rows of one array.
    blob = _layout(event.kind, tuple(scalars), tuple(event.ints), ())[0]
    counts, said = (*map(len, texts), *lens), b"".join(texts)
    head = np.empty((rows, 1 + len(numbers) + len(counts)), np.int64)
    columns: list[Any] = [event.times_ns, *numbers, *counts]
    for column, given in enumerate(columns):
        head[:, column] = given
    values = np.empty((rows, sum(lens)), np.int64)
    for end, count, (of_rows, _) in zip(np.cumsum(lens).tolist(), lens, event.ints.values(), strict=True):
        values[:, end - count : end] = of_rows.reshape(rows, count)
    size, begins = head.shape[1] * 8, len(blob) + head.shape[1] * 8 + len(said)
    data = np.empty((rows, begins + values.shape[1] * 8), np.uint8)
    data[:, : len(blob)] = np.frombuffer(blob, np.uint8)
    data[:, len(blob) : len(blob) + size] = head.view(np.uint8)
    data[:, len(blob) + size : begins] = np.frombuffer(said, np.uint8)
    data[:, begins:] = values.view(np.uint8)
    whole, each = data.tobytes(), data.shape[1]
    return [whole[at : at + each] for at in range(0, len(whole), each)]


def _body(event: TraceEvent) -> bytes:
    scalars, arrays = event.scalars, (*event.ints.values(), *event.bytes.values())
    blob, numbers, ints, texts = _layout(event.kind, tuple(scalars), tuple(event.ints), tuple(event.bytes))
    written: list[Any] = [str(scalars[name]).encode("utf-8", "replace") for name in texts]
    values = [*written, *arrays]
    head: list[Any] = [blob, numbers.pack(event.time_ns, *[scalars[name] for name in ints], *map(len, values))]
    try:
        return b"".join(head + values)
    except (BufferError, TypeError, ValueError):  # a view with steps in between
        return b"".join(head + written + list(map(np.ascontiguousarray, arrays)))


@functools.lru_cache(maxsize=layout.MAX_LAYOUTS)
def _layout(
    kind: str, scalars: tuple[str, ...], int_lists: tuple[str, ...], byte_lists: tuple[str, ...]
) -> tuple[bytes, struct.Struct, list[str], list[str]]:
    """Return what all events with the same columns have in common: their names, and how their numbers are packed."""
    ints, texts = ([name for name in scalars if (name in layout.TEXTS) == text] for text in (False, True))
    names = json.dumps([kind, ints, texts, int_lists, byte_lists], separators=(",", ":")).encode()
    count = 1 + len(scalars) + len(int_lists) + len(byte_lists)
    return layout.LAYOUT_BYTES.pack(len(names)) + names, struct.Struct(f"<{count}q"), ints, texts


def append_records(own: OwnFile, at: int, first: int, bodies: Sequence[bytes]) -> int:
    """Write records of the events from `first` on at byte `at`; return their bytes. Raises `OSError`."""
    parts: list[bytes] = []
    for number, body in enumerate(bodies, first):
        size = len(body)
        crc = crc32c(body, crc32c(layout.NUMBERS.pack(number, size)))
        parts += (layout.RECORD.pack(layout.RECORD_MAGIC, crc, number, size), body)
    total = sum(map(len, parts))
    if total <= _SMALL_BYTES:
        own.write_at_once(b"".join(parts), at)
        return total
    for part in parts:
        own.write(part, at)
        at += len(part)
    return total
