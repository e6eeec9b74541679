"""Recovery: what is whole in a torn or damaged trace goes to a new one, and the rest becomes loss events."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from ..errors import TraceError
from ..files import partial_path
from ..process.settings import COMPRESSIONS
from ..trace.batch import CUT, TraceBatch, TraceGap
from ..trace.event import batch_metadata, encode_events, loss_event
from ..trace.reader import TraceReader
from .trace_file import TraceFile

MAX_CAUSES: Final = 100


@dataclass(slots=True, kw_only=True)
class RecoveryResult:
    """What a recovery kept, without the loss events that it added, and lost. `lost_events` is None when nobody can know
    how many are gone (at least `known_lost_events`). `causes` are the gaps' causes, the first `MAX_CAUSES` of
    `num_gaps`.
    """

    source: Path
    target: Path
    kept_batches: int = 0
    kept_events: int = 0
    known_lost_events: int = 0
    lost_events: int | None = 0
    num_gaps: int = 0
    causes: list[str] = field(default_factory=list)


def recover(source: str | Path, target: str | Path, *, overwrite: bool = False) -> RecoveryResult:
    """Write every whole batch of `source` to `target`, with a footer and a loss event wherever events are missing.
    Events behind a gap are numbered anew, so that the new trace is whole; their `forward` numbers stay. Raises
    `UnreadableTraceError` when no header can be read, `TraceError` when `target` cannot be written, exists already
    (without `overwrite`) or is the source itself.
    """
    source, target = Path(source), Path(target)
    with TraceReader(source) as reader:
        if reader.being_written:
            advice = "replay it as far as it is, or stop the engine"
            raise TraceError(f"{source}: is being recorded, nothing of it is torn; {advice}")
        if target.exists() or target.is_symlink():
            if target.exists() and source.samefile(target):
                raise TraceError(f"{target}: is the trace to recover itself; name another file")
            if not overwrite:
                raise TraceError(f"{target}: cannot be written: it exists; pass --force or choose another name")
            if target.exists() and not target.is_file():
                raise TraceError(f"{target}: cannot be written: it is not a regular file; name another file")
        partial = partial_path(target)
        compression = reader.header.capture.compression
        compression = compression if compression in COMPRESSIONS else "lz4"
        file = TraceFile(partial, reader.schema, compression=compression, named=target)
        copy = _Copy(reader, file, RecoveryResult(source=source, target=target))
        try:
            for item in reader.stream():
                if isinstance(item, TraceGap):
                    copy.record_loss(item)
                else:
                    copy.keep(item)
            file.close()
            partial.replace(target)
        except BaseException as error:
            file.abandon()
            with contextlib.suppress(OSError):
                partial.unlink()
            if isinstance(error, OSError):
                raise TraceError(f"{target}: cannot be written: {error.strerror or error}") from None
            raise
    return copy.result


class _Copy:
    def __init__(self, reader: TraceReader, file: TraceFile, result: RecoveryResult) -> None:
        self._reader = reader
        self._file = file
        self.result = result
        self._next = reader.header.first_event
        self._time_ns = reader.header.created_ns

    def keep(self, item: TraceBatch) -> None:
        batch = item.record_batch
        if item.first_event != self._next:
            numbers = pa.array(np.arange(self._next, self._next + item.num_events, dtype=np.int64))
            index = batch.schema.get_field_index("event")
            batch = batch.set_column(index, batch.schema.field(index), numbers)
        self._write(batch, item.engine_events)
        self.result.kept_batches += 1
        self.result.kept_events += item.num_events
        self._time_ns = int(item.scalar_ints("time_ns")[-1])

    def record_loss(self, gap: TraceGap) -> None:
        result = self.result
        result.num_gaps += 1
        if len(result.causes) < MAX_CAUSES:
            result.causes.append(gap.cause)
        if gap.missing_events == 0 and gap.ends != CUT:
            return
        result.known_lost_events += gap.missing_events or 0
        unknown = gap.missing_events is None or result.lost_events is None
        result.lost_events = None if unknown else result.known_lost_events
        lost = -1 if gap.missing_events is None else gap.missing_events
        event = loss_event(lost_events=lost, note=f"recovered: {gap.cause}", time_ns=self._time_ns)
        if gap.ends == CUT:
            event.scalars["status"] = CUT
        self._write(encode_events([event], self._next, self._reader.schema))

    def _write(self, batch: pa.RecordBatch, engine_events: int | None = None) -> None:
        self._file.write(batch, batch_metadata(batch, self._next, engine_events))
        self._next += batch.num_rows
