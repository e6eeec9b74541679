"""A recording cut into segments: files that each can be replayed alone, of which the last may be all that is kept.

All of it runs on the writer's thread. The state that keyframes are made from takes every event that was written. At its start
a recording may delete segments of others that are over: a server that crashes again and again must not fill the disk.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..errors import TraceError, TraceExistsError
from ..files import regular_file
from ..process.settings import WriterSettings
from ..trace.batch import TraceBatch
from ..trace.event import AnyEvent, TraceEvent, batch_metadata, encode_events, header_schema, num_rows
from ..trace.files import base_name, is_being_written, segment_path, segments_of, split_segment_name, tail_paths
from ..trace.framing import FILE_START
from ..trace.header import Segment, TraceHeader
from ..trace.schema import FROZEN, HEADER_KEY, SEGMENT_CONTINUES
from .own_file import hold
from .trace_file import EXISTS, DeletedError, TraceFile

_BEGINNING_NS: Final = 10_000_000_000
_BEGINNING_BYTES: Final = 1 << 16  # of a file, in which its header begins

_log = logging.getLogger("kvcanary")


class SingleFile:
    """The file of a recording. Raises `TraceError` when it cannot be made, `OSError` when it cannot be written."""

    def __init__(self, path: Path, header: TraceHeader, settings: WriterSettings, *, overwrite: bool) -> None:
        self._path = path
        self._header = header
        self._settings = settings
        self._events = 0
        self._engine_events = 0  # of them, the engine's own
        self._written_before = self._batches_before = 0  # in the segments before this one
        self.last_ns = header.created_ns  # the time of the last event
        self.breathe: Callable[[], None] = lambda: None  # called often while a batch is encoded
        self.file = self._open(path, header, overwrite=overwrite)

    def _open(self, path: Path, header: TraceHeader, *, overwrite: bool = False) -> TraceFile:
        self._schema = header_schema(header)
        file = TraceFile(path, self._schema, compression=self._settings.compression, overwrite=overwrite)
        hold(file.descriptor)
        return file

    @property
    def batches(self) -> int:
        """Batches written, in all segments."""
        return self._batches_before + self.file.batches

    @property
    def size_bytes(self) -> int:
        """Bytes written, in all segments, deleted ones too."""
        return self._written_before + self.file.size_bytes

    @property
    def regular(self) -> bool:
        """Whether it is a file, beside which others may lie."""
        return self.file.regular

    def write(self, events: Sequence[AnyEvent]) -> None:
        """Append a batch of events."""
        if self.file.deleted:
            raise DeletedError("somebody has deleted the trace")
        self._append(events, num_rows(events))

    def freeze(self, note: str) -> str:
        """Leave a mark with the note; nothing is ever deleted here. Return the file."""
        self._append([self._frozen_mark(note)], 0)
        return str(self._path)

    def close(self) -> None:
        """Write the file's end."""
        self.file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self.file.abandon()

    def _append(self, events: Sequence[AnyEvent], engine_events: int) -> TraceBatch:
        self._engine_events += engine_events
        self.last_ns = max(self.last_ns, events[-1].time_ns)
        return self._put(events)

    def _put(self, events: Sequence[AnyEvent]) -> TraceBatch:
        first_event, batch = self._events, encode_events(events, self._events, self._schema, self.breathe)
        self.file.write(batch, batch_metadata(batch, first_event, self._engine_events))
        self._events += batch.num_rows
        return TraceBatch(batch, first_event=first_event)

    def _frozen_mark(self, note: str) -> TraceEvent:
        text = f"frozen: {note}" if note else "frozen"
        return TraceEvent(kind="mark", time_ns=self.last_ns, scalars={"note": text})


