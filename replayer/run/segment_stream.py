"""The files of one recording as one stream of batches and gaps; one file is open at a time."""

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import cast

from ...recorder.errors import TraceError, UnreadableTraceError
from ...recorder.trace.batch import TraceBatch, TraceGap
from ...recorder.trace.files import split_segment_name
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import TraceReader


class SegmentStream:
    """Reads a recording's segments in their order; a trace of one file is one of them.

    `header` is the first readable file's; `complete` says, once all was read, that every file had its end; `size_bytes` is that
    of all files, `bytes_done` that of the files read so far. Raises `TraceError` if no file can be read, or two are of different
    recordings.
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

    def follow(self) -> Generator[TraceBatch | TraceGap | None, None, None]:
        """Do what `stream` does with files that are being written; None says that nothing more is there yet."""
        return self._items(TraceReader.follow)

    def _items(
        self, read: Callable[[TraceReader], Iterator[TraceBatch | TraceGap | None]]
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
            with reader:
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
    """Say what is missing between segment `last`, whose events end before `expected`, and this one."""
    if number == last + 1 and (continues or first_event == expected):
        return
    if number == last + 1:
        cause = f"{path.name}: the segment before it has no end"
    else:
        named = f"segment {last + 1}" if number == last + 2 else f"segments {last + 1} to {number - 1}"
        cause = f"{path.name}: {named} before it {'is' if number == last + 2 else 'are'} missing"
    missing = first_event - expected
    yield TraceGap(
        after_event=expected - 1,
        missing_events=missing if missing > 0 else None,
        kind="numbering",
        cause=cause,
    )


def file_size(path: Path) -> int:
    """Return a file's bytes, 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:  # a flight recorder deletes while we read
        return 0


def described(header: TraceHeader) -> TraceHeader:
    """Return what the segments of a recording have in common."""
    return dataclasses.replace(header, segment=None)
