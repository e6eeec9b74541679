"""`kvcanary triage`: every question of the list answered, and right about faults whose cause is known."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kvcanary.analysis import open_report
from kvcanary.analysis.errors import AnalysisError
from kvcanary.analysis.store.library import sql_sections
from kvcanary.analysis.store.triage import ANSWERS, fill, lost_line, triage
from kvcanary.recorder.trace.header import Shrunk

from ..support.commands import run
from ..support.places import DATA
from ..support.raw_traces import read_raw, write_raw

pytestmark = pytest.mark.one_in(3)  # make fuzz goes through all

QUESTIONS = [
    "held this slot before",
    "first wrote it",
    "prefix cache on",
    "chunk boundaries",
    "modulo the page size",
    "same slot range",
    "own prompt truncated",
    "Target or draft",
    "Prefill or decode",
    "source stable",
]


def ask(folder):
    with open_report(folder) as session:
        found = triage(session)
    return found, {answer.name: answer for answer in found.answers}


def test_every_question_has_its_answer_and_its_sql():
    texts = [sql_sections("triage", name)[""].removeprefix("-- ") for name in ANSWERS]
    assert all(any(question in text for text in texts) for question in QUESTIONS)
    assert len(texts) == len(QUESTIONS)
    with pytest.raises(AnalysisError, match="expected a number"):  # it stands outside of quotes, where it would be SQL
        fill("x = :slot", {"slot": "1; drop table violations"})
    assert fill("x = :slot and y::bigint = ':mode'", {"slot": 5, "mode": "it's"}) == "x = 5 and y::bigint = 'it''s'"


def test_a_table_entry_that_points_into_another_request(report):
    found, answers = ask(report("table_swap"))
    assert (found.violations, found.findings, found.first["slot"], found.first["forward"]) == (36, 0, 608, 18)
    assert answers["held_before"].words.startswith("last written by request shared-b; before that by nobody")
    assert answers["first_writer"].words.startswith("forward 3 (mixed) for request shared-b, position 40")
    assert answers["whose_tokens"].words == "of 8 wrong tokens: written by another request (100 %)"
    assert answers["prefix_cache"].words.startswith("no: 0 of 3 requests with a cached prefix are hit, 1 of 5 without")
    assert answers["slot_range"].overall[0] | {"found": 0} == {
        "pool_group": 0, "first_slot": 608, "last_slot": 615, "slots": 8, "first_forward": 18, "last_forward": 18,
        "several_requests": False, "found": 0, "ranges": 2,
    }  # fmt: skip
    assert answers["target_or_draft"].words == "target; first target, in mode decode, forward 18"
    assert (
        answers["prefill_or_decode"].words == "one engine does both; seen in: decode; the slots were written in: mixed"
    )
    assert answers["transfer_sides"].words == "nothing was transferred in this trace"
    assert answers["page_modulo"].words == "cannot be known from one request; its remainder is 5 of 8"
    assert answers["chunk_boundaries"].overall == [{"first_damaged_position": "inside a prompt", "requests": 1}]


def test_swapped_tokens_are_another_requests(report):
    _, answers = ask(report("token_swap"))
    assert answers["whose_tokens"].words == "of 2 wrong tokens: sampled for another request (100 %)"
    assert answers["held_before"].words.endswith("written last by: the request itself 100 %")
    assert answers["chunk_boundaries"].words == "no: of 2 request(s) the first damaged position lies: 2 in the answer"


def test_flipped_bytes_are_no_tokens(report):
    _, answers = ask(report("kv_flip"))
    assert answers["whose_tokens"].words.startswith("no token differs")
    assert answers["slot_range"].words.startswith("yes: all of it lies in slot 749")


def lab(tmp_path, fault, config, seed=3):
    """Record and replay one fault of the lab; returns the report of its first trace, or of both of a pair's."""
    name = tmp_path / f"{fault}{'' if config.startswith('pd') else '.arrow'}"
    done = run("lab", "run", "--fault", fault, "--config", config, "--seed", seed, "-o", name)
    assert done.returncode == 0, done.stderr
    traces = sorted(name.glob("*.arrow")) if name.is_dir() else [name]
    run("replay", "--quiet", *traces)
    return [trace.with_suffix(".report") for trace in traces]


