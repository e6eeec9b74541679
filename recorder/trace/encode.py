"""Events to record batches: columns are filled from whole arrays, never token by token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .checksum import batch_crc32c, column_forms, text_crc32c
from .event import TraceEvent
from .header import TraceHeader
from .schema import (
    CRC_KEY,
    ENGINE_EVENTS_KEY,
    FIRST_EVENT_KEY,
    HEADER_CRC_KEY,
    HEADER_KEY,
    NUM_EVENTS_KEY,
    SCALARS,
    trace_schema,
)


def header_schema(header: TraceHeader, schema: pa.Schema | None = None) -> pa.Schema:
    """Return the trace schema (or `schema`) with the header and its CRC in the metadata."""
    text = header.to_json().encode("ascii")
    return (schema or trace_schema()).with_metadata({HEADER_KEY: text, HEADER_CRC_KEY: b"%d" % text_crc32c(text)})


def encode_events(events: Sequence[TraceEvent], first_event: int, schema: pa.Schema) -> pa.RecordBatch:
    """Return one record batch of `events`, numbered from `first_event`; every event must have passed `problem()`.

    A file's own schema may have more columns, of a newer minor version, or fewer, of an older one.
    """
    count = len(events)
    scalars: dict[str, Any] = {
        name: np.full(count, default, np.int64) if pa.types.is_int64(kind) else [default] * count
        for name, (kind, default) in SCALARS.items()
    }
    scalars["event"] = np.arange(first_event, first_event + count, dtype=np.int64)
    lengths: dict[str, npt.NDArray[np.int64]] = {}
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    for row, event in enumerate(events):
        scalars["kind"][row] = event.kind
        scalars["time_ns"][row] = event.time_ns
        for name, value in event.scalars.items():
            scalars[name][row] = value
        for lists in (event.ints, event.bytes):
            for name, array in lists.items():
                if name not in parts:
                    parts[name] = []
                    lengths[name] = np.zeros(count, np.int64)
                parts[name].append(array)
                lengths[name][row] = len(array)
    columns = []
    for field in schema:
        if pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
            columns.append(_list_array(field, lengths.get(field.name), parts.get(field.name), count))
        elif pa.types.is_string(field.type):
            columns.append(_text_array(scalars.get(field.name, [""] * count)))
        else:
            columns.append(pa.array(scalars.get(field.name, np.zeros(count, np.int64)), field.type))
    return pa.record_batch(columns, schema=schema)


def batch_metadata(batch: pa.RecordBatch, first_event: int, engine_events: int | None = None) -> dict[bytes, bytes]:
    """Return the custom metadata of a batch: first event number, event count and CRC, as decimal ASCII.

    `engine_events` is how many of the engine's events are in the recording up to this batch's end, from which the reader
    knows where its tail begins. Raises `ValueError` for a column type that no trace of this major version has.
    """
    known = {} if engine_events is None else {ENGINE_EVENTS_KEY: b"%d" % engine_events}
    return {
        FIRST_EVENT_KEY: b"%d" % first_event,
        NUM_EVENTS_KEY: b"%d" % batch.num_rows,
        CRC_KEY: b"%d" % batch_crc32c(batch, first_event, column_forms(batch.schema)),
        **known,
    }


def _text_array(values: list[str]) -> pa.Array:
    try:
        return pa.array(values, pa.utf8())
    except UnicodeEncodeError:  # lone surrogates, say from a request id that was decoded with surrogateescape
        return pa.array([value.encode("utf-8", "replace").decode("utf-8") for value in values], pa.utf8())


def _list_array(
    field: pa.Field, lengths: npt.NDArray[np.int64] | None, parts: list[npt.NDArray[Any]] | None, count: int
) -> pa.Array:
    offsets = np.zeros(count + 1, np.int64)
    if lengths is None or parts is None:
        values = pa.array([], field.type.value_type)
    else:
        np.cumsum(lengths, out=offsets[1:])
        values = pa.array(np.concatenate(parts))
    if pa.types.is_large_list(field.type):
        return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=field.type)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"column {field.name} would hold {offsets[-1]} values in one batch, expected less than 2^31")
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, type=field.type)
