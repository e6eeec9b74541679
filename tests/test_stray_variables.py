"""What is set for programs of the user's own changes no test."""

import os
import subprocess
import sys

import pytest

from .support.environment import KEPT, STRAY

SET = {
    "KVCANARY_TRACE": "/nowhere",
    "KVCANARY_TOKENS": "hashed",
    "NUMBA_DISABLE_JIT": "1",
    "TRITON_INTERPRET": "0",
    "POLARS_FMT_MAX_ROWS": "1",
    "GIT_DIR": "/nowhere",
    "COLUMNS": "20",
    "LINES": "2",
    "FORCE_COLOR": "1",
    "NO_COLOR": "1",
}
OURS = ("TRITON_INTERPRET",)


def test_no_variable_of_the_user_reaches_a_test() -> None:
    assert not [name for name in os.environ if name.startswith(STRAY) and name not in (*KEPT, *OURS)]
    assert os.environ.get("TRITON_INTERPRET") != "0"


def test_stray_variables_change_nothing(request: pytest.FixtureRequest) -> None:
    """One test of each sort: a kernel in the interpreter, compiled loops and a screen, a repository."""
    inside = (
        "tests/test_stray_variables.py::test_no_variable_of_the_user_reaches_a_test",
        "tests/kernels/test_device_kernels.py::test_the_caller_hears_of_other_shapes",
        "tests/replayer/test_replay_command.py::test_clean_trace",
        "tests/mutants/test_mutations.py::test_every_function_is_found_in_its_module",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *inside],
        capture_output=True,
        text=True,
        check=False,
        cwd=request.config.rootpath,
        env=os.environ | SET,
    )
    assert done.returncode == 0, done.stdout
