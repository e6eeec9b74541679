"""docs/guide/tutorial.md: every command runs in a shell in a clone, ends as it says, and prints the lines that it shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

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


def test_every_command_does_what_the_page_shows(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--shared", ROOT, clone], check=True)
    every = list(steps())
    # One shell, as a reader has it: a command's output and exit code in files beside the clone.
    script = [
        f"{command} >../{number}.out 2>../{number}.err; echo $? >../{number}.code"
        for number, (command, *_) in enumerate(every)
    ]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KVCANARY_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        **COMPILED_LOOPS,
    }
    subprocess.run(["bash", "-c", "\n".join(script)], cwd=clone, env=environment, check=True)
    for number, (command, code, shown) in enumerate(every):
        out, err, ended = ((tmp_path / f"{number}.{name}").read_text() for name in ("out", "err", "code"))
        assert int(ended) == code, f"{command}\n{out}\n{err}"
        for line in shown:
            assert squeezed(line) in squeezed(out), f"{command} does not print {line!r} but\n{out}"
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
