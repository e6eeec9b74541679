"""Reports of many recordings in one table: nothing twice, nothing half, and what is damaged is left out and named."""

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kvcanary.analysis.store.reports_table import QUESTIONS, open_table
from kvcanary.analysis.store.table_files import parquet_file

from ..support.commands import run

DAY_NS = 86_400_000_000_000
BEGIN_NS = 1_790_000_000_000_000_000


def write_report(
    folder: Path, trace: str, *, version: str = "1", day: int = 0, kinds: tuple[str, ...] = (), **more: Any
) -> Path:
    """A report's summary as a replay leaves it, as far as the table takes it."""
    began = BEGIN_NS + day * DAY_NS
    summary = {
        "trace": f"/traces/node-{trace[0]}/{trace}.arrow",
        "trace_id": trace,
        "verdict": "corrupt" if kinds else "clean",
        "engine": {"name": "vllm", "version": version},
        "model": {"name": "a/b c"},
        "ranks": {"tp_rank": 0, "pp_rank": 0, "dp_rank": 0},
        "requests": 10,
        "num_requests_hit": len(kinds),
        "tokens": 100,
        "first_time_ns": began,
        "last_time_ns": began + 1,
        "incidents": [{"kind": kind, "title": kind, "time_ns": began + 1, "slots": [1]} for kind in kinds],
        "coverage": [{"what": "forwards", "name": "", "watched": 3, "total": 4, "share": 0.75}],
        **more,
    }
    report = folder / f"{trace}.report"
    report.mkdir(parents=True)
    (report / "summary.json").write_text(json.dumps(summary))
    return report


@pytest.fixture
def table(tmp_path: Path) -> Path:
    reports = tmp_path / "reports"
    write_report(reports, "a1")
    write_report(reports, "a2", kinds=("stale", "stale"), day=1)
    write_report(reports, "b1", kinds=("stale", "wild"), day=2, version="2/rc")
    assert run("collect", reports, tmp_path / "table").returncode == 0
    return tmp_path / "table"


def ask(table: Path, query: str) -> list[Any]:
    done = run("sql", table, query, "--json")
    assert done.returncode == 0, done.stderr
    return [list(row.values()) for row in json.loads(done.stdout)]


def test_questions_over_all_reports(table: Path) -> None:
    first = ask(table, "select kind, version, reports, incidents from kinds_by_version")
    assert first == [["stale", "1", 1, 2], ["stale", "2/rc", 1, 1], ["wild", "2/rc", 1, 1]]
    by_node = ask(table, "select node, kind, reports, of_reports, share from kinds_by_node order by all")
    assert by_node == [["node-a", "stale", 1, 2, 0.5], ["node-b", "stale", 1, 1, 1.0], ["node-b", "wild", 1, 1, 1.0]]
    assert ask(table, "select sum(requests)::int, sum(hit)::int from requests_hit") == [[30, 4]]
    assert ask(table, "select sum(clean)::int, sum(corrupt)::int, sum(inconclusive)::int from judged") == [[1, 2, 0]]
    assert ask(table, "select distinct model, watched, total from coverage") == [["a/b c", 3, 4]]
    assert ask(table, "select count(*) from new_kinds") == [[0]]
    for name in QUESTIONS:
        ask(table, f"from {name}")


def test_a_kind_of_today_is_new(table: Path, tmp_path: Path) -> None:
    now = time.time_ns()
    incident = {"kind": "fresh", "title": "fresh", "time_ns": now, "slots": [1]}
    said = {"first_time_ns": now, "last_time_ns": now, "incidents": [incident]}
    report = write_report(tmp_path / "today", "n1", version="3", kinds=("fresh",), **said)
    assert run("collect", report, table).returncode == 0
    assert ask(table, "select kind from new_kinds") == [["fresh"]]


def test_what_is_collected_again_is_there_once(table: Path, tmp_path: Path) -> None:
    before = sorted(table.rglob("*"))
    assert run("collect", tmp_path / "reports", table).returncode == 0
    assert sorted(table.rglob("*")) == before
    grown = write_report(tmp_path / "grown", "c1", segments=[0, 1])
    assert run("collect", grown, table, "--node", "x").returncode == 0
    (grown / "summary.json").unlink()
    grown.rmdir()
    write_report(tmp_path / "grown", "c1", segments=[0, 1, 2], kinds=("late",))
    assert run("collect", grown, table, "--node", "x").returncode == 0
    assert ask(table, "select verdict, node from reports where trace_id = 'c1'") == [["corrupt", "x"]]


def test_a_damaged_file_is_left_out_and_named(table: Path) -> None:
    good, other, *_ = sorted(table.rglob("*.parquet"))
    good.write_bytes(good.read_bytes()[:200])
    other.write_bytes(parquet_file(pa.table({"verdict": [1]}), packed=False))
    done = run("sql", table, "select count(*) as n from reports", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, [{"n": 1}])
    notes = done.stderr.splitlines()
    assert [note.startswith("note: ") and "left out, " in note for note in notes] == [True, True], notes


