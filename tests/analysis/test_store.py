"""report.duckdb: the same answers as the files give, for any DuckDB client, and never a stale one."""

import json
import os
import shutil
import stat
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from kvcanary.analysis import build_store, open_report, open_traces
from kvcanary.analysis.errors import AnalysisError, SqlError
from kvcanary.analysis.store.library import BASE, DERIVED
from kvcanary.analysis.store.session import open_sources
from kvcanary.analysis.store.sources import named_in, reports_named
from kvcanary.analysis.store.store import fresh_store
from kvcanary.cli import main
from kvcanary.recorder.writing.recovery import recover
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.commands import run
from ..support.page_reports import source_of
from ..support.places import DATA

pytestmark = pytest.mark.one_in(5)  # make fuzz goes through all

RELATIONS = [*BASE, *(name for folder, name in DERIVED if folder == "views")]
MACRO_CALLS = [
    "slot_history(608)",
    "slot_owner(608, 18)",
    "lifetimes_between(600, 610)",
    "request_timeline('long')",
    "neighbours(608)",
    "first_bad_forward()",
    "blast_radius()",
    "block_table('long', 18)",
    "table_diff('long', 16, 18)",
    "readers(608, 0, 100)",
    "freed_by(608)",
]


def content(table):
    return sorted(str(row) for row in table.to_pylist())


@pytest.mark.parametrize("name", ["kv_flip_sliding", "token_swap"])
def test_a_store_answers_as_the_files_do(report, name):
    folder = report(name)
    with open_report(folder) as session:
        assert not session.stored
        live = {query: session.sql(f"from {query}") for query in [*RELATIONS, *MACRO_CALLS]}
    store = build_store(source_of(folder))
    with open_report(folder) as session:
        assert session.stored
        for query, expected in live.items():
            assert content(session.sql(f"from {query}")) == content(expected), query
    assert live["tokens"].num_rows and live["violations"].num_rows
    with duckdb.connect(str(store), read_only=True) as stock:  # nothing of ours
        for query, expected in live.items():
            assert len(stock.execute(f"from {query}").fetchall()) == expected.num_rows, query
        comments = dict(stock.execute("select table_name, comment from duckdb_tables()").fetchall())
        assert comments["tokens"].startswith("One row a token written")


def test_a_store_needs_neither_trace_nor_report_files(report, tmp_path):
    folder = report("table_swap")
    build_store(source_of(folder))
    (tmp_path / "table_swap.arrow").unlink()
    (folder / "violations.parquet").unlink()
    with open_report(folder) as session:
        assert session.stored
        assert session.sql("from first_bad_forward()")["forward"].to_pylist() == [18]


def test_only_its_owner_reads_it_and_nothing_else_is_left(report):
    folder = report("table_swap")
    before = os.umask(0)
    try:
        store = build_store(source_of(folder))
    finally:
        os.umask(before)
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == [
        "findings.parquet",
        "report.duckdb",
        "summary.json",
        "violations.parquet",
    ]


@pytest.mark.parametrize("what", ["summary", "trace", "garbage", "version"])
def test_a_stale_store_is_not_used(report, tmp_path, what, monkeypatch):
    folder = report("table_swap")
    source = source_of(folder)
    store = build_store(source)
    assert fresh_store(source) == store
    if what == "garbage":
        store.write_bytes(b"no database")
    elif what == "version":
        monkeypatch.setattr("kvcanary.analysis.store.store.library_hash", lambda: "another")
    else:
        path = folder / "summary.json" if what == "summary" else tmp_path / "table_swap.arrow"
        os.utime(path, ns=(1, 1))
    assert fresh_store(source) is None
    with open_report(folder) as session:
        assert not session.stored
        assert session.sql("select count(*) as n from tokens")["n"].to_pylist() == [451]


@pytest.mark.parametrize("name", ['it\'s a "b"', "sternchen*[1]?", "kanário 鳥"])
def test_any_path(report, tmp_path, name):
    first = report("table_swap")
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(tmp_path / "table_swap.arrow", folder / f"{name}.arrow")
    shutil.copytree(first, folder / f"{name}.report")
    with open_traces(folder / f"{name}.arrow") as session:
        assert session.sql("select distinct trace from tokens")["trace"].to_pylist() == [name]
        assert session.sql("select count(*) as n from violations")["n"].to_pylist() == [36]
    source = source_of(folder / f"{name}.report")
    build_store(source)
    with open_sources([source]) as session:
        assert session.stored
        assert session.sql("select distinct trace from violations")["trace"].to_pylist() == [name]


