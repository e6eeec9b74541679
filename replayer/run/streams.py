"""A recording's files as one stream of batches and gaps, one file open at a time, a few where bytes are left in them; and reading ahead
of what is replayed.
"""

import _thread
import dataclasses
import os
import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Final, Generic, TypeVar, cast

from ...recorder.errors import TraceError, UnreadableTraceError
from ...recorder.trace.batch import TraceBatch, TraceGap
from ...recorder.trace.files import split_segment_name
from ...recorder.trace.framing import Frame
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import TraceReader

Item = TypeVar("Item")
# More would hold up what is done meanwhile: they take Python's lock and memory's speed from it.
_CHECKERS: Final = max(1, min(4, (os.cpu_count() or 1) - 1))
_MOST_OPEN: Final = 16  # files of which bytes are left


class Checks:
    """The CRCs of batches whose KV bytes nobody has read yet, looked at in threads while the rest is used.

    Files that have such batches stay open behind their stream, `_MOST_OPEN` of them: who leaves bytes there asks for the `oldest` that is
    one too many, reads what it needs of it, and calls `close`. `reader` is the file that is streamed.
    """

    def __init__(self) -> None:
        self.reader: TraceReader | None = None
        self._open: list[TraceReader] = []
        self._threads = ThreadPoolExecutor(_CHECKERS, thread_name_prefix="check")
        self._found: dict[TraceReader, list[Future[bool]]] = {}

    def __enter__(self) -> "Checks":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for reader in self._open:
            reader.close()

    @contextmanager
    def keeping(self, reader: TraceReader) -> Iterator[None]:
        """Stream a file of which batches are to be checked; it stays open if there were any."""
        self.reader = reader
        self._open.append(reader)
        try:
            yield
        finally:
            if reader in self._open and reader not in self._found:
                self.close(reader)

    def check(self, frame: Frame) -> None:
        """Begin to check a batch of the file that is streamed."""
        reader = self.reader
        assert reader is not None
        self._found.setdefault(reader, []).append(self._threads.submit(reader.check, frame))

    def oldest(self) -> TraceReader | None:
        """Return the file that is to be closed next, None if not too many are open."""
        return self._open[0] if len(self._open) > _MOST_OPEN else None

    def close(self, reader: TraceReader) -> None:
        """Close a file once it is checked."""
        wait(self._found.get(reader, ()))
        self._open.remove(reader)
        reader.close()

    def hold(self) -> bool:
        """Wait, and say whether all hold; what could not be checked does not."""
        futures = [one for found in self._found.values() for one in found]
        return all(one.exception() is None and one.result() for one in futures)