def test_a_draft_fault_is_the_drafts(tmp_path):
    [folder] = lab(tmp_path, "draft_position_plus_one", "eagle")
    _, answers = ask(folder)
    assert answers["target_or_draft"].words.startswith("draft; first draft")


def test_pages_freed_under_the_prefix_cache(tmp_path):
    [folder] = lab(tmp_path, "radix_insert_then_free", "mha")
    found, answers = ask(folder)
    assert found.first["what"] == "foreign_slot_freed"
    assert "the prefix cache" in answers["held_before"].words.split(";")[0]
    assert any(row["last_written_by"] == "another request" for row in answers["held_before"].overall)
    assert answers["first_writer"].first[0]["request"] == found.first["request"]


def test_a_transfer_with_a_wrong_stride(tmp_path):
    folders = lab(tmp_path, "transfer_wrong_stride", "pd")
    decode = next(folder for folder in folders if folder.stem == "decode")
    found, answers = ask(decode)
    assert found.violations + found.findings > 0
    assert "decode engine" in answers["prefill_or_decode"].words
    kinds = {row["kind"] for row in answers["transfer_sides"].overall}
    assert "(receive end)" in kinds
    assert "transfer_differs" in kinds
    assert "differ from what was sent" in answers["transfer_sides"].words


def test_the_command(report):
    folder = report("table_swap")
    done = run("triage", folder)
    assert done.returncode == 0
    assert "first   forward 18   request long   slot 608 of group 0, position 40" in done.stdout
    assert all(question in done.stdout for question in QUESTIONS)
    assert "lost    nothing: the trace is whole" in done.stdout
    assert "select" not in done.stdout
    assert (folder / "report.duckdb").is_file()
    shown = run("triage", folder, "--sql").stdout
    assert "from lifetimes_between(608, 608) as lives" in shown
    told = json.loads(run("triage", folder, "--json").stdout)
    assert [item["name"] for item in told["questions"]] == list(ANSWERS)
    assert told["first_damage"]["slot"] == 608
    for item in told["questions"]:  # the SQL shown is what was asked
        for sql, rows in ((item["first_sql"], item["first"]), (item["overall_sql"], item["overall"])):
            again = (
                json.loads(run("sql", folder, sql, "--format", "json").stdout)
                if item["name"] == "held_before"
                else rows
            )
            assert again == rows


def test_a_shrunk_trace_is_said_to_be_one(report, tmp_path):
    folder, trace = report("table_swap"), tmp_path / "table_swap.arrow"
    assert "\nshrunk  " not in run("triage", folder).stdout
    header, events = read_raw(trace)
    trace.unlink()
    write_raw(trace, replace(header, shrunk=Shrunk(events=1234)), events)
    line = "shrunk  a part of 1,234 events that kvcanary shrink cut out: requests, tokens"
    assert line in run("triage", folder).stdout


def test_incidents_are_cited(report):
    folder = report("table_swap")
    assert f"no incidents in this report yet: kvcanary incidents {folder}" in run("triage", folder).stdout
    assert run("incidents", folder).returncode == 0
    shown = run("triage", folder).stdout
    assert "#1      Stale table entry (req_to_token), confidence medium   from forward 18   1 request hit" in shown
    assert f"why: kvcanary incidents {folder} --explain 1" in shown
    told = json.loads(run("triage", folder, "--json").stdout)
    assert told["num_incidents"] == 1
    assert [row["kind"] for row in told["incidents"]] == ["req_to_token"]


def test_a_clean_report(report):
    done = run("triage", report("clean_llama"))
    assert done.returncode == 0
    assert "nothing was found, so there is nothing to ask" in done.stdout
    assert "lost    nothing" in done.stdout


def test_without_the_trace(report, tmp_path):
    folder = report("table_swap")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    trace = (tmp_path / "table_swap.arrow").rename(moved / "t.arrow")
    done = run("triage", folder)
    assert done.returncode == 2
    assert "no such file" in done.stderr
    assert "--trace" in done.stderr
    assert run("triage", folder, "--trace", trace).returncode == 0
    assert run("triage", folder).returncode == 0  # report.duckdb holds all that is needed now