class Segments(SingleFile):
    """The files of a recording; `write` may begin a new one before it writes. Raises `TraceError` and `OSError`. What
    is kept of the past is bounded by the settings; frozen folders are nobody's to delete.
    """

    def __init__(self, path: Path, header: TraceHeader, settings: WriterSettings, *, overwrite: bool) -> None:
        from ..state.apply import RecordedState
        from ..state.pools import pool_bytes

        self._number = 0
        self._kept: deque[Path] = deque()
        self._state_failed = self._delete_failed = False
        try:
            self._recorded = RecordedState(header)
        except MemoryError:
            needed = f"{pool_bytes(header) / 2**30:.1f} GiB of memory for keyframes"
            raise TraceError(
                f"{path}: segments need {needed}, which this machine does not have; record one file"
            ) from None
        for other in segments_of(path):  # another recording's of this name, not to be taken for some of this one
            if not overwrite:
                raise TraceExistsError(f"{other}: cannot be written: {EXISTS}")
            with contextlib.suppress(OSError):
                other.unlink()
        if settings.keep_folder_bytes:
            drop_the_past(path.parent, settings.keep_folder_bytes)
        super().__init__(path, header, settings, overwrite=False)

    def _open(self, path: Path, header: TraceHeader, *, overwrite: bool = False) -> TraceFile:
        segment = Segment(number=self._number, first_event=self._events, engine_events=self._engine_events)
        file = super()._open(segment_path(path, self._number), dataclasses.replace(header, segment=segment))
        self._begun = time.monotonic_ns()
        self._overhead = file.size_bytes
        self._has_events = False
        return file

    def write(self, events: Sequence[AnyEvent]) -> None:
        """Append a batch of events, in a new segment if the current one is full or old."""
        if self._is_due():
            self._cut("")
            self._drop_the_oldest()
            self._write_keyframe()
        self._append(events, num_rows(events))

    def freeze(self, note: str) -> str:
        """Finish the segment and give all that is kept a second name in a folder of its own; return the folder."""
        self._append([self._frozen_mark(note)], 0)
        self._cut(FROZEN)
        try:
            folder = str(keep_aside(self._path, self._kept))
        except OSError as error:
            _log.error("kvcanary: %s: what is kept could not be frozen: %s", self._path, error)
            folder = ""
        self._drop_the_oldest()
        self._write_keyframe()  # last: it takes long, and needs room on a disk that may be full
        return folder

    def _is_due(self) -> bool:
        settings = self._settings
        large = 0 < settings.segment_bytes <= self.file.size_bytes - self._overhead
        return self._has_events and (large or 0 < settings.segment_ns <= time.monotonic_ns() - self._begun)

    def _cut(self, note: str) -> None:
        """Finish the segment and begin the next, which wants a keyframe; killed in between, one of the two is torn."""
        end = TraceEvent(kind="segment", time_ns=self.last_ns, scalars={"status": SEGMENT_CONTINUES, "note": note})
        batch, old = encode_events([end], self._events, self._schema), self.file
        metadata = batch_metadata(batch, self._events, self._engine_events)
        self._events += 1
        self._number += 1
        new = self._open(self._path, self._header)
        try:
            old.write(batch, metadata)
            old.close()
        except BaseException:
            new.abandon()
            raise
        self._written_before += old.size_bytes
        self._batches_before += old.batches
        self._kept.append(segment_path(self._path, self._number - 1))
        self.file = new

    def _write_keyframe(self) -> None:
        """Write what a replay would hold; a fault leaves a keyframe without an end, which no reader believes."""
        try:
            for events in self._keyframe_batches():
                self._put(events)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  # the engine's recording must go on
            self._forget(error)
        self._overhead = self.file.size_bytes
        self._begun = time.monotonic_ns()  # a keyframe takes seconds, which are no part of the segment's age

    def _keyframe_batches(self) -> Iterator[list[TraceEvent]]:
        from ..state.keyframe import forget_old_requests, keyframe_events

        forget_old_requests(self._recorded)
        small: list[TraceEvent] = []  # of which many go into one batch
        held = 0
        for event in keyframe_events(self._recorded, time_ns=self.last_ns):
            small.append(event)
            held += event.nbytes
            if held >= 4 << 20:
                yield small
                small, held = [], 0
        yield small

    def _append(self, events: Sequence[AnyEvent], engine_events: int) -> TraceBatch:
        batch = super()._append(events, engine_events)
        self._has_events = True
        try:
            for view in batch:
                self._recorded.apply(view)
                time.sleep(0)  # a batch takes long: the engine's threads get the interpreter in between
        except Exception as error:  # noqa: BLE001  # a fault of the state costs knowledge, never events
            self._forget(error)
        return batch

    def _forget(self, error: Exception) -> None:
        if not self._state_failed:
            what = "keyframes know nothing of what came so far (said once)"
            _log.error("kvcanary: %s: %s: %s", self._path, what, error, exc_info=error)
        self._state_failed = True
        self._recorded.forget()

    def _drop_the_oldest(self) -> None:
        settings = self._settings
        while len(self._kept) > 1 and (
            (settings.keep_segments and len(self._kept) > settings.keep_segments)
            or (settings.keep_bytes and sum(_size_and_time(path)[0] for path in self._kept) > settings.keep_bytes)
        ):
            try:
                self._kept.popleft().unlink(missing_ok=True)
            except OSError as error:
                if not self._delete_failed:
                    _log.error("kvcanary: %s: an old segment cannot be deleted: %s (said once)", self._path, error)
                self._delete_failed = True


