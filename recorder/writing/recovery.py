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
from ..remote import as_path
from ..trace.batch import CUT, TraceBatch
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
    source, target = as_path(source), Path(target)
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
        result = RecoveryResult(source=source, target=target)
        partial = partial_path(target)
        compression = reader.header.capture.compression
        compression = compression if compression in COMPRESSIONS else "lz4"
        file = TraceFile(partial, reader.schema, compression=compression, named=target)
        try:
            _copy(reader, file, result)
            file.close()
            partial.replace(target)
        except BaseException as error:
            file.abandon()
            with contextlib.suppress(OSError):
                partial.unlink()
            if isinstance(error, OSError):
                raise TraceError(f"{target}: cannot be written: {error.strerror or error}") from None
            raise
    return result


def _copy(reader: TraceReader, file: TraceFile, result: RecoveryResult) -> None:
    number, time_ns = reader.header.first_event, reader.header.created_ns
    for item in reader.stream():
        if isinstance(item, TraceBatch):
            batch = item.record_batch
            if item.first_event != number:
                numbers = pa.array(np.arange(number, number + item.num_events, dtype=np.int64))
                index = batch.schema.get_field_index("event")
                batch = batch.set_column(index, batch.schema.field(index), numbers)
            file.write(batch, batch_metadata(batch, number, item.engine_events))
            result.kept_batches += 1
            result.kept_events += item.num_events
            time_ns = int(item.scalar_ints("time_ns")[-1])
        else:
            lost = item.missing_events
            result.num_gaps += 1
            if len(result.causes) < MAX_CAUSES:
                result.causes.append(item.cause)
            if lost == 0 and item.ends != CUT:
                continue
            result.known_lost_events += lost or 0
            unknown = lost is None or result.lost_events is None
            result.lost_events = None if unknown else result.known_lost_events
            note = f"recovered: {item.cause}"
            event = loss_event(lost_events=-1 if lost is None else lost, note=note, time_ns=time_ns)
            if item.ends == CUT:
                event.scalars["status"] = CUT
            batch = encode_events([event], number, reader.schema)
            file.write(batch, batch_metadata(batch, number))
        number += batch.num_rows