def test_no_changed_bit_changes_an_answer(table: Path) -> None:
    query = "select report_id, verdict, tokens, began, coverage from _reports order by report_id"
    with open_table(table) as session:
        whole = session.sql(query).to_pylist()
    one = sorted(table.rglob("*.parquet"))[0]
    good = one.read_bytes()
    rng = random.Random(0)
    name = good.rindex(b"report_id")  # in the footer, where it would be no UTF-8 any more
    for number in range(40):
        at = rng.randrange(len(good)) if number else name
        bit = 1 << rng.randrange(8) if number else 1 << 7
        one.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
        with open_table(table) as session:
            rows = session.sql(query).to_pylist()
            assert len(session.problems) == 1
        assert len(rows) == len(whole) - 1 and all(row in whole for row in rows)


def test_a_file_without_a_checksum_is_not_read_and_can_be_made_anew(table: Path, tmp_path: Path) -> None:
    """In Parquet's readers a changed bit may end the process: nothing of such a file reaches them."""
    for one in table.rglob("*.parquet"):
        pq.write_table(pq.read_table(one, partitioning=None), one, compression="zstd")
        content = one.read_bytes()
        one.write_bytes(content[:-9] + bytes([content[-9] ^ 0x40]) + content[-8:])
    done = run("sql", table, "select count(*) as n from reports", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, [{"n": 0}])
    assert done.stderr.count("it has no checksum") == 3
    assert done.stderr.count("collect its report again (kvcanary collect)") == 3
    assert run("collect", tmp_path / "reports", table).returncode == 0
    done = run("sql", table, "select count(*) as n from reports", "--json")
    assert (json.loads(done.stdout), done.stderr) == ([{"n": 3}], "")


def test_a_clock_that_was_put_back_takes_nothing_from_others_time(table: Path, tmp_path: Path) -> None:
    [[before]] = ask(table, "select sum(seconds) from recorded")
    clocks = {"first_time_ns": BEGIN_NS, "last_time_ns": BEGIN_NS - 3600 * 10**9}
    report = write_report(tmp_path / "back", "k1", **clocks)
    assert run("collect", report, table).returncode == 0
    assert ask(table, "select sum(seconds) from recorded") == [[before]]


def test_a_copy_counts_once(table: Path) -> None:
    first, second, *_ = sorted(table.rglob("*.parquet"))
    shutil.copy(first, first.with_name("copy.parquet"))
    (table / "backup").mkdir()
    shutil.copy(second, table / "backup")
    os.utime(table / "backup" / second.name, (1, 1))
    done = run("sql", table, "select count(*) as n, count(day) as days from reports", "--json")
    assert json.loads(done.stdout) == [{"n": 3, "days": 3}]
    assert f"copy.parquet: left out, it is a copy of {first.name}" in done.stderr


def test_a_damaged_copy_hides_no_sound_one(table: Path) -> None:
    damaged = [
        one for one in table.rglob("*.parquet") if "stale" in str(pq.read_table(one, partitioning=None)["incidents"])
    ]
    (table / "backup").mkdir()
    for one in damaged:
        content = one.read_bytes()
        (table / "backup" / one.name).write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
        os.utime(one, (1, 1))
    assert len(damaged) == 2
    assert ask(table, "select count(*) as n from reports where verdict = 'corrupt'") == [[2]]


def test_of_copies_the_one_counts_whose_recording_goes_on_longer(table: Path, tmp_path: Path) -> None:
    """Whenever the files were copied: `cp` and `aws s3 sync` give each a new time."""
    for day, verdict, age in ((0, "corrupt", 1), (None, "inconclusive", 0)):
        began = BEGIN_NS if day is not None else 0
        more = {"first_time_ns": began, "last_time_ns": began and began + 60 * 10**9, "verdict": verdict}
        report = write_report(tmp_path / f"day{day}", "g1", **more)
        assert run("collect", report, table).returncode == 0
        for one in table.rglob("g1.parquet"):
            if (began == 0) == ("day=unknown" in str(one)):
                os.utime(one, (2_000_000_000 - age, 2_000_000_000 - age))
    assert len([*table.rglob("g1.parquet")]) == 2
    assert ask(table, "select verdict from reports where trace_id = 'g1'") == [["corrupt"]]


def test_reports_of_traces_without_an_id_stand_beside_one_another(table: Path, tmp_path: Path) -> None:
    """Traces of old formats have none; what is collected again takes the place of itself."""
    for trace, day in (("p1", 4), ("p2", 4), ("p1", 5)):
        report = write_report(tmp_path / f"day{day}", trace, day=day, trace_id=None)
        for _ in range(2):
            assert run("collect", report, table).returncode == 0
    found = ask(table, "select trace, day::varchar from reports where trace_id = 'unknown' order by all")
    assert [trace for trace, _ in found] == ["/traces/node-p/p1.arrow"] * 2 + ["/traces/node-p/p2.arrow"]


