"""docs/reference/trace-format.md: every code block runs, and every column, kind and header field is described."""

import dataclasses
import re
from pathlib import Path

import pytest
from kvcanary.recorder.trace.header import CaptureInfo, KvStream, NotWatched, PoolGroup, Runner, TraceHeader
from kvcanary.recorder.trace.schema import BYTE_LISTS, EVENT_KINDS, FORMAT_MAJOR, FORMAT_MINOR, INT_LISTS, SCALARS

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "trace-format.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(traces, capsys, needle, **options):
    (code,) = [block for block in BLOCKS if needle in block]
    path = traces.write(batches=(2, 3), **options)
    names = {"TRACE": str(path)}
    exec(compile(code, "docs/reference/trace-format.md", "exec"), names)
    return names, capsys.readouterr().out


def test_every_block_is_run_below():
    assert len(BLOCKS) == 5


@pytest.mark.parametrize("compression", ["lz4", "none"])
def test_crc_walk(traces, capsys, compression):
    names, _ = run(traces, capsys, "def walk", compression=compression)
    assert names["number"] == 1, "both batches were checked"


def test_pyarrow(traces, capsys):
    names, out = run(traces, capsys, "json.loads")
    assert out == "toy [64]\n"
    assert names["flat"].tolist() == [2000, 2001, 2002, 3000, 3001, 3002, 4000, 4001, 4002]


def test_polars(traces, capsys):
    pytest.importorskip("polars")
    names, _ = run(traces, capsys, "import polars")
    assert names["slots_written"].rows() == [(5, 4), (6, 4), (7, 4)]


def test_duckdb(traces, capsys):
    pytest.importorskip("duckdb")
    names, _ = run(traces, capsys, "import duckdb")
    assert sorted(names["tokens_by_mode"]) == [("decode", 2, 6), ("extend", 3, 9)]


def test_trace_reader(traces, capsys):
    names, out = run(traces, capsys, "TraceReader")
    assert out == "" and names["event"].number == 4


@pytest.mark.parametrize("name", [*SCALARS, *INT_LISTS, *BYTE_LISTS, *EVENT_KINDS])
def test_every_column_and_kind_is_described(name):
    assert re.search(rf"^\|.*`{name}`", TEXT, re.MULTILINE)


@pytest.mark.parametrize("kind", [TraceHeader, PoolGroup, KvStream, CaptureInfo, Runner, NotWatched])
def test_every_header_field_is_described(kind):
    for field in dataclasses.fields(kind):
        assert f"`{field.name}`" in TEXT, field.name


def test_the_version_is_this_one():
    assert TEXT.startswith(f"# The trace format, {FORMAT_MAJOR}.{FORMAT_MINOR}\n")
