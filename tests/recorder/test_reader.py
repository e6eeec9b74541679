"""The reader: what it gives, and every kind of file that is no good trace."""

import dataclasses
import json
import os
import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from kvcanary.recorder.errors import TraceError, UnreadableTraceError, json_text
from kvcanary.recorder.trace.checksum import batch_crc32c, column_forms, text_crc32c
from kvcanary.recorder.trace.event import batch_metadata, encode_events
from kvcanary.recorder.trace.header import ModelInfo, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.trace.schema import ADDED, FORMAT_MINOR, HEADER_CRC_KEY, HEADER_KEY, trace_schema
from kvcanary.recorder.writing.writer import TraceWriter


def craft(path, schema, batches, compression=None):
    """Write batches, each with its metadata, as a whole Arrow file."""
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer,
    ):
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)
    return path


def unreadable(path) -> str:
    with pytest.raises(UnreadableTraceError) as caught:
        TraceReader(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


def test_batch_views(traces):
    path = traces.write(batches=(4,), compression="none")
    (batch,), gaps, complete = traces.read(path)
    assert complete and not gaps
    assert (batch.first_event, batch.num_events, len(batch)) == (0, 4, 4)
    assert batch.offsets("input_ids").tolist() == [0, 3, 6, 9, 12]
    assert batch.offsets("input_ids").dtype == np.int64
    assert batch.values("input_ids").tolist() == [0, 1, 2, 1000, 1001, 1002, 2000, 2001, 2002, 3000, 3001, 3002]
    assert batch.values("kv_bytes").dtype == np.uint8 and len(batch.values("kv_bytes")) == 4 * 48
    assert batch.scalar_ints("forward").tolist() == [0, 1, 2, 3]
    assert batch.strings("mode") == ["extend", "decode", "extend", "decode"]
    assert not batch.values("input_ids").flags.writeable and not batch.values("input_ids").flags.owndata
    view = batch.event(2)
    assert (view.number, view.kind, view.scalar("forward"), view.scalar("mode")) == (2, "forward", 2, "extend")
    assert type(view.scalar("forward")) is int
    assert view.ints("table_slots").shape == (0,)
    with pytest.raises(IndexError):
        batch.event(4)
    with pytest.raises(IndexError):
        batch.event(-1)
    with pytest.raises(KeyError):
        batch.values("nonsense")


def test_to_torch(traces):
    torch = pytest.importorskip("torch")
    for compression in ("none", "lz4"):
        (batch,), _, _ = traces.read(traces.write(batches=(3,), compression=compression))
        for name, dtype in (("input_ids", torch.int64), ("kv_bytes", torch.uint8), ("lut_slots", torch.int64)):
            values, offsets = batch.to_torch(name)
            assert values.dtype == dtype and offsets.dtype == torch.int64
            assert values.tolist() == batch.values(name).tolist()
            assert offsets.tolist() == batch.offsets(name).tolist()


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_batch_is_its_own_copy(traces, compression):
    """What somebody writes into the file behind the check changes nothing that was given."""
    path = traces.write(batches=(3, 2), compression=compression)
    whole = [traces.plain(view) for batch in traces.read(path)[0] for view in batch]
    with TraceReader(path) as reader:
        stream = reader.stream()
        first = next(stream)
        path.write_bytes(b"\xaa" * path.stat().st_size)
        assert first.values("kv_bytes").__array_interface__["data"][0] % 8 == 0
        assert [traces.plain(view) for view in first] == whole[:3]
        (gap,) = stream
    assert gap.kind == "damaged" and gap.missing_events is None
    assert first.values("kv_bytes")[0] == 0, "good after close"


def test_stream_starts_anew(traces):
    with TraceReader(traces.write(batches=(1, 1))) as reader:
        assert [len(list(reader.stream())) for _ in range(2)] == [2, 2]
        assert reader.num_batches_hint == 2


def test_read_events_stops_at_a_gap(traces):
    path = traces.write(batches=(2, 2))
    os.truncate(path, path.stat().st_size - 20)
    events = read_trace(path)
    assert [next(events).number for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(TraceError, match="kvcanary recover"):
        next(events)


FOREIGN = {
    "empty": (b"", "empty, expected a kvcanary trace"),
    "zeros": (bytes(5000), "not a kvcanary trace"),
    "jpeg": (b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(range(256)) * 9, "a JPEG image"),
    "text": (b"hello, world\n" * 99, "not a kvcanary trace"),
    "short": (b"ARR", "torn after 3 bytes"),
    "magic only": (b"ARROW1\0\0", "torn within its header"),
    "magic and text": (b"ARROW1\0\0" + b"text" * 99, "its header is damaged"),
    "gzip": (b"\x1f\x8b" + bytes(99), "gunzip"),
    "huge metadata": (b"ARROW1\0\0" + struct.pack("<Ii", 0xFFFFFFFF, 0x7FFFFFF8) + bytes(99), "header is damaged"),
    "negative metadata": (b"ARROW1\0\0" + struct.pack("<Ii", 0xFFFFFFFF, -8) + bytes(99), "header is damaged"),
    "end mark": (b"ARROW1\0\0" + struct.pack("<Ii", 0xFFFFFFFF, 0) + bytes(99), "no schema"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files(tmp_path, name):
    content, message = FOREIGN[name]
    path = tmp_path / "x.arrow"
    path.write_bytes(content)
    assert message in unreadable(path)


def test_no_file(tmp_path):
    assert "no such file" in unreadable(tmp_path / "nowhere.arrow")
    assert "a folder" in unreadable(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in unreadable(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    assert "cannot be opened" in unreadable(tmp_path / "file" / "x")


def test_permission(traces):
    path = traces.write()
    path.chmod(0)
    if os.geteuid() == 0:  # root reads everything, so ask as somebody else
        traces.folder.chmod(0o755)
        code = f"""
import sys, os
sys.path[:] = {sys.path!r}
from kvcanary.recorder.trace.reader import TraceReader
os.chdir({str(traces.folder)!r}); os.setuid(65534)
try:
    TraceReader({path.name!r})
except Exception as error:
    print(type(error).__name__, error)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.startswith("UnreadableTraceError trace.arrow: may not be read by this user"), done.stderr
    else:
        assert "may not be read by this user" in unreadable(path)


def test_other_arrow_files(tmp_path):
    table = pa.table({"a": [1, 2]})
    path = tmp_path / "x.arrow"
    pa.parquet.write_table(table, path)
    assert "a Parquet file" in unreadable(path)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    assert "no kvcanary.header" in unreadable(path)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    assert "an Arrow stream" in unreadable(path)


def header_with(traces, **changes):
    text = json.dumps({**json.loads(traces.header().to_json()), **changes}).encode()
    return trace_schema().with_metadata({HEADER_KEY: text, HEADER_CRC_KEY: str(text_crc32c(text))})


def good_batch(traces, schema, first=0, count=2):
    batch = encode_events([traces.event(n) for n in range(first, first + count)], first, trace_schema())
    return batch.replace_schema_metadata(schema.metadata)


def test_versions(traces):
    path = traces.folder / "x.arrow"
    craft(path, header_with(traces, format_major=2), [])
    assert f"format 2.{FORMAT_MINOR}, this build reads up to 1.x; install a newer kvcanary" in unreadable(path)
    text = b'{"format_major": 2, "other": "rules"}'
    craft(path, trace_schema().with_metadata({HEADER_KEY: text}), [])
    assert "install a newer kvcanary" in unreadable(path)
    craft(path, header_with(traces, format_minor=FORMAT_MINOR + 1, new_field={"a": 1}), [])
    with TraceReader(path) as reader:
        assert reader.complete and reader.header.format_minor == FORMAT_MINOR + 1


def test_a_newer_minor_may_add_columns(traces):
    path = traces.folder / "x.arrow"
    schema = header_with(traces, format_minor=1)
    extra = {
        "new_list": pa.array([[1.5], []], pa.list_(pa.float32())),
        "new_text": pa.array(["a", ""]),
        "new_int": pa.array([1, 2], pa.uint16()),
    }
    batch = good_batch(traces, schema)
    for name, column in extra.items():
        batch = batch.add_column(3, pa.field(name, column.type), column)
    craft(path, batch.schema, [(batch, batch_metadata(batch, 0))])
    (found,), gaps, complete = traces.read(path)
    assert complete and not gaps
    assert traces.plain(found.event(1)) == traces.expected(traces.event(1), 1)
    batch = batch.append_column("odd", pa.array([None, None]))
    craft(path, batch.schema, [])
    assert "column odd has type null" in unreadable(path)


@pytest.mark.parametrize("name", ["event", "kind", "input_ids", "kv_bytes", "state_start", "state_bytes"])
def test_missing_and_changed_columns(traces, name):
    schema = header_with(traces)
    index = schema.get_field_index(name)
    path = traces.folder / "x.arrow"
    craft(path, schema.remove(index), [])
    assert f"column {name} (" in unreadable(path) and "is missing" in unreadable(path)
    craft(path, schema.set(index, pa.field(name, pa.int32(), nullable=False)), [])
    assert f"column {name} is int32, expected " in unreadable(path)
    craft(path, schema.set(index, schema.field(name).with_nullable(True)), [])
    assert "with nulls" in unreadable(path)
    craft(path, schema.append(schema.field(name)), [])
    assert "there 2 times" in unreadable(path)


@pytest.mark.parametrize("minor", range(FORMAT_MINOR))
def test_a_trace_of_an_older_minor_has_none_of_the_columns_that_came_later(traces, minor):
    path = traces.folder / "x.arrow"
    schema = header_with(traces, format_minor=minor)
    batch = good_batch(traces, schema)
    for name, since in ADDED.items():
        if since > minor:
            batch = batch.drop_columns([name])
    craft(path, batch.schema, [(batch, batch_metadata(batch, 0))])
    (found,), gaps, complete = traces.read(path)
    assert complete and not gaps and found.num_events == batch.num_rows
    assert found.num_events > 0 and max(ADDED.values()) <= FORMAT_MINOR


def test_damaged_header(traces):
    path = traces.folder / "x.arrow"
    text = traces.header().to_json().encode()
    craft(path, trace_schema().with_metadata({HEADER_KEY: text}), [])
    assert "header fails its CRC" in unreadable(path)
    for bad in (b"[" * 100_000, b"\xff\xfe", b"[]", b'{"format_major": "1"}', b'{"format_major": 1}'):
        craft(path, trace_schema().with_metadata({HEADER_KEY: bad, HEADER_CRC_KEY: str(text_crc32c(bad))}), [])
        assert "header" in unreadable(path)


def test_the_crc_does_not_depend_on_slicing(traces):
    events = [traces.event(n, tokens=n) for n in range(6)]
    whole = encode_events(events, 0, trace_schema())
    forms = column_forms(whole.schema)
    for first in range(6):
        part = encode_events(events[first:], first, trace_schema())
        assert batch_crc32c(whole.slice(first), first, forms) == batch_crc32c(part, first, forms)
        assert batch_crc32c(part, first, forms) != batch_crc32c(part, first + 1, forms)


def test_names_that_are_no_text_are_none_in_the_trace_either(traces):
    """A model's path of other bytes than UTF-8; what makes columns of it would fail."""
    header = dataclasses.replace(
        traces.header(), model=ModelInfo(name="/models/caf\udce9", dtype="a \U0001f40d"), notes=("\ud800!",)
    )
    path = traces.folder / "t.arrow"
    with TraceWriter(path, header):
        pass
    with TraceReader(path) as reader:
        found = reader.header
    assert (found.model.name, found.model.dtype, found.notes) == ("/models/caf?", "a \U0001f40d", ("?!",))
    older = json.dumps(dataclasses.asdict(header))
    assert TraceHeader.from_json(older).model.name == "/models/caf?"
    assert json_text({"k": "\ud800", "a": [1.5, None]}, sort_keys=True) == '{"a": [1.5, null], "k": "?"}'
