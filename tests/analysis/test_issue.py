"""The text for a tracker: all that an issue needs, and nothing that was said to the model."""

import json
import shutil
from pathlib import Path

import pytest
from kvcanary.analysis.errors import AnalysisError
from kvcanary.analysis.issue import Masked
from kvcanary.analysis.shrink.shrink import shrink
from kvcanary.analysis.store import report_incidents
from kvcanary.cli import main
from kvcanary.recorder.trace.files import shrunk_path
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.places import DATA


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report beside its trace, of a page that another request's prompt had filled."""
    folder = tmp_path_factory.mktemp("issue")
    shutil.copy(DATA / "corpus" / "vllm-short_hash.arrow", folder / "t.arrow")
    (folder / "t.report").mkdir()
    replay(folder / "t.arrow", settings=ReplaySettings(), report=folder / "t.report")
    return folder / "t.report"


def text_of(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["report", "--json", *map(str, arguments)])
    assert end.value.code == 0
    return json.loads(capsys.readouterr().out)["text"]


def test_it_has_what_an_issue_needs_and_no_name_token_or_path(report, capsys):
    text = text_of(capsys, "--issue", report)
    for said in (
        "`tokens_truncated_hash_kept`",
        "vllm 0.32.0",
        "pages of 32",
        "hit_differs",
        "kvcanary shrink t.arrow",
    ):
        assert said in text
    with TraceReader(report.with_name("t.arrow")) as reader:
        names = {name for batch in reader.stream() for name in batch.strings("name") if name}
    assert not [name for name in names if name in text]
    assert str(report.parent) not in text and "token 264" not in text and "token T1" in text


def test_the_shrunk_trace_beside_it_is_named(report, capsys):
    shrink([report.with_name("t.arrow")], report.with_name("t.shrunk.arrow"), seconds=1)
    text = text_of(capsys, "--issue", report)
    assert "kvcanary-replay t.shrunk.arrow" in text and "of 183 events that shows it" in text


def test_a_shrunk_trace_is_what_its_own_report_asks_to_attach(report, capsys, tmp_path):
    small = tmp_path / "small.arrow"
    shrink([report.with_name("t.arrow")], small, seconds=1)
    (tmp_path / "small.report").mkdir()
    replay(small, settings=ReplaySettings(), report=tmp_path / "small.report")
    text = text_of(capsys, "--issue", tmp_path / "small.report")
    assert "kvcanary-replay small.arrow" in text and "kvcanary shrink " not in text.split("**Reproducer**")[1]
    assert "equest R" in text and "1 requests" not in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--issue", "--incident", "7"], "has 1 incident(s); kvcanary incidents "),
        ([], "--issue"),
        (["--issue", "--shrunk"], "no shrunk trace"),
    ],
)
def test_what_is_wrong_is_said(report, capsys, arguments, says):
    whole = [report.with_name("t.arrow")] if arguments[-1:] == ["--shrunk"] else []
    with pytest.raises(SystemExit) as end:
        main(["report", "--json", *arguments, *map(str, whole), str(report)])
    assert end.value.code == 2 and says in json.loads(capsys.readouterr().out)["error"]


def test_the_text_takes_the_place_of_no_file_that_it_is_made_of(report, capsys):
    trace = report.with_name("t.arrow")
    before = trace.read_bytes()
    with pytest.raises(SystemExit) as end:
        main(["report", "--issue", str(report), "-o", str(trace)])
    assert (end.value.code, trace.read_bytes()) == (2, before)
    with pytest.raises(SystemExit) as end:
        main(["report", "--issue", str(report), "-o", str(report.with_name("issue.md"))])
    assert end.value.code == 0 and report.with_name("issue.md").stat().st_mode & 0o777 == 0o600


def test_a_report_that_may_only_be_read_has_its_issue_all_the_same(report, tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise AnalysisError("cannot be written")

    monkeypatch.setattr(report_incidents, "write_incidents", refuse)
    shutil.copytree(report, tmp_path / "t.report", ignore=shutil.ignore_patterns("incident*"))
    shutil.copy(report.with_name("t.arrow"), tmp_path)
    one, other = (text_of(capsys, "--issue", folder) for folder in (tmp_path / "t.report", report))
    assert one.partition("**Reproducer**")[0] == other.partition("**Reproducer**")[0]


@pytest.mark.parametrize("given", ["t.arrow", "t.000003.arrow", "t"])
def test_a_shrunk_trace_has_one_name(given):
    assert shrunk_path(Path("/a") / given) == Path("/a/t.shrunk.arrow")


@pytest.mark.parametrize("name", ["R2-customer", "R22b", "Rabbit"])
def test_a_name_that_begins_like_one_of_ours_is_masked(name):
    assert name not in Masked(["first"]).text(f"held by request {name}; then by request R1")
