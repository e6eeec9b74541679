"""A session as Python code meets it: errors under way, one query after another."""

import pytest
from kvcanary.analysis import open_traces
from kvcanary.analysis.errors import AnalysisError, SqlError
from kvcanary.analysis.store import session as session_module

from ..support.hand_made import write

LATE = "select case when range = 350000 then error('too late') else range end as a from range(400000)"


@pytest.fixture
def session(tmp_path):
    with open_traces(write(tmp_path / "trace.arrow")) as opened:
        yield opened


def test_what_fails_under_way_is_an_sql_error_with_duckdbs_message(session):
    for ask in (session.sql, session.polars):
        with pytest.raises(SqlError, match="too late"):
            ask(LATE)
    read = 0
    with pytest.raises(SqlError, match="too late"):
        for batch in session.batches(LATE):
            read += batch.num_rows
    assert read < 350_000
    assert session.sql("select 1 as a").to_pylist() == [{"a": 1}]


def test_the_next_query_closes_a_stream_that_is_not_read_to_its_end(session):
    stream = session.batches("from range(400000)")
    assert stream.read_next_batch().num_rows
    assert session.sql("select 1 as a").to_pylist() == [{"a": 1}]
    with pytest.raises(SqlError, match="closed"):
        stream.read_all()


def test_a_stream_is_read_to_its_end(session):
    assert sum(batch.num_rows for batch in session.batches("from range(400001)")) == 400_001
    assert session.sql("from range(400001)").num_rows == 400_001
    assert session.sql("select 1 as a where false").num_rows == 0


def test_no_trace_at_all_is_told():
    with pytest.raises(AnalysisError, match="name at least one trace"):
        open_traces()


def test_ctrl_c_while_duckdb_asks_for_a_relation_is_no_damaged_file(tmp_path, monkeypatch):
    """DuckDB makes an error of its own of it."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    def make_raw_relations(connection, *_):
        connection.create_function("interrupted", interrupted)
        connection.execute("select interrupted()")

    monkeypatch.setattr(session_module, "make_raw_relations", make_raw_relations)
    with pytest.raises(KeyboardInterrupt):
        open_traces(write(tmp_path / "trace.arrow"))


def test_a_trace_that_was_changed_since_it_was_checked_is_asked_no_more(tmp_path):
    """What DuckDB scans has no CRC: it must be what the reader checked."""
    path = write(tmp_path / "trace.arrow")
    with open_traces(path) as session:
        count = session.sql("select count(*) as n from events")["n"].to_pylist()
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(len(data) // 2)
            file.write(b"x")
        with pytest.raises(SqlError, match="changed since it was opened"):
            session.sql("select count(*) as n from events")
    path.write_bytes(data)
    path.chmod(0o666)
    with open_traces(path) as session:  # a copy of what another user may write to
        path.write_bytes(bytes(len(data)))
        assert session.sql("select count(*) as n from events")["n"].to_pylist() == count
