"""A recording that is one file, behind the same face as one that is cut into segments."""

from pathlib import Path

import pyarrow as pa

from ..trace.batch import TraceBatch
from ..trace.encode import batch_metadata, encode_events, header_schema
from ..trace.event import TraceEvent
from ..trace.header import TraceHeader
from .own_file import hold
from .trace_file import DeletedError, TraceFile


class SingleFile:
    """The file of a recording. Raises `TraceError` when it cannot be made, `OSError` when it cannot be written."""

    def __init__(self, path: Path, header: TraceHeader, *, compression: str, overwrite: bool) -> None:
        self._path = path
        self._schema = header_schema(header)
        self._file = TraceFile(path, self._schema, compression=compression, overwrite=overwrite)
        hold(self._file.descriptor)
        self._events = 0
        self._engine_events = 0
        self._last_ns = header.created_ns

    @property
    def batches(self) -> int:
        """Batches written."""
        return self._file.batches

    @property
    def size_bytes(self) -> int:
        """Bytes written."""
        return self._file.size_bytes

    @property
    def regular(self) -> bool:
        """Whether it is a file, beside which others may lie."""
        return self._file.regular

    @property
    def last_ns(self) -> int:
        """When the last event was told."""
        return self._last_ns

    def write(self, events: list[TraceEvent]) -> None:
        """Append a batch of events."""
        if self._file.deleted:
            raise DeletedError("somebody has deleted the trace")
        self._put(events, self._engine_events + len(events))

    def freeze(self, note: str) -> str:
        """Leave a mark with the note; nothing is ever deleted here. Return the file."""
        self._put([frozen_mark(note, self._last_ns)], self._engine_events)
        return str(self._path)

    def _put(self, events: list[TraceEvent], engine_events: int) -> None:
        write_batch(self._file, self._schema, events, self._events, engine_events)
        self._events += len(events)
        self._engine_events = engine_events
        self._last_ns = max(self._last_ns, events[-1].time_ns)

    def close(self) -> None:
        """Write the file's end."""
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.abandon()


def write_batch(
    file: TraceFile, schema: pa.Schema, events: list[TraceEvent], first_event: int, engine_events: int
) -> TraceBatch:
    """Append events to a file as one batch, and return it; `engine_events` as for `batch_metadata`."""
    batch = encode_events(events, first_event, schema)
    file.write(batch, batch_metadata(batch, first_event, engine_events))
    return TraceBatch(batch, first_event=first_event)


def frozen_mark(note: str, time_ns: int) -> TraceEvent:
    """Return the mark that says that somebody froze the recording here, and why."""
    return TraceEvent(kind="mark", time_ns=time_ns, scalars={"note": f"frozen: {note}" if note else "frozen"})
