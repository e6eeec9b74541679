"""Incidents as a user meets them: after a replay, in the command, in SQL."""

import json
import re
import resource
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from kvcanary.analysis import open_report
from kvcanary.cli import main
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial

from ...support.places import DATA
from ...support.raw_traces import cut


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def replayed(tmp_path):
    """Replays a trace of data/ with the command, without a page."""

    def make(name, *options):
        trace = tmp_path / f"{name}.arrow"
        shutil.copy(DATA / trace.name, trace)
        return run("replay", "--no-page", *options, trace), tmp_path / f"{name}.report"

    return make


def test_a_replay_shows_and_keeps_its_incidents(replayed):
    result, report = replayed("table_swap")
    assert result.exit_code == 1, result.output
    assert "CORRUPT   1 incident, 36 violations, 1 of 8 requests hit" in result.output
    assert "#1  Stale table entry   req_to_token, confidence medium" in result.output
    assert "The table row of request long (row 2) pointed at slot 608" in result.output
    summary = json.loads((report / "summary.json").read_text())
    assert summary["num_incidents"] == 1
    assert [row["kind"] for row in summary["incidents"]] == ["req_to_token"]
    with open_report(report) as session:
        assert session.sql("select kind, violations from incidents").to_pylist() == [
            {"kind": "req_to_token", "violations": 36}
        ]
        assert session.sql("from incident_violations").num_rows == 36
        assert session.sql("from incident_findings").num_rows == 0
        [hit] = session.sql("from incident_requests").to_pylist()
        assert (hit["request"], hit["violations"], hit["findings"]) == ("long", 36, 0)
        [spread] = session.sql("select request, found from blast_radius(1)").to_pylist()
        assert spread == {"request": "long", "found": 36}
        assert session.sql("from blast_radius(2)").num_rows == 0
        assert session.sql("from blast_radius()").num_rows == 1


def test_json_has_them(replayed):
    result, _ = replayed("kv_flip", "--json")
    found = json.loads(result.stdout)
    assert [(row["kind"], row["first_forward"]) for row in found["incidents"]] == [("kv_changed", 20)]


def test_without_a_report_there_are_none(replayed):
    result, report = replayed("kv_flip", "--no-report")
    assert result.exit_code == 1
    assert not report.exists()
    assert "incident" not in result.output.splitlines()[3]
    assert "name what went wrong" in result.output


def test_a_clean_replay_looks_for_nothing_and_loads_no_duckdb(tmp_path):
    trace = tmp_path / "clean_llama.arrow"
    shutil.copy(DATA / trace.name, trace)
    report = tmp_path / "clean_llama.report"
    report.mkdir()
    (report / "incidents.parquet").write_bytes(b"of an earlier replay")
    code = (
        "import sys; from click.testing import CliRunner; from kvcanary.cli import main; "
        f"result = CliRunner().invoke(main, ['replay', {str(trace)!r}]); "
        "print(result.exit_code, 'duckdb' in sys.modules, 'kvcanary.analysis.incidents.gathering' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False", "False"]
    assert not (report / "incidents.parquet").exists()


def test_the_command_finds_them_anew_and_explains(replayed):
    _, report = replayed("free_too_early")
    for name in ("incidents.parquet", "incident_members.parquet"):
        (report / name).unlink()
    result = run("incidents", report)
    assert result.exit_code == 0, result.output
    assert "1 incident\n" in result.output
    assert "#1  A page was given back too early   free_too_early" in result.output
    assert re.search(r"or else +page_given_twice \(0\.\d\d\)", result.output)
    assert (report / "incidents.parquet").is_file()
    explained = run("incidents", report, "--explain", 1).output
    assert "mechanism: A page is freed while its request still runs" in explained
    assert "or page_given_twice: The allocator hands out" in explained
    assert "from slot_history(776, in_group := 0)" in explained
    [row] = json.loads(run("incidents", report, "--json").stdout)["incidents"]
    assert row["kind"] == "free_too_early"


