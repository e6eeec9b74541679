"""`kvcanary bisect run`: what the command gets, how it can fail, tries, time limit, and the log."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.analysis.commands.bisect import bisect_command

from .traces import DATA

VERSIONS = ["v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8"]
LISTED = ",".join(VERSIONS)
# An engine of the versions named: what a version does stands in the file `deeds`, a word a run.
ENGINE = """
import json, os, pathlib, shutil, sys, time
version, trace = os.environ["KVCANARY_BISECT_VERSION"], pathlib.Path(os.environ["KVCANARY_BISECT_TRACE"])
assert trace.parent == pathlib.Path(os.environ["KVCANARY_TRACE"])
assert sys.argv[1:] == [version, str(trace), str(trace.parent)], sys.argv
place = pathlib.Path(DEEDS)
deeds = json.loads(place.read_text())
deed = deeds["do"][version].pop(0) if len(deeds["do"][version]) > 1 else deeds["do"][version][0]
deeds["ran"].append(version)
place.write_text(json.dumps(deeds))
if deed == "hang":
    time.sleep(60)
if deed in ("skip", "fail", "missing"):
    print("cannot build " + version)
    sys.exit({"skip": 125, "fail": 3, "missing": 127}[deed])
if deed != "nothing":
    shutil.copy(pathlib.Path(DATA) / ({"good": "clean_llama", "bad": "table_swap"}[deed] + ".arrow"), trace)
