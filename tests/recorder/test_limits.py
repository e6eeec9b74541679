"""What a trace may ask of its reader: each limit holds, and the page that lists them says what the code says."""

import importlib
import re
from pathlib import Path

import pyarrow as pa
import pytest
from kvcanary.recorder.cli.folder_inspection import _missing
from kvcanary.recorder.errors import UnreadableTraceError
from kvcanary.recorder.trace import framing, schema, walk
from kvcanary.recorder.trace.header import EngineInfo, PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceGap, TraceReader

from .documented_engine import run_requests, toy_engine

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "limits.md").read_text()
PLACES = (
    *("recorder.trace.schema", "replayer.report.violations", "replayer.report.merged.merging"),
    *("analysis.incidents.sites", "analysis.store.session", "analysis.store.sources"),
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
    with pytest.raises(UnreadableTraceError, match=r"engine.name has 65,537 characters, expected at most 65,536"):
        TraceHeader.from_json(long)
    fits = header(engine=EngineInfo(name="x" * schema.MAX_TEXT_CHARS)).to_json()
    assert len(TraceHeader.from_json(fits).engine.name) == schema.MAX_TEXT_CHARS
    many = header(notes=("x" * schema.MAX_TEXT_CHARS,) * 130).to_json()
    with pytest.raises(UnreadableTraceError, match=r"bytes, expected at most 8,388,608"):
        TraceHeader.from_json(many)


def test_segments_of_any_number_take_no_memory():
    assert _missing([0, 10**12]) == list(range(1, schema.MAX_MISSING_SEGMENTS + 1))
    assert _missing([7, 3, 4, 9]) == [5, 6, 8]
    assert _missing([]) == []


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
