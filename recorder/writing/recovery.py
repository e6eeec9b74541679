"""Recovery: what is whole in a torn or damaged trace goes to a new one, and the rest becomes loss events."""

import contextlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from ..errors import TraceError
from ..trace.batch import CUT, TraceBatch, TraceGap
from ..trace.encode import batch_metadata, encode_for
from ..trace.event import loss_event
from ..trace.reader import TraceReader
from .trace_file import COMPRESSIONS, TraceFile

MAX_CAUSES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryResult:
    """What a recovery kept and lost.

    `kept_events` counts without the loss events that were added. `lost_events` is None when nobody can know how many
    are gone (at least `known_lost_events`). `causes` are the gaps' causes, the first `MAX_CAUSES` of `num_gaps`.
    """

    source: Path
    target: Path
    kept_batches: int
    kept_events: int
    known_lost_events: int
    lost_events: int | None
    num_gaps: int
    causes: tuple[str, ...]


def recover(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False
) -> RecoveryResult:
    """Write every whole batch of `source` to `target`, with a footer and a loss event wherever events are missing.

    Events behind a gap are numbered anew, so that the new trace is whole; their `forward` numbers stay. Raises
    `UnreadableTraceError` when no header can be read, `TraceError` when `target` cannot be written, exists already
    (without `overwrite`) or is the source itself.
    """
    source, target = Path(source), Path(target)
    with TraceReader(source) as reader:
        if reader.being_written:
            raise TraceError(
                f"{source}: is being recorded, nothing of it is torn; replay it as far as it is, or stop the engine"
            )
        if target.exists() or target.is_symlink():
            if target.exists() and source.samefile(target):
                raise TraceError(f"{target}: is the trace to recover itself; name another file")
            if not overwrite:
                raise TraceError(f"{target}: cannot be written: it exists; pass --force or choose another name")
            if target.exists() and not target.is_file():
                raise TraceError(f"{target}: cannot be written: it is not a regular file; name another file")
        # A name that nobody has, and short: the target's own may be as long as a name can be.
        partial = target.with_name(f".kvcanary-{uuid.uuid4().hex}.part")
        compression = reader.header.capture.compression
        file = TraceFile(
            partial,
            reader.schema,
            compression=compression if compression in COMPRESSIONS else "lz4",
            named=target,
        )
        copy = _Copy(reader, file)
        try:
            copy.run()
            file.close()
            partial.replace(target)
        except BaseException as error:
            file.abandon()
            with contextlib.suppress(OSError):
                partial.unlink()
            if isinstance(error, OSError):
                raise TraceError(f"{target}: cannot be written: {error.strerror or error}") from None
            raise
    return RecoveryResult(
        source=source,
        target=target,
        kept_batches=copy.kept_batches,
        kept_events=copy.kept_events,
        known_lost_events=copy.lost_events,
        lost_events=None if copy.unknown else copy.lost_events,
        num_gaps=copy.num_gaps,
        causes=tuple(copy.causes),
    )


class _Copy:
    def __init__(self, reader: TraceReader, file: TraceFile) -> None:
        self._reader = reader
        self._file = file
        self._next = reader.header.first_event
        self._time_ns = reader.header.created_ns
        self.kept_batches = 0
        self.kept_events = 0
        self.lost_events = 0
        self.unknown = False
        self.num_gaps = 0
        self.causes: list[str] = []

    def run(self) -> None:
        for item in self._reader.stream():
            if isinstance(item, TraceGap):
                self._tell(item)
            else:
                self._keep(item)

    def _keep(self, item: TraceBatch) -> None:
        batch = item.record_batch
        if item.first_event != self._next:
            numbers = pa.array(np.arange(self._next, self._next + item.num_events, dtype=np.int64))
            index = batch.schema.get_field_index("event")
            batch = batch.set_column(index, batch.schema.field(index), numbers)
        self._write(batch, item.engine_events)
        self.kept_batches += 1
        self.kept_events += item.num_events
        self._time_ns = int(item.scalar_ints("time_ns")[-1])

    def _tell(self, gap: TraceGap) -> None:
        self.num_gaps += 1
        if len(self.causes) < MAX_CAUSES:
            self.causes.append(gap.cause)
        if gap.missing_events == 0 and gap.ends != CUT:
            return
        if gap.missing_events is None:
            self.unknown = True
        else:
            self.lost_events += gap.missing_events
        lost = -1 if gap.missing_events is None else gap.missing_events
        event = loss_event(lost_events=lost, note=f"recovered: {gap.cause}", time_ns=self._time_ns)
        if gap.ends == CUT:
            event.scalars["status"] = CUT
        self._write(encode_for(self._reader.schema, [event], self._next))

    def _write(self, batch: pa.RecordBatch, engine_events: int | None = None) -> None:
        self._file.write(batch, batch_metadata(batch, self._next, engine_events))
        self._next += batch.num_rows
