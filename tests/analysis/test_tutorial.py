"""docs/guide/tutorial.md: every command runs in a clone, ends as it says, and prints the lines that it shows."""

import os
import re
import shlex
import sys
from pathlib import Path

from click.testing import CliRunner
from kvcanary.cli import main

from ..support.places import ROOT

TEXT = (ROOT / "docs" / "guide" / "tutorial.md").read_text()


def steps():
    """Yield each command, its exit code, and the lines shown of what it prints."""
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL):
        for step in block.split("$ ")[1:]:
            line, *shown = step.splitlines()
            command, _, code = line.partition("   # exit code ")
            yield command, int(code or 0), shown


def squeezed(text):
    return " ".join(text.split())


def test_every_command_does_what_the_page_shows(tmp_path, monkeypatch):
    for name in ("data", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ran = []
    for command, code, shown in steps():
        # In this process, which has imported everything already: one interpreter's start a step would take longest.
        words = shlex.split(command)
        done = CliRunner().invoke(main, words[1:] if words[0] == "kvcanary" else ["replay", *words[1:]])
        assert done.exit_code == code, f"{command}\n{done.output}\n{done.exception!r}"
        for line in shown:
            assert squeezed(line) in squeezed(done.stdout), f"{command} does not print {line!r} but\n{done.stdout}"
        ran.append(" ".join(words[:2]))
    assert ran == [
        "kvcanary inspect",
        "kvcanary-replay --report",
        "kvcanary triage",
        "kvcanary sql",
        "kvcanary sql",
        "kvcanary page",
        "kvcanary diff",
        "kvcanary bisect",
        "kvcanary diff",
    ]
