"""A bug planted in one of thirty commits of a tiny engine, one of which cannot be tested: found by git, and by kvcanary."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.analysis.cli.bisect import bisect_command

from .tiny_engine import FIRST_BAD, git, make_repository

BIN = Path(sys.executable).parent
UNTESTABLE = 15  # the first one that a bisection of 1 to 30 asks for


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("git") / "engine"
    return folder, make_repository(folder, untestable=UNTESTABLE)


@pytest.mark.long
def test_git_bisect_run(repository):
    """As docs/guide/bisect.md has it: record, or skip; then the replay's exit code is the verdict."""
    folder, commits = repository
    engine = f"{shlex.quote(sys.executable)} engine.py trace.arrow || exit 125; "
    replay = f"{shlex.quote(str(BIN / 'kvcanary-replay'))} --quiet --no-report trace.arrow"
    git(folder, "bisect", "start", commits[-1], commits[0])
    said = git(folder, "bisect", "run", "sh", "-c", engine + replay)
    told = git(folder, "bisect", "log")
    git(folder, "bisect", "reset")
    assert f"{commits[FIRST_BAD - 1]} is the first bad commit" in said
    assert "Revision 19" in said
    assert f"git bisect skip {commits[UNTESTABLE - 1]}" in told


def test_kvcanary_bisect_run(repository, tmp_path, monkeypatch):
    folder, commits = repository
    git(folder, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"), commits[0])
    command = f"git checkout -q {{version}} && {shlex.quote(sys.executable)} engine.py {{trace}}"
    words = ["run", "--json", "--keep", str(tmp_path / "traces")]
    words += ["--good", commits[0], "--bad", commits[-1], "--", "sh", "-c", command]
    monkeypatch.chdir(tmp_path / "tree")
    done = CliRunner().invoke(bisect_command, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["first_bad"] == commits[FIRST_BAD - 1]
    assert found["last_good"] == commits[FIRST_BAD - 2]
    assert "first violation in forward" in found["evidence"]["words"]
    outcomes = {trial["version"]: trial["outcome"] for trial in found["judged"]}
    assert outcomes[commits[UNTESTABLE - 1]] == "skip"
    assert len(outcomes) <= 8
    assert "this revision does not start" in done.stderr
    kept = tmp_path / "traces" / f"{found['first_bad']}-1" / "trace.arrow"
    assert kept.is_file()
    assert found["reproduce"] == f"kvcanary-replay {kept}"
    # All trials stand in the log: the same command again runs nothing.
    log = Path(".kvcanary", "bisect.jsonl")
    before = log.read_text()
    assert json.loads(CliRunner().invoke(bisect_command, words).stdout)["cached"] == len(outcomes)
    assert log.read_text() == before
    told = CliRunner().invoke(bisect_command, ["log"]).stdout
    assert f"bad  {found['first_bad'][:12]} (Revision 19)" in told
    assert (
        f"FOUND   {found['first_bad'][:12]} (Revision 19)"
        in CliRunner().invoke(bisect_command, [*words[:1], *words[2:]]).stdout
    )
    # git is none the wiser, and back where it was.
    assert git(tmp_path / "tree", "status", "--porcelain") == ""
    assert CliRunner().invoke(bisect_command, ["reset"]).exit_code == 0
    assert git(tmp_path / "tree", "rev-parse", "HEAD").strip() == commits[0]
    assert not log.exists()
