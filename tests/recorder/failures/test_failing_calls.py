"""Every I/O call of recorder, replay, recovery, store and page fails once, and then all behind it, and so do requests for
memory: a few here, in `make fuzz-inputs` each of most, and some of each hundred of store and page.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ...support.places import COMPILED_LOOPS, ROOT

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes calls fail; it needs a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: what makes I/O calls fail cannot be made")
    made = tmp_path_factory.mktemp("library") / "failing_calls.so"
    source = HERE / "failing_calls.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"], check=True)
    return made


def run(library: Path, folder: Path, scenario: str, step: int, *options: str) -> Any:
    """Return what the runs of a scenario found, a part of its calls: another one each time, alone and with all behind it."""
    first = ["1" if step == 1 else str(1 + int.from_bytes(os.urandom(2)) % step) for _ in range(2)]
    memory = {"PYTHONMALLOC": "malloc", "ARROW_DEFAULT_MEMORY_POOL": "system"} if options else {}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.recorder.failures.failing_calls", scenario, str(folder), *options),
            *("--first", *first, "--step", str(step)),
        ],
        cwd=ROOT,
        env=os.environ
        | memory
        | COMPILED_LOOPS
        | {"LD_PRELOAD": str(library), "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("scenario", "least", "step"),
    [
        ("record", 40, 97),
        ("segments", 40, 97),
        ("replay", 40, 127),
        ("recover", 8, 13),
        ("store", 30, 937),
        ("page", 30, 0),
    ],
)
@pytest.mark.one_in(3)
def test_whatever_call_fails(
    library: Path, tmp_path: Path, pytestconfig: pytest.Config, scenario: str, least: int, step: int
) -> None:
    if pytestconfig.getoption("--conformance-cases") > 500:
        # A page has thousands of calls, and a run of it takes seconds: another part of them each night.
        step = {"store": 7, "page": 97}.get(scenario, 1)
    elif not step:
        pytest.skip("takes long: make fuzz-inputs")
    found = run(library, tmp_path, scenario, step)
    assert found["calls"] >= least, found
    assert not found["wrong"], "\n".join(found["wrong"])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("scenario", "step"), [("memory", 499), ("replay", 97), ("recover", 131)])
@pytest.mark.one_in(2)
def test_whatever_request_for_memory_fails(
    library: Path, tmp_path: Path, pytestconfig: pytest.Config, scenario: str, step: int
) -> None:
    """Of 20,000 bytes or more: a smaller one ends a process within libraries, C++'s as a rule, which nobody can mend here."""
    if pytestconfig.getoption("--conformance-cases") > 500:
        step = {"replay": 3}.get(scenario, 1)
    elif scenario == "replay":
        pytest.skip("Arrow's Parquet writer, with which a report is written, crashes now and then: make fuzz-inputs")
    found = run(library, tmp_path, scenario, step, "--memory", "20000")
    assert found["calls"] >= 30, found
    assert not found["wrong"], "\n".join(found["wrong"])
