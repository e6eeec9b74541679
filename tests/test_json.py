"""`--json` means the same everywhere: one document on standard output, of an error too, and the same exit code."""

import json
import shutil
from pathlib import Path

import pytest
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .support.commands import run, run_replay
from .support.places import DATA

COMMANDS = {
    "inspect": ["inspect", "TRACE"],
    "recover": ["recover", "TRACE", "--force"],
    "simulate": ["simulate", "-o", "NEW", "--requests", "2"],
    "lab list": ["lab", "list"],
    "replay": ["replay", "--no-report", "TRACE"],
    "diff": ["diff", "TRACE", "TRACE"],
    "sql": ["sql", "TRACE", "select 1 as a"],
    "incidents": ["incidents", "REPORT"],
    "triage": ["triage", "REPORT"],
    "expand": ["expand", "REPORT"],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("json")
    trace = Path(shutil.copy(DATA / "kv_flip.arrow", folder))
    report = folder / "kv_flip.report"
    report.mkdir()
    replay(trace, settings=ReplaySettings(), report=report)
    return {"TRACE": str(trace), "REPORT": str(report), "NEW": str(folder / "new.arrow")}


@pytest.mark.parametrize("name", COMMANDS)
def test_one_document_and_nothing_else(name: str, places: dict[str, str]) -> None:
    words = [places.get(word, word) for word in COMMANDS[name]]
    done = run(*words, "--json")
    assert json.loads(done.stdout)
    assert done.returncode == (1 if name == "replay" else 0)
    again = run(*words, "--no-such-option", "--json")
    said = json.loads(again.stdout)
    assert (said["error"].startswith("No such option"), again.returncode) == (True, 2)
    assert said["hint"] == f"kvcanary {name} --help"


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["inspect", "gone.arrow"], "gone.arrow: ", ""),
        (["recover", "gone.arrow"], "gone.arrow: ", ""),
        (["diff", "gone.arrow", "gone.arrow"], "gone.arrow: ", ""),
        (["sql", "gone.arrow"], "gone.arrow: no such file or folder", "name a trace or a report folder"),
        (["sql", "TRACE", "select nonsense from losses"], "Binder Error: Referenced column", ""),
        (["triage", "gone.report"], "gone.report: no such f", "name a trace or a report folder"),
        (["incidents", "gone.report"], "gone.report: no such f", "name a trace or a report folder"),
        (["page", "gone.report"], "gone.report: no such f", "name a trace or a report folder"),
    ],
)
def test_an_error_has_one_shape(words: list[str], error: str, hint: str, places: dict[str, str]) -> None:
    done = run(*[places.get(word, word) for word in words], "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, done.stderr.startswith("Error: ")) == (2, True)
    assert said["error"].startswith(error)
    assert said["hint"] == hint
    assert set(said) >= {"error", "hint"}


def test_a_trace_that_cannot_be_replayed_is_a_document_too() -> None:
    for done in (run("replay", "gone.arrow", "--json"), run_replay("gone.arrow", "--json")):
        said = json.loads(done.stdout)
        assert said["error"].startswith("gone.arrow: ")
        assert (said["trace"], said["exit_code"], "hint" in said) == ("gone.arrow", 2, True)
