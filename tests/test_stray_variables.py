"""What is set for an engine of the user's own reaches no test."""

import os
import subprocess
import sys


def test_no_variable_of_the_user_reaches_a_test():
    assert not [name for name in os.environ if name.startswith("KVCANARY_") and name != "KVCANARY_CHROMIUM"]


def test_stray_variables_are_taken_away(request):
    inside = "tests/test_stray_variables.py::test_no_variable_of_the_user_reaches_a_test"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", inside],
        capture_output=True,
        text=True,
        check=False,
        cwd=request.config.rootpath,
        env=os.environ | {"KVCANARY_TRACE": "/nowhere", "KVCANARY_TOKENS": "hashed"},
    )
    assert done.returncode == 0, done.stdout