def test_a_name_that_is_not_utf8(report, tmp_path):
    report("table_swap")
    target = os.fsencode(tmp_path / "x") + b"\xff.arrow"
    shutil.copy(os.fsencode(tmp_path / "table_swap.arrow"), target)
    with open_traces(os.fsdecode(target)) as session:
        assert session.sql("select count(*) as n from tokens")["n"].to_pylist() == [451]
        assert session.sql("select trace from traces")["trace"].to_pylist() == ["x\\udcff"]


def test_several_at_once(report, tmp_path, engines):
    folders = [report("table_swap"), report("token_swap")]
    query = "select trace, (select count(*) from tokens t where t.trace = traces.trace) as tokens, (select sum(num_forwards)::bigint from violations v where v.trace = traces.trace) as found from traces order by trace"
    expected = [
        {"trace": "table_swap", "tokens": 451, "found": 36},
        {"trace": "token_swap", "tokens": 451, "found": 136},
    ]
    with open_traces(*folders) as session:
        assert session.sql(query).to_pylist() == expected
    for folder in folders:
        build_store(source_of(folder))
    with open_traces(*folders) as session:
        assert session.stored
        assert session.sql(query).to_pylist() == expected
        assert session.sql("from first_bad_forward()").num_rows == 2
        assert session.sql("from slot_history(608)").num_rows > 2
    with open_traces(*folders, engines["sliding"][0]) as session:  # one without a store: all from their files
        assert not session.stored
        assert session.sql(query).to_pylist()[1:] == expected
    with open_traces(folders[0], tmp_path / "table_swap.arrow") as session:  # a report and its trace are one
        assert session.sql("select trace from traces").num_rows == 1


def test_equal_names_are_told_apart(report, tmp_path):
    report("table_swap")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(tmp_path / "table_swap.arrow", tmp_path / folder / "same.arrow")
    with open_traces(tmp_path / "a" / "same.arrow", tmp_path / "b" / "same.arrow") as session:
        assert sorted(session.sql("select trace from traces")["trace"].to_pylist()) == ["a/same", "b/same"]


def test_a_report_of_another_trace_does_not_go_with_it(report, tmp_path, engines):
    folder = report("table_swap")
    shutil.copy(engines["paged"][0], tmp_path / "table_swap.arrow")
    with open_traces(tmp_path / "table_swap.arrow") as session:
        assert session.sql("from violations").num_rows == 0
    source = source_of(folder)
    assert source.trace is None
    assert "another trace" in source.problem
    with open_report(folder) as session:  # what the report itself knows is there
        assert session.sql("from violations").num_rows == 36
        assert session.sql("select present from lost")["present"].to_pylist() == [False]


def test_a_moved_trace(report, tmp_path):
    folder = report("table_swap")
    away = tmp_path / "away"
    away.mkdir()
    (tmp_path / "table_swap.arrow").rename(away / "renamed.arrow")
    with pytest.raises(AnalysisError, match="--trace"):
        build_store(source_of(folder))
    with open_report(folder, trace=away / "renamed.arrow") as session:
        assert session.sql("from tokens").num_rows == 451
    with pytest.raises(AnalysisError, match="no such file"):
        open_report(folder, trace=away / "nothing.arrow")