def test_the_command_without_the_trace(replayed):
    _, report = replayed("free_too_early")
    (report.parent / "free_too_early.arrow").rename(report.parent / "elsewhere.arrow")
    before = (report / "incidents.parquet").read_bytes()
    result = run("incidents", report)
    assert result.exit_code == 0
    assert "not at hand, so what was found before is shown" in result.stderr
    assert "#1  A page was given back too early   free_too_early" in result.output
    assert (report / "incidents.parquet").read_bytes() == before
    (report / "incidents.parquet").unlink()
    result = run("incidents", report)
    assert result.exit_code == 0
    assert "not at hand, so the kinds are less certain" in result.stderr
    result = run("incidents", report, "--trace", report.parent / "elsewhere.arrow")
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_trace_torn_since_takes_nothing_away(replayed):
    _, report = replayed("table_swap")
    trace = report.parent / "table_swap.arrow"
    trace.write_bytes(trace.read_bytes()[:40_000])  # before the forward in which the table was wrong
    before = (report / "incidents.parquet").read_bytes()
    result = run("incidents", report)
    assert (result.exit_code, "#1  Stale table entry   req_to_token" in result.stdout) == (0, True)
    assert "table_swap.arrow: torn, and was whole when it was replayed, so what was found before" in result.stderr
    assert (report / "incidents.parquet").read_bytes() == before
    (report / "incidents.parquet").unlink()
    result = run("incidents", report)
    assert (result.exit_code, "so the kinds are less certain" in result.stderr) == (0, True)


def test_torn_members_are_found_anew(replayed):
    _, report = replayed("table_swap")
    members = report / "incident_members.parquet"
    members.write_bytes(members.read_bytes()[:700])
    with open_report(report) as session:
        assert session.sql("from incidents").num_rows == 0
    assert "no incidents in this report yet" in run("triage", report).stdout
    assert run("incidents", report).exit_code == 0
    with open_report(report) as session:
        assert session.sql("from incident_members").num_rows == 36


def test_a_full_disk_leaves_what_was_there(replayed):
    _, report = replayed("kv_flip")
    before = {path.name: path.read_bytes() for path in report.iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))  # as a disk that is full
    try:
        result = run("incidents", report)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (result.exit_code, "incidents cannot be written" in result.stderr) == (0, True)
    assert {path.name: path.read_bytes() for path in report.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda report: (report / "summary.json").unlink(), "no report: it has no summary.json"),
        (lambda report: (report / "violations.parquet").unlink(), "missing; the report is incomplete"),
        (lambda report: (report / "findings.parquet").write_bytes(b"PAR1"), "no Parquet file of a report"),
    ],
)
def test_clear_errors(replayed, change, message):
    _, report = replayed("kv_flip")
    change(report)
    result = run("incidents", report)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_no_such_incident_or_trace(replayed):
    _, report = replayed("kv_flip")
    result = run("incidents", report, "--explain", 4)
    assert (result.exit_code, "the report has 1 incident(s)" in result.stderr) == (2, True)
    result = run("incidents", report, "--trace", report.parent / "nowhere.arrow")
    assert (result.exit_code, "nowhere.arrow: no such file" in result.stderr) == (2, True)


def test_segments_of_another_recording_of_the_same_name_tell_nothing(tmp_path):
    """And those of the recording are found in a folder, as other commands find them."""
    for name, seed in (("mine", 3), ("other", 4)):
        (trace,) = run_trial(Trial(fault=FAULTS["req_to_token"], config="swa", seed=seed), tmp_path / "w").traces
        (tmp_path / name).mkdir()
        parts = cut(trace, tmp_path / name / "t.arrow", seed=seed, least=60, most=120)
        trace.unlink()
        if name == "mine":
            assert run("replay", "--no-page", tmp_path / name).exit_code == 1
            report = tmp_path / "mine" / "t.report"
            before = (report / "incidents.parquet").read_bytes()
            (tmp_path / "moved").mkdir()
            for part in parts:
                part.rename(tmp_path / "moved" / part.name)
            shutil.copy(DATA / "kv_flip.arrow", tmp_path / "moved" / "t.arrow")
    assert run("incidents", report, "--trace", tmp_path / "moved").stderr == ""
    assert (report / "incidents.parquet").read_bytes() == before
    for part in parts:
        part.rename(tmp_path / "mine" / part.name)
    told = run("incidents", report)
    assert "of another recording" in told.stderr
    assert "#1  Stale table entry" in told.output
    assert (report / "incidents.parquet").read_bytes() == before
