"""Reports as they come: empty, with findings only, of unknown faults, damaged, and of real engines."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kvcanary.analysis import open_report
from kvcanary.analysis.errors import AnalysisError
from kvcanary.analysis.incidents.finding import find_incidents, incidents_fit, read_incidents, write_incidents
from kvcanary.analysis.store.sources import find_sources
from kvcanary.replayer.report.findings import ADDED_COLUMNS, FINDING_SCHEMA, Finding, finding_table
from kvcanary.replayer.report.violations import VIOLATION_SCHEMA
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from ...support.page_reports import HOSTILE, hostile_report
from ...support.places import DATA


def finding(kind, **fields):
    known = {"event": 5, "forward": 3, "time_ns": 7, "runner": 0, "group": 0, "request_id": 11, "request": "eleven"}
    known |= {"req_pool_idx": 2, "position": 9, "slot": 40, "detail": "says so", "count": 1, "evidence": "[5]"}
    return Finding(kind=kind, **{**known, **fields})


@pytest.fixture
def report(tmp_path):
    """Makes a report by hand."""

    def make(findings=(), violations=None):
        pq.write_table(finding_table(list(findings)), tmp_path / "findings.parquet")
        pq.write_table(violations or VIOLATION_SCHEMA.empty_table(), tmp_path / "violations.parquet")
        return tmp_path

    return make


def test_an_empty_report_has_no_incident(report):
    folder = report()
    found = find_incidents(folder, [])
    assert found.rows == []
    write_incidents(folder, found)
    assert read_incidents(folder) == []


def test_findings_only(report):
    folder = report([finding("slot_leaked", position=-1), finding("slot_leaked", event=9, position=-1)])
    [row] = find_incidents(folder, []).rows
    assert (row["kind"], row["violations"], row["findings"]) == ("page_leaked", 0, 2)
    assert row["requests"] == ["eleven"]
    assert row["slots"] == [{"pool_group": 0, "start": 40, "count": 1}]


def test_a_report_is_read_through_no_python_file(report, monkeypatch):
    # Of such a file pyarrow's threads let go a moment later, which aborts a process that is ending.
    opened, read = [], pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda source: opened.append(source) or read(source))
    find_incidents(report([finding("double_free")]), [])
    assert opened and all(isinstance(file, pa.NativeFile) and not isinstance(file, pa.PythonFile) for file in opened)


def test_what_no_rule_knows_is_unknown_and_told(report):
    folder = report([finding("launch_missing", slot=-1, position=-1, request_id=-1, request="", detail="none ran")])
    [row] = find_incidents(folder, []).rows
    assert (row["kind"], row["confidence"]) == ("unknown", "low")
    assert "rule" not in row["sentence"]
    assert "Launch missing in forward 3" in row["sentence"]


def test_a_kind_of_a_newer_version_is_unknown(report):
    folder = report([finding("slot_sings")])
    [row] = find_incidents(folder, []).rows
    assert (row["kind"], row["seen_by"]) == ("unknown", ["slot_sings"])


def test_more_clusters_than_are_judged(report):
    many = [finding("launch_missing", event=n, slot=8 * n + 1, request_id=n, position=100 * n) for n in range(400)]
    folder = report(many)
    found = find_incidents(folder, [])
    assert sum(row["findings"] for row in found.rows) == 400
    assert {row["kind"] for row in found.rows} == {"unknown"}
    assert len(found.rows) <= 257


def test_hostile_numbers(report):
    big = 2**63 - 1
    rows = [
        finding("slot_leaked", slot=big, position=big, request_id=big, event=big, group=32767),
        finding("read_after_free", slot=-big - 1, position=-big - 1, request_id=-big, event=-big, group=-32768),
        finding("hit_differs", evidence="[" * 4000, detail="\x1b[31m" * 50, request="\x07"),
        finding("slot_freed_twice", evidence='{"a": 1}'),
        finding("write_lost", evidence='["x", true, null, 1e400]', runner=32767),
    ]
    folder = report(rows)
    found = find_incidents(folder, [])
    assert sum(row["findings"] for row in found.rows) == len(rows)
    write_incidents(folder, found)
    assert pq.read_metadata(folder / "incident_members.parquet").num_rows == len(rows)


def test_nulls_stand_for_nothing(report):
    folder = report([finding("slot_leaked")])
    table = pq.read_table(folder / "findings.parquet")
    nulls = pa.table([pa.nulls(table.num_rows, field.type) for field in FINDING_SCHEMA], schema=FINDING_SCHEMA)
    pq.write_table(nulls, folder / "findings.parquet")
    [row] = find_incidents(folder, []).rows
    assert row["kind"] == "unknown"


def test_a_report_from_before_the_causes_opens(report):
    folder = report([finding("slot_leaked"), finding("swa_mapping_stale", event=9, request_id=12, slot=400)])
    table = pq.read_table(folder / "findings.parquet")
    pq.write_table(table.drop_columns(sorted(ADDED_COLUMNS)), folder / "findings.parquet")
    assert "page_leaked" in [row["kind"] for row in find_incidents(folder, []).rows]
    (folder / "summary.json").write_text('{"trace": "gone.arrow", "trace_id": "x", "verdict": "corrupt"}')
    with open_report(folder) as session:
        found = session.sql("select kind, cause, token from findings order by event").to_pylist()
    assert found == [{"kind": kind, "cause": None, "token": None} for kind in ("slot_leaked", "swa_mapping_stale")]


@pytest.mark.parametrize("name", ["violations", "findings"])
def test_a_file_that_is_missing_torn_or_something_else(report, name):
    folder = report([finding("slot_leaked")])
    path = folder / f"{name}.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AnalysisError, match=rf"{name}\.parquet: no Parquet file of a report .*replay the trace again"):
        find_incidents(folder, [])
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(AnalysisError, match=r"expected the columns of a report, .*event.* missing"):
        find_incidents(folder, [])
    path.unlink()
    with pytest.raises(AnalysisError, match="missing; the report is incomplete"):
        find_incidents(folder, [])


def test_incidents_of_another_replay_do_not_count(report):
    folder = report([finding("slot_leaked")])
    write_incidents(folder, find_incidents(folder, []))
    assert incidents_fit(folder)
    pq.write_table(
        finding_table([finding("slot_leaked"), finding("read_after_free", event=6)]), folder / "findings.parquet"
    )
    assert not incidents_fit(folder)
    assert read_incidents(folder) is None
    (folder / "incidents.parquet").write_bytes(b"PAR1")
    assert read_incidents(folder) is None


REAL = {
    "free_too_early": ["free_too_early"],
    "kv_flip": ["kv_changed"],
    "kv_flip_sliding": ["kv_changed"],
    "position_plus_one": ["position_off"],
    "table_swap": ["req_to_token"],
    "token_swap": ["next_token_swap"],
    "sglang/kv_used_eagle_h200": ["kv_changed"],
    "sglang/req_to_token_h200": ["req_to_token"],
}


@pytest.mark.parametrize("name", REAL)
def test_traces_of_real_engines(tmp_path, name):
    trace = DATA / f"{name}.arrow"
    summary = replay(trace, settings=ReplaySettings(), report=tmp_path)
    rows = find_incidents(tmp_path, [trace]).rows
    assert [row["kind"] for row in rows] == REAL[name]
    assert sum(row["violations"] for row in rows) == summary.violations
    assert sum(row["findings"] for row in rows) == summary.findings


def test_evidence_holds_no_name_of_the_report(tmp_path):
    report = hostile_report(tmp_path)
    [source] = find_sources([report])
    found = find_incidents(report, [source.trace])
    write_incidents(report, found)
    assert any(HOSTILE in row["requests"] for row in found.rows)
    with open_report(report, trace=source.trace) as session:
        for row in found.rows:
            for query in row["evidence"]:
                assert HOSTILE[:9] not in query
                session.sql(query)
