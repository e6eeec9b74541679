"""`kvcanary-replay` as a user meets it: exit codes, JSON, reports, limits, Ctrl-C, hostile files."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.analysis.store.expansion import expand
from kvcanary.replayer.report import report as results
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.commands import run_replay
from ..support.engines.toy_engine import SHAPES, ToyEngine, record
from .underway import wait_until_under_way


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    clean = ToyEngine(SHAPES["full"], seed=0)
    faulty = ToyEngine(SHAPES["full"], seed=1, fault="table", forwards=40)
    return {"clean": record(clean, folder / "clean.arrow"), "faulty": record(faulty, folder / "faulty.arrow")}


def test_clean_trace(traces: dict[str, Path], tmp_path: Path) -> None:
    result = run_replay(traces["clean"], "--report", tmp_path / "r")
    assert result.exit_code == 0
    assert "CLEAN" in result.stdout
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["verdict"] == "clean"
    assert summary["violations"] == 0
    assert pq.read_table(tmp_path / "r" / "violations.parquet").num_rows == 0
    assert pq.read_table(tmp_path / "r" / "findings.parquet").num_rows == 0


def test_names_are_printed_as_they_are_and_commands_can_be_pasted(traces: dict[str, Path], tmp_path: Path) -> None:
    assert "a:x:b.arrow: no such file" in run_replay("a:x:b.arrow").output  # no emoji
    report = tmp_path / "a :smile: report"
    said = run_replay(traces["faulty"], "--report", report).stdout
    assert f"next   kvcanary triage '{report}' " in said


def test_faulty_trace_spells_out_the_first_violation(traces: dict[str, Path], tmp_path: Path) -> None:
    result = run_replay(traces["faulty"], "--report", tmp_path / "r")
    assert result.exit_code == 1
    table = pq.read_table(tmp_path / "r" / "violations.parquet")
    first = table.slice(0, 1).to_pylist()[0]
    text = " ".join(result.stdout.split())
    assert "CORRUPT" in text
    assert f"first seen forward {first['forward']}" in text
    assert f"request {first['request']} row {first['req_pool_idx']}, position {first['expected_position']}" in text
    assert f"token {first['stored_token']}, position {first['position']}" in text
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    found = sum(table["num_forwards"].to_pylist())
    assert summary["violations"] == found > table.num_rows
    assert sum(summary["violations_by_launch"].values()) == found
    assert summary["first_violation"]["slot"] == first["slot"]
    by_forward = expand(table, traces["faulty"])
    assert summary["forwards_hit"] == len(set(by_forward["forward"].to_pylist()))
    assert summary["slots_hit"] == len(set(table["slot"].to_pylist()))


def test_the_last_writer_is_who_wrote_the_slot(traces: dict[str, Path], tmp_path: Path) -> None:
    run_replay(traces["faulty"], "--report", tmp_path / "r")
    engine = ToyEngine(SHAPES["full"], seed=1, fault="table", forwards=40)
    writer: dict[int, tuple[int, int]] = {}
    rows = pq.read_table(tmp_path / "r" / "violations.parquet").to_pylist()
    at = 0
    for number, event in enumerate(engine.events):
        while at < len(rows) and rows[at]["forward"] == number:
            row = rows[at]
            if row["fail_reason_bits"] & 0b100111:
                assert (row["writer_forward"], row["writer_request_id"]) == writer.get(row["slot"], (-1, -1))
            else:
                assert (row["writer_forward"], row["writer_request_id"]) == (number, row["request_id"])
            at += 1
        owners = np.repeat(event.ints["request_ids"], event.ints["extend_lens"])
        for slot, owner in zip(event.ints["out_cache_loc"], owners, strict=True):
            writer[int(slot)] = (number, int(owner))
    assert at == len(rows) > 0


def test_json_is_one_object_or_a_list(traces: dict[str, Path]) -> None:
    one = run_replay(traces["faulty"], "--json", "--no-report")
    assert one.exit_code == 1
    assert json.loads(one.stdout)["exit_code"] == 1
    both = run_replay(*traces.values(), "--json", "--no-report")
    assert both.exit_code == 1
    assert [entry["verdict"] for entry in json.loads(both.stdout)] == ["clean", "corrupt"]


def test_quiet_is_one_line_a_trace(traces: dict[str, Path]) -> None:
    result = run_replay(*traces.values(), "--quiet", "--no-report")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["CLEAN", "CORRUPT"]


def test_limits(traces: dict[str, Path]) -> None:
    whole = json.loads(run_replay(traces["faulty"], "--json", "--no-report").stdout)
    fast = json.loads(run_replay(traces["faulty"], "--json", "--no-report", "--fail-fast").stdout)
    assert fast["forwards_hit"] == 1
    assert fast["forwards"] == whole["first_violation"]["forward"] + 1
    assert "--fail-fast" in fast["stopped"]
    some = json.loads(run_replay(traces["faulty"], "--json", "--no-report", "--max-violations", 1).stdout)
    assert 1 <= some["violations"] < whole["violations"]
    first = fast["violations"]  # all of the first bad forward, which reaches this limit and no higher one
    for limit in (first, first + 1):
        limited = json.loads(run_replay(traces["faulty"], "--json", "--no-report", "--max-violations", limit).stdout)
        assert limited["violations"] >= limit
        assert (limited["violations"] == first) == (limit == first)


def test_default_report_folder_is_beside_the_trace(tmp_path: Path) -> None:
    trace = record(ToyEngine(SHAPES["full"], seed=0, forwards=6), tmp_path / "trace.arrow")
    assert run_replay(trace).exit_code == 0
    assert (tmp_path / "trace.report" / "summary.json").exists()


def test_two_traces_never_share_a_report(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=0, forwards=4)
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(record(engine, tmp_path / name / "trace.arrow"))
    assert run_replay(*paths).exit_code == 0
    result = run_replay(*paths, "--report", tmp_path / "r")
    assert result.exit_code == 2
    assert "name another --report" in result.output


def test_an_unwritable_report_folder_is_named(traces: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run_replay(traces["clean"], "--report", tmp_path / "file" / "r")
    assert result.exit_code == 2
    assert "--no-report" in result.output


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xd8\xff\xe0\x00\x10JFIF" + b"\0" * 400, b"hello\n" * 99, b"ARROW1\0\0"]
)
def test_foreign_files_exit_2_and_leave_no_report(content: bytes, traces: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(content)
    result = run_replay(path)
    assert result.exit_code == 2
    assert str(path) in result.output
    assert not (tmp_path / "x.report").exists()
    mixed = run_replay(path, traces["clean"], "--no-report", "--quiet")
    assert mixed.exit_code == 2
    assert "CLEAN" in mixed.stdout
    assert run_replay(path, traces["faulty"], "--no-report").exit_code == 1


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.arrow", tmp_path):
        result = run_replay(path, "--no-report")
        assert result.exit_code == 2
        assert str(path) in result.output


def test_an_empty_name_is_not_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = record(ToyEngine(SHAPES["full"], seed=0, forwards=6), tmp_path / "t.arrow")
    monkeypatch.chdir(tmp_path)
    empty = "the name is empty"
    for arguments, said in ((("",), empty), (("--report", "", trace), empty), (("--report", "-", trace), "is ./-")):
        result = run_replay(*arguments)
        assert result.exit_code == 2
        assert said in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["t.arrow"]


def test_kv_hash_all_needs_all_bytes(tmp_path: Path) -> None:
    from dataclasses import replace

    engine = ToyEngine(SHAPES["full"], seed=0, forwards=3)
    header = engine.header
    streams = tuple(replace(stream, bytes_per_token=64) for stream in header.groups[0].streams)
    from kvcanary.recorder.writing.writer import TraceWriter

    path = tmp_path / "t.arrow"
    with TraceWriter(path, replace(header, groups=(replace(header.groups[0], streams=streams),))) as writer:
        for event in engine.events:
            writer.append(event)
    result = run_replay(path, "--no-report", "--kv-hash", "all")
    assert result.exit_code == 2
    assert "--kv-hash partial" in result.output


def test_a_pool_too_large_for_this_machine_is_one_clear_error(tmp_path: Path) -> None:
    from dataclasses import replace

    from kvcanary.recorder.writing.writer import TraceWriter

    engine = ToyEngine(SHAPES["full"], seed=0, forwards=1)
    group = replace(engine.header.groups[0], num_slots=1 << 31)
    path = tmp_path / "t.arrow"
    with TraceWriter(path, replace(engine.header, groups=(group,))) as writer:
        writer.append(engine.events[0])
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        f"from kvcanary.cli import main; main(['replay', '--no-report', {str(path)!r}])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert "GiB" in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_leaves_a_partial_report_that_says_so(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=4, forwards=4000)
    trace = record(engine, tmp_path / "t.arrow")
    code = f"from kvcanary.cli import main; main(['replay', '--backend', 'reference', {str(trace)!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    report = tmp_path / "t.report" / "violations.parquet"
    # Rows that last are held back; until the end they lie beside their place.
    wait_until_under_way(
        process, [report.with_name(f"{report.name}.partial")], cpu_seconds=1.0
    )  # the whole replay takes far longer
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 125, (out, err)
    assert "Traceback" not in err
    assert re.search(r"interrupted after [\d,]+ forwards", out)
    summary = json.loads((tmp_path / "t.report" / "summary.json").read_text())
    assert summary["verdict"] == "inconclusive"
    assert 0 < summary["forwards"] < 4000
    assert pq.read_table(report).num_rows == 0


@pytest.mark.long
def test_a_hundred_thousand_violations_all_reach_the_disk(tmp_path: Path) -> None:
    """Freed too early and reused for a long time: every row is kept, and the counts agree."""
    engine = ToyEngine(SHAPES["full"], seed=9, forwards=1100, fault="early_free", fault_rate=1.0)
    trace = record(engine, tmp_path / "t.arrow")
    result = run_replay(trace, "--json")
    summary = json.loads(result.stdout)
    table = pq.read_table(tmp_path / "t.report" / "violations.parquet")
    assert sum(table["num_forwards"].to_pylist()) == summary["violations"] > 65_536
    assert table.num_rows < summary["violations"] / 2
    assert run_replay(trace, "--executor", "stepwise", "--report", tmp_path / "stepwise").exit_code == 1
    assert pq.read_table(tmp_path / "stepwise" / "violations.parquet").num_rows == summary["violations"]
    assert pq.ParquetFile(tmp_path / "stepwise" / "violations.parquet").num_row_groups > 1
    found = Counter()
    for launch, times in zip(table["launch"].to_pylist(), table["num_forwards"].to_pylist(), strict=True):
        found[launch] += times
    assert found == {launch: count for launch, count in summary["violations_by_launch"].items() if count}


@pytest.mark.parametrize("executor", ["stepwise", "interval"])
def test_ctrl_c_while_rows_are_put_together_loses_none(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Path(__file__).parents[2] / "data" / "token_swap.arrow"
    settings = ReplaySettings(executor=executor, merge_rows=executor == "interval")
    put_together = results.violation_table
    calls = []

    def struck(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return put_together(*arguments)

    monkeypatch.setattr(results, "violation_table", struck)
    monkeypatch.setattr(results, "PENDING_ROWS", 3)
    summary = replay(trace, settings=settings, report=tmp_path)
    assert summary.stopped.startswith("interrupted")
    rows = pq.read_table(tmp_path / "violations.parquet")["num_forwards"].to_pylist()
    assert sum(rows) == summary.violations == sum(summary.violations_by_launch.values()) > 3