def test_a_torn_trace_says_what_is_missing(tmp_path, engines):
    whole = engines["paged"][0].read_bytes()
    torn = tmp_path / "torn.arrow"
    torn.write_bytes(whole[: len(whole) * 2 // 3])
    recovered = tmp_path / "recovered.arrow"
    recover(torn, recovered)
    with open_traces(torn) as session:
        lost = session.sql("from lost").to_pylist()[0]
        gaps = session.sql("select kind, missing_events from gaps").to_pylist()
        tokens = session.sql("select count(*) as n from tokens")["n"][0].as_py()
    assert (lost["complete"], lost["gaps"], lost["losses"], lost["lost_events"]) == (False, 1, 0, 0)
    assert gaps == [{"kind": "torn", "missing_events": None}]
    with open_traces(recovered) as session:
        assert session.sql("select count(*) as n from tokens")["n"][0].as_py() == tokens


def test_a_damaged_batch_is_left_out(tmp_path):
    from kvcanary.recorder.writing.writer import TraceWriter

    from ..support.hand_made import EVENTS, HEADER

    path = tmp_path / "damaged.arrow"
    with TraceWriter(path, HEADER, compression="none") as writer:
        for item in EVENTS[:7]:
            writer.append(item)
        writer.flush()
        for item in EVENTS[7:]:
            writer.append(item)
    data = bytearray(path.read_bytes())
    at = data.rindex((200).to_bytes(8, "little"))  # the token of the last forward
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with open_traces(path) as session:
        assert session.sql("select max(forward) as f from tokens")["f"].to_pylist() == [1]
        gap = session.sql("from gaps").to_pylist()[0]
        assert (gap["kind"], gap["after_event"]) == ("damaged", 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nothing", "no such file or folder"),
        (lambda folder: folder, "no report: it has no summary.json"),
    ],
)
def test_wrong_sources(tmp_path, make, message):
    with pytest.raises(AnalysisError, match=message):
        open_traces(make(tmp_path))


def test_wrong_files(tmp_path, report):
    (tmp_path / "x.arrow").write_text("hello")
    with pytest.raises(AnalysisError, match="not a kvcanary trace"):
        open_traces(tmp_path / "x.arrow")
    folder = report("table_swap")
    violations = pq.read_table(folder / "violations.parquet")
    at = violations.schema.get_field_index("event")
    texts = violations.set_column(at, "event", violations["event"].cast(pa.utf8()))
    pq.write_table(texts, folder / "violations.parquet")
    with pytest.raises(AnalysisError, match=r"violations.parquet: expected numbers in event, came VARCHAR"):
        open_report(folder)
    pq.write_table(violations, folder / "violations.parquet")
    (folder / "findings.parquet").unlink()
    with pytest.raises(AnalysisError, match=r"findings.parquet: missing.*replay the trace again"):
        open_report(folder)
    (folder / "findings.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(AnalysisError, match="cannot be opened"):
        open_report(folder)
    (folder / "summary.json").write_text("[]")
    with pytest.raises(AnalysisError, match="not a summary"):
        open_report(folder)


@pytest.mark.parametrize("stored", [False, True])
def test_every_relation_is_a_lazy_frame(report, stored):
    folder = report("table_swap")
    if stored:
        with open_report(folder) as session:
            build_store(session.sources[0])
    with open_report(folder) as session:
        assert session.stored == stored
        names = sorted(set(dir(session)) & set(session.relations()))
        assert {"violations", "forwards", "damage", "slot_writes"} <= set(names)
        for name in names:
            expected = session.sql(f"from {name}")
            frame = getattr(session, name).lazy()
            assert frame.collect_schema().names() == expected.column_names
            assert frame.select(expected.column_names[0]).collect().height == expected.num_rows
        bad, every = session.violations.lazy(), session.forwards.lazy()
        both = bad.filter(slot=608).join(every, on="forward").collect()  # two queries at once
        assert set(both["request"]) == {"long"}
        assert session.lazy("from slot_history(608)").collect().height == 3
        with pytest.raises(AttributeError, match="no relation 'violation'"):
            session.violation  # noqa: B018
        with pytest.raises(SqlError):
            session.lazy("from nonsense").collect()


def test_answers_as_arrow_and_polars(report):
    with open_report(report("table_swap")) as session:
        frame = session.polars("select mode, count(*) as n from forwards group by mode order by mode")
        assert dict(frame.rows()) == {row["mode"]: row["n"] for row in session.sql(
            "select mode, count(*) as n from forwards group by mode").to_pylist()}  # fmt: skip
        assert sum(frame["n"]) == 57
        assert session.sql("set variable x = 1").num_rows == 0
        assert session.sql("select 1 as a; select 2 as b").to_pylist() == [{"b": 2}]
        assert sum(batch.num_rows for batch in session.batches("from tokens")) == 451
        with pytest.raises(SqlError, match="nonsense"):
            session.sql("select nonsense from tokens")
        assert session.sql("select count(*) as n from raw_events")["n"].to_pylist() == [116]


def test_one_report_opens_while_another_is_made(report):
    """A store is replaced as a whole: who has the old one open goes on reading it."""
    folder = report("table_swap")
    source = source_of(folder)
    build_store(source)
    with open_report(folder) as session:
        build_store(source)
        assert session.sql("select count(*) as n from tokens")["n"].to_pylist() == [451]


def test_a_replay_after_the_store_is_seen(report, tmp_path):
    folder = report("table_swap")
    build_store(source_of(folder))
    replay(tmp_path / "table_swap.arrow", settings=ReplaySettings(kv_hash="none", max_violations=1), report=folder)
    with open_report(folder) as session:
        assert not session.stored
    assert Path(folder / "report.duckdb").exists()


@pytest.mark.parametrize("name", ["violations", "findings"])
@pytest.mark.parametrize("command", ["triage", "page", "sql", "incidents", "expand"])
def test_a_column_that_is_missing_or_text_is_told(report, name, command):
    folder = report("free_too_early")
    path = folder / f"{name}.parquet"
    whole = pq.read_table(path)
    arguments = [command, str(folder), *(["from damage"] if command == "sql" else [])]
    read_by = {"violations": whole.column_names, "findings": [] if command == "expand" else ["slot", "group", "event"]}
    for column in {"forward", "group", "slot", "event"} & {*read_by[name]}:
        at = whole.column_names.index(column)
        text = whole.set_column(at, column, pa.array(["it's no number"] * whole.num_rows))
        for spoilt, said in ((whole.drop_columns([column]), "missing"), (text, "expected numbers in")):
            pq.write_table(spoilt, path)
            done = CliRunner().invoke(main, arguments, catch_exceptions=False)
            assert done.exit_code == 2
            assert said in done.stderr
            assert "replay the trace again" in done.stderr


def test_a_report_from_before_rows_were_merged_is_answered_from(report):
    folder = report("kv_flip")
    path = folder / "violations.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["first_forward", "last_forward", "num_forwards"]), path)
    with open_report(folder) as session:
        [row] = session.sql("select forward, first_forward, last_forward, num_forwards from violations").to_pylist()
    assert {*row.values()} == {row["forward"], 1}


def test_a_torn_trace_beside_its_report_is_what_is_told(report, tmp_path):
    folder = report("table_swap")
    trace = tmp_path / "other.arrow"
    (tmp_path / "table_swap.arrow").rename(trace)
    folder = folder.rename(tmp_path / "other.report")
    trace.write_bytes(trace.read_bytes()[:100])
    assert "other.arrow: torn within its header" in source_of(folder).problem


def test_a_folder_stands_for_its_reports_and_traces_alike(report, tmp_path):
    folder, other = report("table_swap"), report("kv_flip")
    elsewhere = tmp_path / "elsewhere.report"
    shutil.copytree(other, elsewhere)
    clean = tmp_path / "never_replayed.arrow"
    shutil.copy(DATA / "clean_llama.arrow", clean)
    assert named_in(tmp_path) == [other, clean, folder, elsewhere]
    assert reports_named(tmp_path) == [other, folder, elsewhere]
    assert reports_named(folder) == reports_named(folder.with_suffix(".arrow")) == [folder]
    done = run("incidents", tmp_path, "--json")
    assert [one["report"] for one in json.loads(done.stdout)] == [str(one) for one in (other, folder, elsewhere)]
    assert json.loads(run("incidents", folder.with_suffix(".arrow"), "--json").stdout)["report"] == str(folder)
    done = run("incidents", clean)
    assert (done.returncode, "run kvcanary-replay" in done.stderr) == (2, True)


def test_a_report_stands_for_its_trace_where_traces_are_asked_for(report, tmp_path):
    folder = report("table_swap")
    trace = folder.with_suffix(".arrow")
    found = json.loads(run("inspect", folder, "--json").stdout)
    assert [one["name"] for one in found["recordings"]] == [str(trace)]
    assert run("replay", "--quiet", "--no-report", folder).returncode == 1
    assert run("diff", "-q", folder, trace).returncode == 0
    trace.unlink()
    assert "holds no .arrow file" in run("inspect", folder).stderr
