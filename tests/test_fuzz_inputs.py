"""The targets of `make fuzz-inputs` still run, and a loop that finds something says so; the long run is that command's."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from .fuzz_inputs.inputs import random_program
from .fuzz_inputs.targets import TARGETS, own_folder
from .support.places import ROOT

EXECUTIONS = {"header": 300, "reader": 30, "tail": 60, "workload": 300, "events": 6, "report": 2}


@pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.name)
def test_every_target_ends_as_documented(kind):
    rng = random.Random()
    with own_folder() as folder:
        target = kind(Path(folder))
        seeds = target.seeds()
        assert seeds
        taken = 0
        for number in range(EXECUTIONS[kind.name]):
            data = (
                target.mend(target.bend(seeds[number % len(seeds)], rng), rng)
                if number >= len(seeds)
                else seeds[number]
            )
            try:
                target.execute(data)
                taken += 1
            except target.allowed:
                pass
        assert taken


def test_edits_reach_the_events():
    from .fuzz_inputs.inputs import Base, edited
    from .support.engines.toy_engine import Shape, ToyEngine

    engine = ToyEngine(Shape(), seed=2, forwards=4)
    base = Base(engine.header, tuple(engine.events))
    changed = edited(base, random_program(random.Random(3), 12))
    assert [event.ints for event in changed] != [event.ints for event in engine.events]


def test_a_finding_is_kept_and_told(tmp_path):
    """With no room at all every input is a finding."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz_inputs.run", "--only", "workload", "--executions", "5"),
            *("--memory-mb", "1", "--engine", "plain", "--out", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert list(tmp_path.glob("workload-*.input"))
