"""What a trace may ask of its reader: each limit holds, and the page that lists them says what the code says."""

import importlib
import os
import re
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from kvcanary.kernels import sparse
from kvcanary.recorder.capture.engine_events import MAX_NAME
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.cli.folder_inspection import missing_segments
from kvcanary.recorder.errors import UnreadableTraceError
from kvcanary.recorder.state import events
from kvcanary.recorder.trace import framing, schema, walk
from kvcanary.recorder.trace.event import batch_metadata
from kvcanary.recorder.trace.header import EngineInfo, PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceGap, TraceReader, read_trace
from kvcanary.recorder.trace.trace_bytes import TraceBytes

from ..support.engines.documented_engine import run_requests, toy_engine

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "limits.md").read_text()
HOLE = (64 << 30) + 8 * 12_345
PLACES = (
    *("recorder.trace.schema", "replayer.report.violations", "replayer.report.merged.merging"),
    *("analysis.incidents.places", "analysis.store.session", "analysis.store.sources"),
)


@pytest.mark.parametrize(("name", "value"), re.findall(r"^\| `([A-Z_]+)` \| (\d+GB|[\d,]+)", PAGE, re.MULTILINE))
def test_the_page_says_what_the_code_says(name, value):
    found = [
        getattr(module, name)
        for module in (importlib.import_module(f"kvcanary.{place}") for place in PLACES)
        if hasattr(module, name)
    ]
    assert found
    assert {str(one) for one in found} == {value.replace(",", "")}


def test_every_limit_stands_on_the_page():
    for name in vars(schema):
        if name.startswith("MAX_"):
            assert f"| `{name}` |" in PAGE


def header(**values):
    return TraceHeader(groups=(PoolGroup(name="full", num_slots=8),), tables=(StateTable(rows=2, width=8),), **values)


def test_a_header_of_many_megabytes_is_refused():
    long = header(engine=EngineInfo(name="x" * (schema.MAX_TEXT_CHARS + 1))).to_json()
    with pytest.raises(UnreadableTraceError, match=r"length <= 65536 - at `\$\.engine\.name`"):
        TraceHeader.from_json(long)
    fits = header(engine=EngineInfo(name="x" * schema.MAX_TEXT_CHARS)).to_json()
    assert len(TraceHeader.from_json(fits).engine.name) == schema.MAX_TEXT_CHARS
    many = header(notes=("x" * schema.MAX_TEXT_CHARS,) * 130).to_json()
    with pytest.raises(UnreadableTraceError, match=r"bytes, expected at most 8,388,608"):
        TraceHeader.from_json(many)


def test_segments_of_any_number_take_no_memory():
    assert missing_segments([0, 10**12]) == list(range(1, schema.MAX_MISSING_SEGMENTS + 1))
    assert missing_segments([7, 3, 4, 9]) == [5, 6, 8]
    assert missing_segments([]) == []


def trace(path, compression="zstd"):
    engine = toy_engine(path, compression=compression)
    run_requests(engine)
    engine.recorder.close()
    return path


def test_a_batch_that_would_be_much_larger_than_the_file_is_left_out(tmp_path, monkeypatch):
    path = trace(tmp_path / "trace.arrow")
    monkeypatch.setattr(framing, "MAX_FREE_BATCH_BYTES", 100)
    monkeypatch.setattr(framing, "MAX_BATCH_RATIO", 300)
    with TraceReader(path) as reader:
        assert not [item for item in reader.stream() if isinstance(item, TraceGap)]
    monkeypatch.setattr(framing, "MAX_BATCH_RATIO", 0)
    with TraceReader(path) as reader:
        gaps = [item for item in reader.stream() if isinstance(item, TraceGap)]
    assert gaps
    assert "bytes of the" in gaps[0].cause


def test_a_search_behind_damage_ends(tmp_path, monkeypatch):
    path = trace(tmp_path / "trace.arrow", compression="none")
    data = bytearray(path.read_bytes())
    with pa.ipc.open_file(path) as file:
        assert file.num_record_batches == 1
    at = data.rindex(b"kvcanary.crc32c")
    data[at] ^= 1  # every copy fails
    message = data.index(b"\xff\xff\xff\xff", 8 + 16)
    body = bytes(data[message:]) + bytes(-len(data[message:]) % 8)
    path.write_bytes(bytes(data[:message]) + body * 4)
    monkeypatch.setattr(walk, "MAX_SEARCHED", 0)
    with TraceReader(path) as reader:
        gaps = [item for item in reader.stream() if isinstance(item, TraceGap)]
    assert any("was given up" in gap.cause for gap in gaps)


