"""The pytest plugin: a test whose engine damages its KV cache fails, with the sentence of the incident."""

import fcntl
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from ..support.places import DATA, ROOT

ENGINES = '''
import os, shutil, subprocess, sys
from pathlib import Path

DATA = Path("DATA")

def engine(trace, name):
    """An engine leaves a trace where the environment says."""
    shutil.copy(DATA / trace, Path(os.environ["KVCANARY_TRACE"]) / name)

def test_clean():
    engine("clean_llama.arrow", "clean.arrow")

def test_without_an_engine():
    pass

def test_damage():
    engine("simulated/mla_free_too_early.arrow", "damaged.arrow")

def test_in_a_process_of_its_own():
    code = "from test_engines import *; engine('kv_flip.arrow', 'child.arrow')"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
'''.replace('DATA")', f'{DATA}")')


def pytest_run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_engines.py").write_text(ENGINES)
    plugin = ["-p", "no:cacheprovider", "--rootdir", str(folder)]
    if "kvcanary" not in entry_points(group="pytest11").names:  # the package is on the path, and not installed
        plugin += ["-p", "kvcanary.analysis.pytest_plugin"]
    words = [sys.executable, "-m", "pytest", *plugin, *options]
    environ = os.environ | {"PYTEST_ADDOPTS": "", "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return subprocess.run([*words, folder], cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_an_incident_fails_its_test(tmp_path: Path) -> None:
    mine = tmp_path / ".kvcanary" / "pytest" / "gw0" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    (mine.parent / "old.arrow").touch()
    done = pytest_run(tmp_path, "--kvcanary", "-n", "1")
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "found   294 violations, 4 findings, 1 incidents" in done.stdout
    assert (
        "FAILED test_engines.py::test_damage - kvcanary: a page was given back too early (free_too_early" in done.stdout
    )
    assert "FAILED test_engines.py::test_in_a_process_of_its_own - kvcanary: " in done.stdout
    kept = sorted(path.name for path in (tmp_path / ".kvcanary").rglob("*.arrow"))
    assert kept == ["child.arrow", "damaged.arrow"] and mine.read_text() == "mine"
    assert "3 replay(s) after 3 test(s): 1 clean, 2 corrupt" in done.stdout


@pytest.mark.long
def test_runs_beside_one_another_judge_their_own_engines(tmp_path: Path) -> None:
    """A run that begins while another one is under way takes none of its traces, in the same folder."""
    theirs = tmp_path / "traces" / "main"
    theirs.mkdir(parents=True)
    shutil.copy(DATA / "kv_flip.arrow", theirs / "theirs.arrow")
    lock = os.open(theirs, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = pytest_run(tmp_path, "--kvcanary", "--kvcanary-dir", "traces", "-k", "clean or without")
    finally:
        os.close(lock)
    assert "2 passed" in done.stdout, done.stdout
    assert "1 replay(s) after 1 test(s): 1 clean" in done.stdout
    assert (theirs / "theirs.arrow").exists()
    assert not [*(tmp_path / "traces" / "main-2").glob("*.arrow")]
    done = pytest_run(tmp_path, "--kvcanary", "--kvcanary-dir", "traces", "-k", "clean or without")
    assert "1 replay(s) after 1 test(s): 1 clean" in done.stdout, done.stdout
    assert not (theirs / "theirs.arrow").exists(), "left by a run that is over"


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    done = pytest_run(tmp_path)
    assert "3 failed, 1 passed" in done.stdout
    assert not (tmp_path / ".kvcanary").exists()


ACTION = ROOT / ".github" / "actions" / "replay"


def act(folder: Path, traces: object, *, first_on_path: Path, **more: str) -> tuple[int, str, str]:
    """Run the GitHub action's script; return its exit code, its outputs and the job's summary."""
    summary, output = folder / "summary.md", folder / "output"
    given = {"TRACES": str(traces), "ACTION": str(ACTION), "RUNNER_TEMP": str(folder)} | more
    given |= {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(output), "GITHUB_WORKSPACE": str(folder)}
    path = os.pathsep.join(map(str, (first_on_path, Path(sys.executable).parent, os.environ["PATH"])))
    done = subprocess.run(["bash", ACTION / "replay.sh"], env=os.environ | given | {"PATH": path}, check=False)
    return done.returncode, output.read_text(), summary.read_text()


@pytest.mark.parametrize(
    ("trace", "code", "said"),
    [
        ("kv_flip.arrow", 1, "kv\\_changed, confidence medium)"),
        ("gone.arrow", 2, "no such file"),
    ],
)
def test_the_github_action_puts_incidents_into_the_summary(tmp_path: Path, trace: str, code: int, said: str) -> None:
    *ended, summary = act(tmp_path, DATA / trace, first_on_path=Path(sys.executable).parent)
    assert ended == [code, f"exit-code={code}\n"]
    assert said in summary, summary


@pytest.mark.parametrize(("inconclusive", "code"), [("", 0), ("false", 0), ("true", 125)])
def test_whether_an_inconclusive_verdict_fails_the_job_is_an_input(
    tmp_path: Path, inconclusive: str, code: int
) -> None:
    replay = tmp_path / "kvcanary-replay"
    replay.write_text('#!/bin/sh\necho \'{"verdict": "inconclusive", "trace": "t.arrow"}\'\nexit 125\n')
    replay.chmod(0o700)
    *ended, summary = act(tmp_path, "t.arrow", first_on_path=tmp_path, INCONCLUSIVE=inconclusive)
    assert ended == [code, "exit-code=125\n"]
    assert "inconclusive" in summary
