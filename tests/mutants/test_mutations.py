"""The tool itself: every place that it would change is found in the running code, and an error is not taken for a result."""

import ast
import subprocess
from fnmatch import fnmatch

import pytest

from tests.support.places import ROOT

from .mutations import functions, mutants, mutated
from .run import CHOICE
from .trials import live


def test_every_function_is_found_in_its_module() -> None:
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).splitlines()
    files = [path for path in listed if any(fnmatch(path, pattern) for pattern in CHOICE["files"])]
    for path in files:
        for name, function in functions(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            assert live(path, name).__name__ == function.name
    assert len(files) > 20


@pytest.mark.parametrize(
    "change, given, result",
    [("n < 4 -> n <= 4", 4, True), ("4 -> 5", 4, True), ("n < 4 -> n <= 4", 5, False)],
)
def test_a_mutant_changes_one_place(change: str, given: int, result: bool) -> None:
    source = "def few(n):\n    return n < 4\n"
    mutant = next(one for one in mutants("few.py", source) if one.change == change)
    space: dict = {}
    exec(compile(source, "few.py", "exec"), space)
    space["few"].__code__ = mutated(mutant, source)
    assert space["few"](given) is result