def test_a_columns_name_that_is_no_text_is_one_clear_error(tmp_path):
    path = trace(tmp_path / "trace.arrow")
    path.write_bytes(path.read_bytes().replace(b"time_ns", b"time_\xfes"))
    with pytest.raises(UnreadableTraceError, match="column"):
        TraceReader(path)


@pytest.fixture
def taken(monkeypatch):
    """The sizes of the buffers that a reader makes."""
    sizes, allocate = [], pa.allocate_buffer
    monkeypatch.setattr(pa, "allocate_buffer", lambda size: sizes.append(size) or allocate(size))
    return sizes


def test_a_hole_that_a_batch_claims_takes_no_memory(tmp_path, taken):
    """64 GiB of zeros take nothing on a disk."""
    path = trace(tmp_path / "trace.arrow", compression="none")
    data, size = path.read_bytes(), path.stat().st_size
    source = TraceBytes(os.open(path, os.O_RDONLY))
    frame = next(frame for frame in framing.find_frames(source, 8, size) if frame.kind == framing.RECORD_BATCH)
    source.close()
    claim = struct.pack("<q", frame.end - frame.body_start)
    head = bytes(frame.head).replace(claim, struct.pack("<q", HOLE))
    assert head != frame.head
    path.write_bytes(data[: frame.start] + head + data[frame.body_start : frame.end])
    os.truncate(path, frame.body_start + HOLE)
    with TraceReader(path) as reader:
        gaps = [item for item in reader.stream() if isinstance(item, TraceGap)]
    assert [gap.kind for gap in gaps] == ["damaged"]
    assert "most of them a hole" in gaps[0].cause
    assert max(taken) < schema.MAX_FREE_BATCH_BYTES


def test_a_footer_in_a_hole_takes_no_memory(tmp_path, taken):
    path = trace(tmp_path / "trace.arrow")
    with path.open("r+b") as file:
        file.truncate(64 << 30)
        file.seek(0, os.SEEK_END)
        file.write(struct.pack("<i", (1 << 31) - 1) + framing.MAGIC)
    with TraceReader(path) as reader:
        assert not reader.complete
        assert [item.num_events for item in reader.stream() if not isinstance(item, TraceGap)]
    assert max(taken) < schema.MAX_FREE_BATCH_BYTES


def test_a_batch_with_more_metadata_than_columns_need_is_left_out(tmp_path):
    path = trace(tmp_path / "trace.arrow")
    with TraceReader(path) as reader:
        (batch,) = reader.stream()
        records, header = batch.record_batch, reader.schema
    for room, gaps in ((60_000, 0), (0, 1)):
        metadata = batch_metadata(records, 0) | {b"x": bytes(schema.MAX_BATCH_METADATA_BYTES - room)}
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, header) as writer:
            writer.write_batch(records, custom_metadata=metadata)
        with TraceReader(path) as reader:
            found = list(reader.stream())
        assert [isinstance(item, TraceGap) for item in found] == [bool(gaps)]
        assert not gaps or "damaged metadata" in found[0].cause


def test_an_event_that_names_more_slots_than_there_is_memory_for_is_one_clear_error(tmp_path, monkeypatch):
    columns = [np.array([0]), np.array([1]), np.array([sparse.MANY_SLOTS])]
    events.require_inside(columns, [sparse.MANY_SLOTS + 1])
    monkeypatch.setattr(sparse, "free_memory_bytes", lambda: sparse.MANY_SLOTS * sparse.NAMED_SLOT_BYTES - 1)
    with pytest.raises(
        MemoryError, match=r"an event names 1048576 slots, for which 0\.1 GiB are needed; 0\.1 are free"
    ):
        events.require_inside(columns, [sparse.MANY_SLOTS + 1])
    two = [np.array([0, 1]), np.array([1, 1]), np.array([sparse.MANY_SLOTS // 2] * 2)]
    with pytest.raises(MemoryError, match="an event names 1048576 slots"):
        events.require_inside(two, [sparse.MANY_SLOTS] * 2)


def test_a_name_of_as_many_characters_as_may_be_is_kept_and_one_of_more_is_cut(tmp_path: Path) -> None:
    with Recorder(tmp_path / "t.arrow", header()) as recorder:
        for number, length in enumerate((MAX_NAME - 1, MAX_NAME, MAX_NAME + 1)):
            recorder.request(request_id=number + 1, name="n" * length)
    names = [str(view.scalar("name")) for view in read_trace(tmp_path / "t.arrow") if view.kind == "request"]
    assert names == ["n" * (MAX_NAME - 1), "n" * MAX_NAME, "n" * (MAX_NAME - 1) + "…"]
