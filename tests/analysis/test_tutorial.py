"""docs/guide/tutorial.md: every command runs in a clone, ends as it says, and prints the lines that it shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from ..support.commands import run
from ..support.places import COMPILED_LOOPS, ROOT

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
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--shared", ROOT, clone], check=True)
    monkeypatch.chdir(clone)
    for name in [name for name in os.environ if name.startswith("KVCANARY_")]:
        monkeypatch.delenv(name)
    for name, value in COMPILED_LOOPS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    every = list(steps())
    for command, code, shown in every:
        done = run(*shlex.split(command.removeprefix("kvcanary").removeprefix("-")))
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        for line in shown:
            assert squeezed(line) in squeezed(done.stdout), f"{command} does not print {line!r} but\n{done.stdout}"
    assert [" ".join(shlex.split(command)[:2]) for command, *_ in every] == [
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