"""


class Engine:
    """Versions that do as they are told."""

    def __init__(self, folder):
        self.folder = folder
        self.script = folder / "engine.py"
        self.deeds = folder / "deeds.json"
        head = f"DEEDS, DATA = {str(self.deeds)!r}, {str(DATA)!r}\n"
        self.script.write_text(head + ENGINE)

    def do(self, **deeds):
        known = {version: ["good" if version < "v5" else "bad"] for version in VERSIONS}
        self.deeds.write_text(json.dumps({"do": {**known, **{v: d.split() for v, d in deeds.items()}}, "ran": []}))

    @property
    def ran(self):
        return json.loads(self.deeds.read_text())["ran"]

    def bisect(self, *options, code, versions=LISTED, good="v1", bad="v8", command=None):
        words = ["run", "--json", "--log", str(self.folder / "log"), "--good", good, "--bad", bad]
        words += ["--versions", versions] if versions else []
        command = command or [sys.executable, "-S", str(self.script), "{version}", "{trace}", "{out}"]
        done = CliRunner().invoke(bisect_command, [*words, *options, "--", *command])
        assert done.exit_code == code, (done.output, done.exception)
        return json.loads(done.stdout) if code != 2 else done.stderr


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.delenv("KVCANARY_TRACE", raising=False)
    made = Engine(tmp_path)
    made.do()
    return made


def test_each_version_is_recorded_and_judged_once(engine):
    found = engine.bisect(code=0)
    assert (found["first_bad"], found["last_good"]) == ("v5", "v4")
    assert engine.ran == ["v1", "v8", "v4", "v6", "v5"]
    assert found["evidence"]["words"].startswith("incident req_to_token")
    again = f"{sys.executable} -S {engine.script} v5 trace.arrow . && kvcanary-replay *.arrow"
    assert found["reproduce"] == f"KVCANARY_BISECT_VERSION=v5 KVCANARY_TRACE=. {again}"
    log = [json.loads(line) for line in (engine.folder / "log").read_text().splitlines()]
    assert [line["version"] for line in log[1:]] == engine.ran


@pytest.mark.parametrize(
    ("option", "value", "look"),
    [
        (
            "--sql",
            "select count(*) > 0 from violations",
            "{ kvcanary-replay *.arrow; kvcanary sql *.report 'select count(*) > 0 from violations'; }",
        ),
        ("--reference", str(DATA / "clean_llama.arrow"), 'do kvcanary diff REFERENCE "$trace"; done'),
    ],
)
def test_what_was_not_kept_is_recorded_again_and_asked_the_same(option, value, look, engine):
    found = engine.bisect(option, value, code=0)
    assert found["first_bad"] == "v5"
    assert found["reproduce"].endswith(look.replace("REFERENCE", value))


def test_what_fails_is_skipped(engine):
    engine.do(v4="skip", v3="fail", v5="nothing")
    found = engine.bisect(code=125)
    assert found["candidates"] == ["v3", "v4", "v5", "v6"]
    why = {trial["version"]: trial["words"] for trial in found["judged"]}
    assert why["v4"] == "the command said skip (125)"
    assert why["v3"] == "the command ended with 3: cannot build v3"
    assert why["v5"] == "no trace was recorded"


def test_a_time_limit_skips_and_ends_what_the_command_started(engine):
    # A shell is up at once, so that only the version that hangs can meet the limit.
    traces = {"good": DATA / "clean_llama.arrow", "bad": DATA / "table_swap.arrow"}
    script = f"case $0 in v2) sleep 300 & echo $! > {engine.folder}/pid; wait;; v1) cp {traces['good']} $1;; *) cp {traces['bad']} $1;; esac"
    command = ["sh", "-c", script, "{version}", "{trace}"]
    found = engine.bisect("--timeout", "6", versions="v1,v2,v3", bad="v3", code=125, command=command)
    assert found["candidates"] == ["v2", "v3"]
    assert found["judged"][-1]["words"] == "took more than 6 s"
    left = Path("/proc") / (engine.folder / "pid").read_text().strip() / "stat"
    assert not left.exists() or left.read_text().split()[2] == "Z"


def test_an_end_that_cannot_be_judged_ends_it(engine):
    engine.do(v8="fail")
    assert "the bad end cannot be judged: the command ended with 3" in engine.bisect(code=125)["problem"]
    assert engine.ran == ["v1", "v8"]


def test_a_fault_that_shows_now_and_then(engine):
    some = {"versions": "v3,v4,v5,v6", "good": "v3", "bad": "v6"}
    engine.do(v4="good good bad", v5="good bad bad", v6="skip bad bad")
    found = engine.bisect("--tries", "3", **some, code=0)
    assert found["first_bad"] == "v5"
    assert engine.ran.count("v4") == 2  # two good ones of three: decided
    assert engine.ran.count("v5") == 3
    assert "2 bad, 1 good" in found["evidence"]["words"]
    engine.do(v4="good good bad", v5="good bad bad", v6="skip bad bad")
    assert engine.bisect("--tries", "3", "--vote", "any", "--fresh", **some, code=0)["first_bad"] == "v4"


def test_it_goes_on_where_it_was_interrupted(engine):
    engine.do(v4="missing")
    said = engine.bisect(code=2)
    assert "127" in said
    assert engine.ran == ["v1", "v8", "v4"]
    log = engine.folder / "log"
    with log.open("a") as file:
        file.write('{"version": "v6", "judg')  # killed while it wrote
    engine.do()
    found = engine.bisect(code=0)
    assert engine.ran == ["v4", "v6", "v5"]
    assert found["cached"] == 2
    assert "another bisection" in engine.bisect("--incident", "kv_changed", code=2)
    log.write_text(log.read_text().splitlines()[0] + "\nnonsense\n{}\n")
    assert "line 2 is no line" in engine.bisect(code=2)


def test_kept_traces_show_it_and_older_ones_are_not_judged_along(engine):
    kept = engine.folder / "kept"
    older = kept / "v4-1" / "rank0"
    older.mkdir(parents=True)
    shutil.copy(DATA / "table_swap.arrow", older / "trace.arrow")
    assert engine.bisect("--keep", str(kept), code=0)["reproduce"] == f"kvcanary-replay {kept}/v5-1/trace.arrow"


def test_a_run_gone_on_with_names_no_trace_that_was_not_kept(engine):
    engine.bisect(code=0)
    found = engine.bisect("--keep", str(engine.folder / "kept"), code=0)
    assert found["cached"] == 5
    assert found["reproduce"].endswith("&& kvcanary-replay *.arrow")


def test_what_is_wrong_is_said(engine, monkeypatch):
    assert "--good v9 is not among" in engine.bisect(good="v9", code=2)
    assert "oldest first" in engine.bisect(good="v8", bad="v1", code=2)
    assert "cannot be run" in engine.bisect(command=["/no/such/engine"], code=2)
    monkeypatch.chdir(engine.folder)
    assert "--versions" in engine.bisect(versions=None, code=2)
    listed = engine.folder / "versions.txt"
    listed.write_text("v1\nv1\n")
    assert "twice" in engine.bisect("--fresh", versions=str(listed), code=2)
    listed.write_text("\n".join(VERSIONS))
    assert engine.bisect("--fresh", versions=str(listed), code=0)["first_bad"] == "v5"
    assert (engine.folder / "log").stat().st_mode & 0o777 == 0o600