def test_where_report_duckdb_cannot_be_written(report):
    folder = report("table_swap")
    (folder / "report.duckdb").mkdir()
    done = run("triage", folder)
    assert done.returncode == 0
    assert "answering from the files, which is slower" in done.stderr
    assert "last written by request shared-b" in done.stdout


def test_a_name_as_long_as_a_page_is_cut(report):
    path = report("table_swap") / "violations.parquet"
    table = pq.read_table(path)
    for column in ("request", "writer_request"):
        at = table.column_names.index(column)
        table = table.set_column(at, column, pa.array(["x" * 100_000] * table.num_rows))
    pq.write_table(table, path)
    lines = run("triage", path.parent).stdout.splitlines()
    assert max(map(len, lines)) <= 520
    [first] = [line for line in lines if line.startswith("first ")]
    assert first.endswith("...   slot 608 of group 0, position 40   VERIFY_CHAIN_HASH+VERIFY_TOKEN")


@pytest.mark.parametrize("what", ["trace", "nothing", "empty folder"])
def test_what_has_no_report(report, tmp_path, what):
    folder = report("clean_llama").parent
    (tmp_path / "empty").mkdir()
    alone = shutil.copy(folder / "clean_llama.arrow", tmp_path / "alone.arrow")
    path = {"trace": alone, "nothing": tmp_path / "none", "empty folder": tmp_path / "empty"}[what]
    done = run("triage", path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "report" in done.stderr


@pytest.mark.parametrize("command", ["triage", "page"])
def test_a_folder_stands_for_its_reports_and_a_trace_for_the_one_beside_it(report, tmp_path, command):
    folders = [report("kv_flip"), report("table_swap")]
    shutil.copy(DATA / "clean_llama.arrow", tmp_path / "new.arrow")
    done = run(command, tmp_path, "--json")
    assert "not replayed yet: new.arrow" in done.stderr
    found = json.loads(done.stdout)
    named = [one.get("report") or str(Path(one["page"]).parent) for one in found]
    assert named == sorted(map(str, folders))
    one = json.loads(run(command, tmp_path / "kv_flip.arrow", "--json").stdout)
    assert one == found[0]


def test_each_incident_has_its_own_answers(tmp_path):
    trace = shutil.copy(DATA / "corpus" / "sglang-append_with_wrong_stride.arrow", tmp_path / "two.arrow")
    run("replay", "--quiet", trace)
    folder = tmp_path / "two.report"
    found = json.loads(run("triage", folder, "--json").stdout)
    incidents = found["incidents"]
    assert len(incidents) > 1
    firsts = [(one["first_damage"]["forward"], one["first_damage"]["slot"]) for one in incidents]
    assert len(set(firsts)) > 1
    for one in incidents:
        assert one["first_damage"]["forward"] == one["first_forward"]
        assert [question["question"] for question in one["questions"]] == [q["question"] for q in found["questions"]]
    shares = [sum(row["found"] for row in one["questions"][0]["overall"]) for one in incidents]
    assert sum(shares) == sum(row["found"] for row in found["questions"][0]["overall"])
    text = run("triage", folder).stdout
    assert all(f"\n#{one['incident']}" in text for one in incidents)
    second = run("triage", folder, "--incident", 2).stdout
    assert f"first   forward {firsts[1][0]}" in second
    assert run("triage", folder, "--incident", 99).returncode == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "nothing: the trace is whole"),
        ({"present": False}, "the trace is not at hand"),
        ({"losses": 2, "lost_events": 7}, "7 event(s) lost while recording, at 2 place(s)"),
        ({"losses": 1, "unknown_losses": 1}, "an unknown number of events lost while recording, at 1 place(s)"),
        ({"complete": False, "gaps": 1}, "1 damaged or torn part(s) left out"),
        ({"complete": False}, "the trace has no end"),
    ],
)
def test_what_is_lost_in_words(row, words):
    whole = {"present": True, "complete": True, "losses": 0, "lost_events": 0, "unknown_losses": 0, "gaps": 0}
    assert lost_line(whole | row) == words
