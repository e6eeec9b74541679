"""Bisecting saved traces: order, criteria, votes, skips, cache, and what is said in the end."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.analysis.bisect import criteria
from kvcanary.analysis.bisect import log as cache
from kvcanary.analysis.cli.bisect import bisect_command
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.replayer.lab.configurations import CONFIGURATIONS

from ...support.commands import run
from ...support.places import DATA
from .traces import history, keep, saved, torn

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all


@pytest.fixture
def bisect(tmp_path):
    def run(*arguments, code):
        words = [str(a) for a in arguments]
        if "--no-cache" not in words:
            words = ["--cache", str(tmp_path / "cache"), *words]
        done = CliRunner().invoke(bisect_command, ["--json", *words])
        assert done.exit_code == code, (done.output, done.exception)
        return json.loads(done.stdout) if code != 2 else done.stderr

    return run


def test_the_first_bad_version_its_incident_and_how_to_see_it(bisect, tmp_path):
    traces = history(tmp_path, "ggggggggbbbb")
    found = bisect(*reversed(traces), code=0)
    assert found["versions"] == [f"1.{n}" for n in range(12)]  # 1.10 after 1.9
    assert found["first_bad"] == "1.8"
    assert found["last_good"] == "1.7"
    assert [v["version"] for v in found["judged"]][:2] == ["1.0", "1.11"]
    assert len(found["judged"]) <= 6
    assert "forward 18, request long" in found["evidence"]["words"]
    assert found["evidence"]["words"].startswith("incident req_to_token")
    assert found["reproduce"] == f"kvcanary-replay {traces[8]}"


def test_verdicts_are_kept_by_content(bisect, tmp_path, monkeypatch):
    traces = history(tmp_path, "ggbb")
    first = bisect(*traces, code=0)
    assert first["cached"] == 0
    assert bisect(*traces, code=0)["cached"] == len(first["judged"])
    assert bisect("--no-cache", *traces, code=0)["cached"] == 0
    other = bisect("--finding", "slot_leaked", *traces, code=1)
    assert other["cached"] == 0
    for damaged in (tmp_path / "cache").glob("*.json"):
        damaged.write_text("{")
    assert bisect(*traces, code=0)["cached"] == 0
    monkeypatch.setattr(cache, "judge_id", lambda: "other code")
    assert bisect(*traces, code=0)["cached"] == 0


def test_a_kept_verdict_names_the_trace_where_it_lies_now(bisect, tmp_path):
    traces = history(tmp_path, "gb")
    bisect(*traces, code=0)
    moved = [trace.rename(tmp_path / f"moved{n}.arrow") for n, trace in enumerate(traces)]
    found = bisect(*moved, code=0)
    assert found["cached"] == 2
    assert found["reproduce"] == f"kvcanary-replay {moved[1]}"


def test_a_run_that_could_not_be_judged_is_judged_again(bisect, tmp_path):
    traces = history(tmp_path, "gtb")
    assert bisect(*traces, code=125)["cached"] == 0
    assert bisect(*traces, code=125)["cached"] == 2


def test_a_trace_whose_incidents_cannot_be_found_is_not_called_good(bisect, tmp_path, monkeypatch):
    monkeypatch.setattr(criteria, "finish", lambda summary: "the incidents are missing: no space left")
    found = bisect("--incident", "req_to_token", *history(tmp_path, "gb"), code=125)
    assert "no space left" in found["judged"][-1]["words"]


def test_skips_leave_several_and_say_so(bisect, tmp_path):
    found = bisect(*history(tmp_path, "ggttbb"), code=125)
    assert found["first_bad"] is None
    assert found["candidates"] == ["1.2", "1.3", "1.4"]
    assert "damaged or torn" in next(v for v in found["judged"] if v["version"] == "1.3")["words"]
    assert bisect(*history(tmp_path, "ttgtgb"), code=0)["first_bad"] == "1.5"


@pytest.mark.parametrize(
    ("kinds", "code", "problem"),
    [
        ("gggg", 1, "the last version that can be judged is good"),
        ("bbb", 1, "the first version that can be judged is bad already"),
        ("ttt", 125, "no version can be judged"),
    ],
)
def test_ends_that_hold_no_first_bad_version(kinds, code, problem, bisect, tmp_path):
    found = bisect(*history(tmp_path, kinds), code=code)
    assert problem in found["problem"]
    assert found["first_bad"] is None


@pytest.mark.parametrize(
    ("options", "kinds", "first_bad", "words"),
    [
        (["--incident", "kv_changed"], "gbbo", "1.3", "incident kv_changed"),
        (["--finding", "input_not_sampled"], "gbi", "1.2", "incident"),
        (["--sql", "select count(*) > 0 from violations where reasons like '%VERIFY_KV_HASH%'"], "gbo", "1.2", "SQL"),
        (["--reference", str(DATA / "clean_llama.arrow")], "ggb", "1.2", "table: request long"),
        (["--reference", str(DATA / "kv_flip.arrow"), "--no-kv"], "gob", "1.2", "table: request long"),
    ],
)
def test_what_counts_as_bad_is_for_the_user_to_say(options, kinds, first_bad, words, bisect, tmp_path):
    found = bisect(*options, *history(tmp_path, kinds), code=0)
    assert found["first_bad"] == first_bad
    assert words in found["evidence"]["words"]
    assert found["reproduce"].startswith("kvcanary diff " if "--reference" in options else "kvcanary-replay ")
    assert ("--no-kv" in found["reproduce"]) == ("--no-kv" in options)
    if "--sql" in options:  # asked of the report that the replay before it writes
        trace = found["reproduce"].split(";")[0].split()[1]
        words = ["kvcanary", "sql", str(Path(trace).with_suffix(".report")), options[1]]
        assert found["reproduce"] == f"kvcanary-replay {trace}; {shlex.join(words)}"


def test_several_traces_of_a_version_vote(bisect, tmp_path):
    traces = history(tmp_path, "ggb")
    more = [saved(kind, tmp_path / f"more{i}.arrow", "1.1") for i, kind in enumerate(["clean_llama", "table_swap"])]
    assert bisect(*traces, *more, code=0)["first_bad"] == "1.2"
    assert bisect("--vote", "any", *traces, *more, code=0)["first_bad"] == "1.1"
    draw = bisect(*traces, more[1], code=0)
    assert draw["first_bad"] == "1.1"
    assert "1 bad, 1 good" in draw["evidence"]["words"]


def test_a_folder_is_one_run_and_a_file_gives_the_order(bisect, tmp_path):
    runs = []
    for name, kind in (("alpha", "clean_pd"), ("beta", "clean_pd"), ("gamma", "pd_transfer_wrong_stride")):
        folder = tmp_path / name
        folder.mkdir()
        for side in ("prefill", "decode"):
            keep(DATA / "simulated" / kind / f"{side}.arrow", folder / f"{side}.arrow")
        runs.append(folder)
    order = tmp_path / "order.txt"
    order.write_text("# oldest first\nalpha\n\nbeta\ngamma  # bad\n")
    found = bisect("--order", order, *runs, code=0)
    assert found["first_bad"] == "gamma"
    assert found["reproduce"] == f"kvcanary-replay {runs[2]}"  # the two sides show it together


@pytest.mark.parametrize("version", ["0.5.23", "", "main-dirty"])
def test_versions_without_an_order_are_taken_as_they_are_given(bisect, tmp_path, version):
    builds = [
        saved(kind, tmp_path / f"build{n}.arrow", version) for n, kind in ((2, "clean_llama"), (10, "table_swap"))
    ]
    found = bisect(*sorted(builds), code=0)  # as build*.arrow gives them
    assert (found["first_bad"], found["last_good"]) == (str(builds[1]), str(builds[0]))
    assert "judged by one run" in found["doubt"]
    backwards = bisect(*builds, saved("clean_llama", tmp_path / "build1.arrow", version), code=1)
    assert backwards["versions"][-1] == str(tmp_path / "build1.arrow")


def test_what_cannot_be_bisected_is_said(bisect, tmp_path):
    good, bad = history(tmp_path, "gb")
    order = tmp_path / "order.txt"
    order.write_text("1.0\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, words in (
        ([good], "at least two versions"),
        ([good, empty], "at least two versions"),
        ([good, DATA / "versions" / "sglang_0.5.23.arrow"], "several engines, sglang, transformers"),
        (["--order", order, good, bad], "does not say where 1.1 belongs"),
        (["--order", tmp_path / "none", good, bad], "cannot be read"),
        (["--incident", "gremlin", good, bad], "no incident of kind 'gremlin'"),
        (["--finding", "gremlin", good, bad], "no finding of kind 'gremlin'"),
        (["--incident", "kv_changed", "--sql", "select 1", good, bad], "exclude one another"),
        (["--sql", "select nothing", good, bad], "nothing"),
        (["--reference", order, good, bad], "--reference"),
        (["--no-kv", good, bad], "name one"),
        (["--kv-tolerance", "0.1", good, bad], "name one"),
        (["--reference", good, "--no-kv", "--kv-tolerance", "0.1", good, bad], "exclude one another"),
        (["--reference", good, "--kv-tolerance", "nan", good, bad], "--kv-tolerance is nan, expected a number"),
        ([good, DATA / "README.md"], "not a kvcanary trace"),
    ):
        assert words in bisect(*arguments, code=2), arguments


def test_for_people(tmp_path):
    traces = [str(trace) for trace in [*history(tmp_path, "gb"), torn("clean_llama", tmp_path / "t.arrow", "1.0.1")]]
    done = CliRunner().invoke(bisect_command, ["--no-cache", *traces])
    assert done.exit_code == 125
    lines = done.output.splitlines()
    assert lines[0].startswith("good 1.0   clean")
    assert "SKIPS   the first bad version is one of 1.0.1, 1.1: those between could not be judged" in lines
    assert any(line.startswith("there   1.1: incident req_to_token") for line in lines)
    assert lines[-1] == f"next    kvcanary-replay {traces[1]}"


def test_a_folder_is_read_as_a_replay_reads_it(bisect, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    torn("clean_llama", folder / "trace.arrow", "1.0")  # what was recovered afterwards stands for it
    saved("clean_llama", folder / "trace.recovered.arrow", "1.0")
    (folder / "._trace.arrow").write_text("what some systems leave beside every file")
    found = bisect(folder, saved("table_swap", tmp_path / "b.arrow", "1.1"), code=0)
    assert found["judged"][0]["outcome"] == "good"


def test_what_is_wrong_is_told_to_scripts_too(tmp_path):
    done = run("bisect", "--json", tmp_path / "none")
    told = json.loads(done.stdout)
    assert (done.returncode, told["exit_code"]) == (2, 2)
    assert "no such file" in told["error"]


def test_segments_are_compared_with_a_reference_as_one_recording(bisect, tmp_path):
    configuration = CONFIGURATIONS["mha"]
    runs = {"reference": {}, "same": {"chunk_tokens": 20}, "other": {"seed": 4}}
    for name, changes in runs.items():
        (tmp_path / name).mkdir()
        engine = dataclasses.replace(configuration.engine_config(3), noise=False, sampler="random", **changes)
        cut = {} if name == "reference" else {"segment_bytes": 60_000, "flush_bytes": 20_000}
        with SimulatedEngine(engine, configuration.requests(3), tmp_path / name / "trace.arrow", **cut) as running:
            running.run()
    assert len(list((tmp_path / "same").iterdir())) > 2
    order = tmp_path / "order.txt"
    order.write_text("same\nother\n")
    reference = tmp_path / "reference" / "trace.arrow"
    words = ("--reference", reference, "--no-kv", "--order", order, tmp_path / "same", tmp_path / "other")
    found = bisect(*words, code=0)
    assert found["first_bad"] == "other"
    assert found["reproduce"] == f"kvcanary diff --no-kv {reference} {tmp_path / 'other'}"
    assert bisect(*words, code=0)["reproduce"] == found["reproduce"]  # as the cache tells it
