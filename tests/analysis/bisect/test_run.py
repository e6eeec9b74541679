"""`kvcanary bisect run`: what the command gets, how it can fail, tries, time limit, and the log."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.analysis.cli.bisect import bisect_command

from ...support.places import DATA

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

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
    told = "KVCANARY_BISECT_VERSION=v5 KVCANARY_TRACE=. KVCANARY_BISECT_TRACE=trace.arrow"
    assert found["reproduce"] == f"{told} {again}"
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
    # setpgid, as `timeout` and a shell with job control do for what they start
    apart = f'{sys.executable} -S -c \'import os, time; os.setpgid(0, 0); open("{engine.folder}/pid", "w").write(str(os.getpid())); time.sleep(300)\''
    script = f"case $0 in v2) {apart} & wait;; v1) cp {traces['good']} $1;; *) cp {traces['bad']} $1;; esac"
    command = ["sh", "-c", script, "{version}", "{trace}"]
    found = engine.bisect("--timeout", "6", versions="v1,v2,v3", bad="v3", code=125, command=command)
    assert found["candidates"] == ["v2", "v3"]
    assert found["judged"][-1]["words"] == "took more than 6 s"
    assert not running(engine.folder / "pid")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_whatever_ends_the_bisection_ends_the_trial_too(sent, tmp_path):
    started = tmp_path / "pid"
    command = ["sh", "-c", f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 300"]
    words = ["bisect", "run", "--good", "1", "--bad", "2", "--versions", "1,2", "--log", str(tmp_path / "log"), "--"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-m", "kvcanary", *words, *command], env=environment) as bisection:
        while not started.exists():
            time.sleep(0.01)
            assert bisection.poll() is None
        bisection.send_signal(sent)
    assert bisection.returncode == 128 + sent
    assert not running(started)
    assert not list(tmp_path.glob("kvcanary-*"))  # the traces of the trial


def running(file):
    """Whether the process whose number stands in a file runs."""
    stat = Path("/proc") / file.read_text().strip() / "stat"
    return stat.exists() and stat.read_text().split()[2] != "Z"


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
    begun = log.read_text().splitlines()[0]
    log.write_text(begun + "\nnonsense\n{}\n")
    assert "line 2 is no line" in engine.bisect(code=2)
    for torn in (begun, begun[:30]):  # killed while it wrote the very first line
        log.write_text(torn)
        engine.do()
        assert engine.bisect(code=0)["first_bad"] == "v5"
        assert log.read_text().splitlines()[0] == begun
        assert engine.bisect(code=0)["cached"] == 5


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": 1}\n{"b": 2}', '{"a": 1}\n{"b": ', "a line", '{"bisect": {}}'])
def test_a_file_that_is_no_log_of_this_bisection_is_left_as_it_is(text, engine):
    log = engine.folder / "log"
    log.write_text(text)
    assert "--log" in engine.bisect(code=2)
    assert log.read_text() == text
    assert not engine.ran


def test_kept_traces_show_it_and_older_ones_are_not_judged_along(engine):
    kept = engine.folder / "kept"
    older = kept / "v4-1" / "rank0"
    older.mkdir(parents=True)
    shutil.copy(DATA / "table_swap.arrow", older / "trace.arrow")
    engine.do(v6="skip")
    assert engine.bisect("--keep", str(kept), code=0)["reproduce"] == f"kvcanary-replay {kept}/v5-1/trace.arrow"
    # What was kept can be bisected again, as a folder or as what lies in it, and knows its order.
    assert not (kept / "v6-1").exists()
    (kept / "v5-1" / "traces").mkdir()  # where an engine's own script may put them
    (kept / "v5-1" / "trace.arrow").rename(kept / "v5-1" / "traces" / "trace.arrow")
    for paths in ([kept], sorted(kept.iterdir())):
        done = CliRunner().invoke(bisect_command, ["--json", "--no-cache", *map(str, paths)])
        again = json.loads(done.stdout)
        assert (again["first_bad"], again["versions"]) == ("v5", ["v1", "v4", "v5", "v8"]), done.stderr


def test_versions_whose_names_are_no_file_names_are_kept_apart(engine):
    kept = engine.folder / "kept"
    script = f"case $0 in a/b) cp {DATA}/clean_llama.arrow $1;; *) cp {DATA}/table_swap.arrow $1;; esac"
    long = "v" * 300
    some = {"versions": f"a/b,{long},a_b", "good": "a/b", "bad": "a_b"}
    command = ["sh", "-c", script, "{version}", "{trace}"]
    assert engine.bisect("--keep", str(kept), **some, command=command, code=0)["first_bad"] == long
    assert len(list(kept.glob("*/trace.arrow"))) == 3


def test_a_fault_that_shows_now_and_then_is_said_to_be_one(engine):
    assert "--tries 3 --vote any" in engine.bisect(code=0)["doubt"]
    engine.do(v5="good bad good")
    found = engine.bisect("--fresh", "--tries", "3", "--vote", "any", code=0)
    assert found["first_bad"] == "v5"
    assert found["doubt"].startswith("the fault shows now and then: v5")


def test_thousands_of_versions(engine):
    script = f"if [ $0 -lt 3210 ]; then cp {DATA}/clean_llama.arrow $1; else cp {DATA}/table_swap.arrow $1; fi"
    many = {"versions": ",".join(map(str, range(1, 5001))), "good": "1", "bad": "5000"}
    found = engine.bisect(**many, command=["sh", "-c", script, "{version}", "{trace}"], code=0)
    assert found["first_bad"] == "3210"
    assert len(found["judged"]) < 16


def test_a_run_gone_on_with_names_no_trace_that_was_not_kept(engine):
    engine.bisect(code=0)
    found = engine.bisect("--keep", str(engine.folder / "kept"), code=0)
    assert found["cached"] == 5
    assert found["reproduce"].endswith("&& kvcanary-replay *.arrow")


def test_what_is_wrong_is_said(engine, monkeypatch):
    assert "--good v9 is not among" in engine.bisect(good="v9", code=2)
    assert "oldest first" in engine.bisect(good="v8", bad="v1", code=2)
    assert "cannot be run" in engine.bisect(command=["/no/such/engine"], code=2)
    assert "names v2 twice" in engine.bisect(versions="v1,v2,v2,v8", code=2)
    assert "if that is a file, there is none" in engine.bisect(versions="versions.txt", code=2)
    assert "and 180 more" in engine.bisect(versions=",".join(f"w{n}" for n in range(200)), code=2)
    assert "--timeout is nan" in engine.bisect("--timeout", "nan", code=2)
    monkeypatch.chdir(engine.folder)
    assert "--versions" in engine.bisect(versions=None, code=2)
    listed = engine.folder / "versions.txt"
    listed.write_text("v1\nv1\n")
    assert "twice" in engine.bisect("--fresh", versions=str(listed), code=2)
    listed.write_text("v1\nv\x005\nv8\n")
    assert "NUL byte" in engine.bisect("--fresh", versions=str(listed), code=2)
    listed.write_text("\n".join(VERSIONS))
    assert engine.bisect("--fresh", versions=str(listed), code=0)["first_bad"] == "v5"
    assert (engine.folder / "log").stat().st_mode & 0o777 == 0o600
