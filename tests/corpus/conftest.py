"""How much of the corpus the tests go through: in a normal run every tenth bug and every tenth clean run, in `make fuzz` all."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run import BUGS, DATA

NORMAL_CASES = 500
EVERY = 10


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests the bugs of this run as `bugs`, all in one, and each a clean run as `clean_trace`."""
    every = 1 if metafunc.config.getoption("--conformance-cases") > NORMAL_CASES else EVERY
    if "bugs" in metafunc.fixturenames:
        metafunc.parametrize("bugs", [sorted(BUGS)[::every]], ids=["every bug" if every == 1 else "every tenth"])
    if "clean_trace" in metafunc.fixturenames:
        traces = sorted(DATA.glob("*-clean-*.arrow"))[::every]
        metafunc.parametrize("clean_trace", traces, ids=[path.stem for path in traces])