class SegmentStream:
    """Reads a recording's segments in their order; a trace of one file is one of them.

    `header` is the first readable file's; `complete` says, once all was read, that every file had its end; `bytes_done` of
    `size_bytes` are read. Raises `TraceError` if no file can be read, or two are of different recordings.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.complete = True
        self._left = list(paths)
        self._last: int | None = None  # the number of the segment read last, and how it ended
        self._expected = 0
        self._continues = True
        self.bytes_done = 0
        self.size_bytes = sum(file_size(path) for path in paths)
        self.numbers: list[int] = []
        error: TraceError | None = None
        for path in paths:
            try:
                with TraceReader(path) as reader:
                    self.header: TraceHeader = reader.header
                    self._expected = reader.header.first_event
                    return
            except TraceError as found:
                error = error or found
        raise error or TraceError("no trace given")

    def extend(self, paths: Sequence[Path]) -> None:
        """Add the segments that follow; once all before them are read, `stream` gives what they hold."""
        self.paths += tuple(paths)
        self._left += paths
        self.size_bytes += sum(file_size(path) for path in paths)

    def stream(self) -> Generator[TraceBatch | TraceGap, None, None]:
        """Yield every whole batch, and a gap wherever something is missing, in a file or between two."""
        return cast("Generator[TraceBatch | TraceGap, None, None]", self._items(TraceReader.stream))

    def stream_without_bytes(self, checks: Checks) -> Generator[TraceBatch | TraceGap, None, None]:
        """Do what `stream` does, and leave KV bytes of forwards in their files where they are many; `checks` has them checked."""

        def sparse(reader: TraceReader) -> Iterator[TraceBatch | TraceGap]:
            return reader.stream_without_bytes(checks.check)

        return cast("Generator[TraceBatch | TraceGap, None, None]", self._items(sparse, checks.keeping))

    def follow(self) -> Generator[TraceBatch | TraceGap | None, None, None]:
        """Do what `stream` does with files that are being written; None says that nothing more is there yet."""
        return self._items(TraceReader.follow)

    def _items(
        self,
        read: Callable[[TraceReader], Iterator[TraceBatch | TraceGap | None]],
        keeping: Callable[[TraceReader], AbstractContextManager[object]] = closing,
    ) -> Generator[TraceBatch | TraceGap | None, None, None]:
        while self._left:
            path = self._left.pop(0)
            try:
                reader = TraceReader(path)
            except UnreadableTraceError as error:
                if len(self.paths) == 1:
                    raise
                self.complete = self._continues = False
                named = split_segment_name(path)
                if self._last is not None and named is not None and named[1] == self._last + 1:
                    self._last, self._continues = named[1], True  # reported here, so not again at the segment behind it
                yield TraceGap(after_event=self._expected - 1, missing_events=None, kind="damaged", cause=str(error))
                continue
            with keeping(reader):
                header = reader.header
                if described(header) != described(self.header):
                    raise TraceError(f"{path}: is of another recording than {self.paths[0]}; replay them apart")
                number = header.segment.number if header.segment is not None else 0
                if self._last is not None:
                    yield from _between(path, self._last, number, self._expected, header.first_event, self._continues)
                self.numbers.append(number)
                self._last, self._continues, self._expected = number, False, header.first_event
                for item in read(reader):
                    if isinstance(item, TraceBatch):
                        self._expected = item.first_event + item.num_events
                        self._continues = item.kinds[-1] == "segment"
                    yield item
                self.complete &= reader.complete
                self.bytes_done += reader.size_bytes


def _between(
    path: Path, last: int, number: int, expected: int, first_event: int, continues: bool
) -> Iterator[TraceGap]:
    if number == last + 1 and (continues or first_event == expected):
        return
    cause = "the segment before it has no end"
    if number != last + 1:
        cause = f"segments {last + 1} to {number - 1} before it are missing"
        if number == last + 2:
            cause = f"segment {last + 1} before it is missing"
    missing = first_event - expected if first_event > expected else None
    cause = f"{path.name}: {cause}"
    yield TraceGap(after_event=expected - 1, missing_events=missing, kind="numbering", cause=cause)


def file_size(path: Path) -> int:
    """Return a file's bytes, 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:  # a flight recorder deletes while we read
        return 0


def described(header: TraceHeader) -> TraceHeader:
    """Return what the segments of a recording have in common."""
    return dataclasses.replace(header, segment=None)


class ReadAhead(Generic[Item]):
    """An iterator over a generator in a thread of its own: one item is here, one lies ready, one is being made.

    What the generator raises is raised here. `close` ends both, after Ctrl-C too: wherever that struck, nobody waits for
    somebody who cannot be woken. `queue.Queue` and `threading.Thread` do not promise that, since they are made of several
    steps; locks and the simple queue are of one.
    """

    def __init__(self, source: Generator[Item, None, None]) -> None:
        self._source = source
        self._ready: queue.SimpleQueue[tuple[Item | None, BaseException | None]] = queue.SimpleQueue()
        self._full = _thread.allocate_lock()  # held while an item lies ready
        self._owned = _thread.allocate_lock()  # whoever gets it closes the source
        self._done = _thread.allocate_lock()  # held until the source is closed
        self._done.acquire()
        self._begun = self._closing = self._ended = False

    def __iter__(self) -> "ReadAhead[Item]":
        return self

    def __next__(self) -> Item:
        if self._ended:
            raise StopIteration
        if not self._begun:
            self._begun = True
            _thread.start_new_thread(self._read, ())
        item, error = self._ready.get()
        if item is None:
            self._ended = True
            if error is not None:
                raise error
            raise StopIteration
        self._make_room()
        return item

    def close(self) -> None:
        """Close the source; nothing comes any more."""
        self._closing = self._ended = True
        if self._owned.acquire(blocking=False):
            self._close_source(None)
            return
        while not self._done.acquire(timeout=0.01):
            self._make_room()
        self._done.release()

    def _make_room(self) -> None:
        with suppress(RuntimeError):  # there is room
            self._full.release()

    def _read(self) -> None:
        if not self._owned.acquire(blocking=False):
            return
        error: BaseException | None = None
        try:
            for item in self._source:
                self._full.acquire()
                if self._closing:
                    break
                self._ready.put((item, None))
                del item  # what is replayed must not be held here
        except BaseException as raised:  # noqa: BLE001  # whatever it is, it belongs to whoever asks for the next item
            error = raised
        finally:
            self._close_source(error)

    def _close_source(self, error: BaseException | None) -> None:
        try:
            self._source.close()
        finally:
            self._ready.put((None, error))
            self._done.release()
