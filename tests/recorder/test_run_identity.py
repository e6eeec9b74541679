"""A server's processes get one id from the one that starts them; one that got none names none."""

import os
import subprocess
import sys

import pytest
from kvcanary.recorder.process import environment
from kvcanary.recorder.process.environment import RUN_ID, run_id, share_run_id

SAY = "from kvcanary.recorder.process.environment import run_id, share_run_id; share_run_id(); print(run_id(), flush=True)"


def test_children_inherit_it_and_the_parent_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_ID, "")
    monkeypatch.setattr(environment, "made_by", -1)
    share_run_id()
    made = os.environ[RUN_ID]
    share_run_id()
    assert (len(made), os.environ[RUN_ID], run_id()) == (32, made, "")
    children = [subprocess.run([sys.executable, "-c", SAY], capture_output=True, check=True).stdout for _ in range(2)]
    assert children == [made.encode() + b"\n"] * 2
    if (child := os.fork()) == 0:
        os._exit(0 if run_id() == made else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_of_its_own_has_none() -> None:
    environ = {name: value for name, value in os.environ.items() if name != RUN_ID}
    assert subprocess.run([sys.executable, "-c", SAY], env=environ, capture_output=True, check=True).stdout == b"\n"
