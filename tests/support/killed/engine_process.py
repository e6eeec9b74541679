"""The process that makes engines which are to end: a module that forks one for each line of JSON and prints its id."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[3]


class EngineProcess:
    """Runs a module beside this one; a context manager."""

    def __init__(self, module: str) -> None:
        self.module = f"{__name__.rpartition('.')[0]}.{module}"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", self.module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._read() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the process that makes engines is gone"
        return line

    def start(self, **asked: object) -> int:
        """Start an engine; return its process id."""
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return int(self._read())


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int) -> None:
    """Wait until a process that is no child of ours is gone."""
    while is_there(pid):
        time.sleep(0.002)
