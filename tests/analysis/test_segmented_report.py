"""A report on a recording in segments is asked like one on a single file."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.analysis import open_report
from kvcanary.analysis.errors import AnalysisError
from kvcanary.analysis.store.library import BASE
from kvcanary.cli import main

from ..support.raw_traces import cut

DATA = Path(__file__).parents[2] / "data" / "simulated" / "mla_free_too_early.arrow"
OF_THE_FILE = ("trace", "path", "trace_id", "created_ns", "time_ns", "detail", "evidence", "sentence")


def run(*words, code=0):
    done = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False, prog_name="kvcanary")
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One file's report, the report on the same in segments, and the segments."""
    folder = tmp_path_factory.mktemp("reports")
    (folder / "trace.arrow").write_bytes(DATA.read_bytes())
    (folder / "cut").mkdir()
    segments = cut(DATA, folder / "cut" / "trace.arrow", seed=1)
    for path in (folder / "trace.arrow", folder / "cut"):
        run("replay", "--quiet", path, code=1)
    return folder / "trace.report", folder / "cut" / "trace.report", segments


def rows(session, name):
    table = session.sql(f"from {name}" + (" where kind not in ('keyframe', 'segment')" if name == "events" else ""))
    kept = [column for column in table.column_names if "event" not in column and column not in OF_THE_FILE]
    return sorted(map(repr, table.select(kept).to_pylist()))  # a keyframe's events shift the numbers of those behind


@pytest.mark.long
def test_every_relation_is_the_same(reports):
    whole, cut_report, segments = reports
    assert len(segments) > 3
    with open_report(whole) as one, open_report(cut_report) as other:
        for name in BASE:
            assert rows(one, name) == rows(other, name), name
        assert one.sql("from tokens").num_rows == 1528


def test_triage_says_the_same(reports):
    whole, cut_report, _ = reports
    one, other = (run("triage", report).replace(str(report), "REPORT") for report in (whole, cut_report))
    assert one == other
    assert "nothing: the trace is whole" in other


def test_a_segment_that_is_gone_is_no_trace(reports, tmp_path):
    _, report, segments = reports
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in segments:
        (moved / path.name).write_bytes(path.read_bytes())
    with open_report(report, trace=moved) as session:
        assert session.sources[0].files == tuple(moved / path.name for path in segments)
    (moved / segments[2].name).unlink()
    with pytest.raises(AnalysisError, match="segment 2 is missing"):
        open_report(report, trace=moved / segments[0].name)
