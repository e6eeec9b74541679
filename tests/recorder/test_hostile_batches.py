"""Batches that lie: numbers, offsets, nulls, sizes and metadata that do not hold end in a gap, never in a crash."""

import struct

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from kvcanary.recorder.trace.checksum import batch_crc32c, column_forms
from kvcanary.recorder.trace.event import batch_metadata, encode_events, header_schema
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.trace.schema import trace_schema


def craft(path, schema, batches, compression=None):
    """Write batches, each with its metadata, as a whole Arrow file."""
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer,
    ):
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)
    return path


def good_batch(traces, schema, first=0, count=2):
    batch = encode_events([traces.event(n) for n in range(first, first + count)], first, trace_schema())
    return batch.replace_schema_metadata(schema.metadata)


def test_numbers_that_do_not_follow(traces):
    schema = header_schema(traces.header())
    path = traces.folder / "x.arrow"
    parts = [(first, good_batch(traces, schema, first)) for first in (0, 2, 2, 6, 4)]
    craft(path, schema, [(batch, batch_metadata(batch, first)) for first, batch in parts])
    with TraceReader(path) as reader:
        items = list(reader.stream())
    kinds = [getattr(item, "kind", "batch") for item in items]
    assert kinds == ["batch", "batch", "numbering", "numbering", "batch", "numbering"]
    assert "begins with event 2, expected 4: its 2 events are given twice" in items[2].reason
    assert (items[3].missing_events, items[3].after_event) == (2, 3) and "events 4-5 left out" in items[3].reason
    assert items[5].missing_events == 0


@pytest.mark.parametrize("numbers", [[0, 2], [1, 0], [1, 2], [0, 0], [-1, 0]])
def test_event_numbers_that_contradict_the_batch(traces, numbers):
    """The column is what other Arrow readers see, so it must agree with the metadata, CRC or not."""
    schema = header_schema(traces.header())
    bad = replaced(good_batch(traces, schema), "event", pa.array(numbers, pa.int64()))
    path = traces.folder / "x.arrow"
    craft(path, schema, [(bad, batch_metadata(bad, 0))])
    batches, gaps, _ = traces.read(path)
    assert not batches
    assert "event numbers that do not follow one another" in gaps[0].reason


def test_a_batch_without_rows(traces):
    schema = header_schema(traces.header())
    full, empty = good_batch(traces, schema), good_batch(traces, schema, count=0)
    path = traces.folder / "x.arrow"
    for compression in (None, "lz4"):
        craft(path, schema, [(empty, batch_metadata(empty, 0)), (full, batch_metadata(full, 0))], compression)
        batches, gaps, _ = traces.read(path)
        assert [batch.num_events for batch in batches] == [2]
        assert [gap.missing_events for gap in gaps] == [0] and "holds no events" in gaps[0].reason


def replaced(batch, name, column):
    """A batch with one column exchanged, without Arrow's own checks; pa.record_batch checks lengths only."""
    index = batch.schema.get_field_index(name)
    columns = [*batch.columns[:index], column, *batch.columns[index + 1 :]]
    return pa.record_batch(columns, schema=batch.schema)


@pytest.mark.parametrize("offsets", [[0, 6, 3], [0, 3, 9], [-1, 1, 2], [6, 3, 0], [0, 2**31 - 1, 2**31 - 1], [0, 0, 0]])
@pytest.mark.parametrize("name", ["input_ids", "kv_bytes", "note"])
def test_offsets_that_run_backwards_or_away(traces, offsets, name):
    path = traces.write(batches=(2, 1), compression="none")
    with TraceReader(path) as reader:
        frame = traces.first_frame(path)
        column = reader.schema.get_field_index(name)
        number = sum(form.num_buffers for form in column_forms(reader.schema)[:column]) + 1
        at = frame.body_start + int(frame.buffers[number, 0])
    bad = np.array(offsets, "<i8" if name == "kv_bytes" else "<i4").tobytes()
    data = bytearray(path.read_bytes())
    assert frame.buffers[number, 1] >= len(bad)
    data[at : at + len(bad)] = bad
    path.write_bytes(data)
    batches, gaps, _ = traces.read(path)
    assert [batch.first_event for batch in batches] == [2]
    assert [(gap.kind, gap.missing_events) for gap in gaps] == [("damaged", 2)]
    assert "batch 0 " in gaps[0].reason and "events 0-1 left out" in gaps[0].reason


def test_nulls(traces):
    schema = header_schema(traces.header())
    good = good_batch(traces, schema)
    path = traces.folder / "x.arrow"
    item = pa.array([1, None], pa.int64())
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), item, type=schema.field("input_ids").type)
    for name, column in {"forward": item, "note": pa.array(["a", None]), "input_ids": nested}.items():
        bad = replaced(good, name, column)
        metadata = {**batch_metadata(good, 0)}
        metadata[b"kvcanary.crc32c"] = str(batch_crc32c(bad, 0, column_forms(schema))).encode()
        craft(path, schema, [(bad, metadata)])
        batches, gaps, _ = traces.read(path)
        assert not batches
        assert "batch 0 " in gaps[0].reason and gaps[0].missing_events is None


@pytest.mark.parametrize("claim", [1 << 40, (1 << 63) - 1, -2, -(1 << 63)])
def test_a_compressed_buffer_that_claims_terabytes(traces, claim):
    path = traces.write(batches=(2, 1))
    frame = traces.first_frame(path)
    at = frame.body_start + next(int(offset) for offset, length in frame.buffers if length > 8)
    data = bytearray(path.read_bytes())
    data[at : at + 8] = struct.pack("<q", claim)
    path.write_bytes(data)
    batches, gaps, _ = traces.read(path)
    assert [batch.first_event for batch in batches] == [2]
    assert "claims an impossible size" in gaps[0].reason and gaps[0].missing_events == 2


@pytest.mark.parametrize("error", [MemoryError("2 TB"), OSError("disk"), pa.ArrowInvalid("bad")])
def test_what_arrow_raises_becomes_a_gap(traces, monkeypatch, error):
    path = traces.write(batches=(2, 1))
    read = pa.ipc.open_stream
    calls = []

    def fail(message, options):
        calls.append(message)
        if len(calls) == 1:
            raise error
        return read(message, options=options)

    monkeypatch.setattr(pa.ipc, "open_stream", fail)
    batches, gaps, _ = traces.read(path)
    assert [batch.first_event for batch in batches] == [2]
    assert str(error) in gaps[0].reason and gaps[0].missing_events == 2


@pytest.mark.parametrize(
    "change",
    [
        {b"kvcanary.crc32c": b"1"},
        {b"kvcanary.first_event": b"1"},
        {b"kvcanary.num_events": b"3"},
        {b"kvcanary.first_event": b"-1"},
        {b"kvcanary.crc32c": b"9" * 5000},
        {b"kvcanary.first_event": None},
    ],
)
def test_batch_metadata_that_lies(traces, change):
    schema = header_schema(traces.header())
    batch = good_batch(traces, schema)
    metadata = {k: v for k, v in {**batch_metadata(batch, 0), **change}.items() if v is not None}
    craft(traces.folder / "x.arrow", schema, [(batch, metadata)])
    batches, gaps, _ = traces.read(traces.folder / "x.arrow")
    assert not batches and [gap.kind for gap in gaps] == ["damaged"]