def keep_aside(recording: Path, files: Iterable[Path]) -> Path:
    """Give files of a recording a second name in a new folder beside it; return the folder. Raises `OSError`."""
    folder = _frozen_folder(recording)
    for path in files:
        try:
            _second_name(path, folder / path.name)
        except FileNotFoundError:  # somebody tidied up: what is left is kept all the same
            _log.error("kvcanary: %s: is gone, and so in no frozen folder", path)
    return folder


def _frozen_folder(recording: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for count in range(1000):
        again = f"-{count}" if count else ""
        folder = recording.with_name(f"{base_name(recording)}.frozen-{stamp}{again}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder
    raise OSError(f"{folder}: exists, and so do 999 more of that name")


def _second_name(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # a file system without hard links
        shutil.copy2(path, target)


def drop_the_past(folder: Path, most_bytes: int) -> list[Path]:
    """Delete segments of recordings that are over, oldest first, until all segments of the folder fit `most_bytes`.
    Those of recordings that are being written count, and stay; so do frozen folders, traces of one file, and files of
    other programs that are called as segments are, which do not count. What cannot be deleted is logged and stays.

    A recording whose newest segment is locked is being written, also in another container; where the file system knows no
    locks, every one is taken for that, and nothing is deleted.
    """
    recordings: dict[str, dict[Path, int]] = {}  # each one's segments with their numbers; -1 is its tail
    listed = {*folder.glob("*.arrow")}
    for path in listed:
        found = split_segment_name(path)
        if found is not None and _is_ours(path):
            recordings.setdefault(found[0], {})[path] = found[1]
    over: list[tuple[int, int, int, Path]] = []
    total = 0
    for name, segments in recordings.items():
        tails = [path for path in tail_paths(next(iter(segments))) if path.is_file() and not path.is_symlink()]
        # Two, since the newest has no lock yet at the moment in which it is begun.
        newest = sorted(segments, key=segments.__getitem__)[-2:]
        live = _begins(newest) or any(is_being_written(path, unknown=True) for path in newest)
        # A writer that went on to a new one meanwhile holds no lock on those that were listed.
        live = live or not listed.issuperset(segments_of(folder / f"{name}.arrow"))
        for path, number in (segments | dict.fromkeys(tails, -1)).items():
            size, time_ns = _size_and_time(path)
            total += size
            if not live:
                over.append((time_ns, number, size, path))
    deleted = []
    for _, _, size, path in sorted(over):
        if total <= most_bytes:
            break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.error("kvcanary: %s: a segment of an earlier recording cannot be deleted: %s", path, error.strerror)
            continue
        total -= size
        deleted.append(path)
    if deleted:
        _log.info("kvcanary: %s: %d segments of earlier recordings deleted", folder, len(deleted))
    return deleted


def _is_ours(path: Path) -> bool:
    """Say whether a file is a segment of a trace: others, too, have shards of Arrow files with a number in the name."""
    beginning = b""
    with contextlib.suppress(OSError), regular_file(path) as descriptor:
        beginning = os.read(descriptor, _BEGINNING_BYTES)
    return beginning.startswith(FILE_START) and HEADER_KEY in beginning


def _begins(newest: list[Path]) -> bool:
    """Say whether a recording has its first segment only, so lately that it may not be locked yet."""
    return len(newest) == 1 and time.time_ns() - _size_and_time(newest[0])[1] < _BEGINNING_NS


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