def test_a_table_may_lie_in_a_hidden_folder(table: Path, tmp_path: Path) -> None:
    hidden = tmp_path / ".home" / "table"
    hidden.parent.mkdir()
    shutil.move(table, hidden)
    (hidden / ".under_way").mkdir()
    shutil.copy(sorted(hidden.rglob("*.parquet"))[0], hidden / ".under_way" / "another.parquet")
    assert ask(hidden, "select count(*) as n from reports") == [[3]]


def test_older_and_newer_files_are_read_together(table: Path) -> None:
    one = sorted(table.rglob("*.parquet"))[0]
    rows = pq.read_table(one, partitioning=None)
    rows = rows.drop_columns(["lost_events"]).append_column("of_tomorrow", pa.array([1]))
    one.write_bytes(parquet_file(rows, packed=False))
    assert ask(table, "select count(*), count(lost_events) from reports") == [[3, 0]]


def test_what_is_no_report_is_one_line(table: Path, tmp_path: Path) -> None:
    done = run("collect", tmp_path / "table", table)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    broken = tmp_path / "reports" / "broken.report"
    broken.mkdir()
    (broken / "summary.json").write_text("{")
    done = run("collect", tmp_path / "reports", table, "--json")
    assert (done.returncode, len(json.loads(done.stdout)["added"])) == (2, 3)
    assert list(json.loads(done.stdout)["failed"]) == [str(broken)]


def test_what_does_not_go_with_a_table_is_refused(table: Path, tmp_path: Path) -> None:
    for more, says in (
        (["--save"], "--save goes with a report"),
        (["--live"], "--live goes with a report"),
        (["--trace", tmp_path / "t.arrow"], "--trace goes with a report"),
        (["-o", sorted(table.rglob("*.parquet"))[0]], "lies in the table"),
    ):
        done = run("sql", table, "from judged", *more)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    script = tmp_path / "query.sql"
    script.write_text("from judged")
    done = run("sql", table, "-f", script, "-o", script)
    assert (done.returncode, script.read_text()) == (2, "from judged")


def test_older_incidents_of_fewer_columns_are_read_as_well(table: Path) -> None:
    one = sorted(table.rglob("*.parquet"))[1]
    rows = pq.read_table(one, partitioning=None)
    older = [{"kind": row["kind"], "of_tomorrow": 1} for row in rows["incidents"][0].as_py()]
    at = rows.column_names.index("incidents")
    one.write_bytes(parquet_file(rows.set_column(at, "incidents", pa.array([older])), packed=False))
    assert ask(table, "select count(*), count(title) from incidents") == [[4, 2]]
    pq.write_table(rows.set_column(at, "incidents", pa.array([[{"kind": 1}]])), one)
    assert ask(table, "select count(*) from incidents") == [[2]]


def test_a_sample_says_its_interval_and_leaves_out_what_was_recorded_for_an_incident(
    table: Path, tmp_path: Path
) -> None:
    sampling = {"fleet": "eu", "server": "gpu-1", "servers": 0.1, "windows": 0.5, "reason": "window"}
    for number in range(10):
        kinds = ("stale",) if number < 2 else ()
        reason = {"reason": "incident"} if number == 0 else {}
        write_report(tmp_path / "more", f"s{number}", day=3, kinds=kinds, sampling=sampling | reason)
    assert run("collect", tmp_path / "more", table).returncode == 0
    [[recordings, hit, share, low, high]] = ask(
        table, "select recordings, hit, share, low, high from recordings_hit order by day desc limit 1"
    )
    assert (recordings, hit, round(share, 4), round(low, 4), round(high, 4)) == (9, 1, 0.1111, 0.0199, 0.4350)  # Wilson
    [[requests, low, high]] = ask(table, "select requests, low, high from requests_hit order by day desc limit 1")
    assert (requests, round(low, 4), round(high, 4)) == (90, 0.0020, 0.0603)
    columns = "fleet, round(share_to_record, 6), servers, recordings, judged, for_incidents"
    assert ask(table, f"select {columns} from recorded order by day desc limit 1") == [["eu", 0.05, 1, 10, 1.0, 1]]
    assert ask(table, "select node, reports, corrupt from nodes_by_version where node = 'gpu-1'") == [["gpu-1", 10, 2]]


def test_the_page_of_a_fleet_links_to_the_pages_that_are_there(table: Path, tmp_path: Path) -> None:
    (tmp_path / "reports" / "b1.report" / "report.html").write_text("its own")
    done = run("fleet", "page", table, "-o", tmp_path / "fleet.html", "--json")
    assert (done.returncode, json.loads(done.stdout)["left_out"]) == (0, []), done.stderr
    text = (tmp_path / "fleet.html").read_text()
    data = json.loads(text.partition('id="report-data">')[2].partition("</script>")[0])
    assert data["links"] == ["./reports/b1.report/report.html", None]
    assert data["numbers"]["corrupt"]["v"] == 2
    assert run("fleet", "page", tmp_path, "-o", tmp_path / "other.html").returncode == 2
