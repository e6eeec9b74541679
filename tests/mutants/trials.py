"""A pytest plugin that tries mutants: tests are collected once, and each mutant is a fork of that process.

In the fork the code of one function is replaced, and the tests that reach the changed statement are run until one fails.
Compiled loops run as they stand, as plain Python, so that a changed loop costs no compiling; a fork may use some
multiple of the processor time that its tests take without a mutant, so that no load on the machine changes a result.
"""

import importlib
import json
import os
import resource
import signal
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from .mutations import Mutant, marked, mutated

# How much more processor time a mutant's tests may take than without it, before it counts as a loop without end.
MOST_TIMES, MORE_S = 3, 15
MOST_MEMORY_BYTES = 8 << 30
MOST_LEFT_OUT = 0.02  # of the tests
# A fork that waits for ever uses none.
MOST_WAIT_S = 3600
# What a function is wrapped in says so by one of these: decorators, static and class methods, properties, cached properties.
WRAPPED_IN = ("__wrapped__", "__func__", "fget", "func")
# The exit code of a fork whose code could not be changed, and how much it says of why: no more than a pipe holds.
NOT_CHANGED, MOST_SAID = 4, 4000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants", type=Path, help="a file of mutants to try, a line of JSON each")
    parser.addoption("--mutant-files", type=Path, help="a file that names all files that are mutated")
    parser.addoption("--mutant-results", type=Path, help="where results go, a line of JSON each")
    parser.addoption(
        "--mutant-map", type=Path, help="where to keep which test reaches which statements, and how long it takes"
    )
    parser.addoption(
        "--mutant-seconds", type=float, default=120, help="processor time of the tests that speak for a mutant"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.mutants is not None:
        from kvcanary.kernels import dispatch

        dispatch._compile = lambda loops, before_compiling: loops
        config.pluginmanager.register(Trials(config), "mutant-trials")


class Trials:
    """Tries the mutants of a file with the collected tests, and appends a line of results for each."""

    def __init__(self, config: pytest.Config) -> None:
        self.root, self.options = config.rootpath, config.option
        lines = self.options.mutants.read_text(encoding="utf-8").splitlines()
        self.mutants = [Mutant(**json.loads(line)) for line in lines]
        self.failed = False
        self.killers: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("tests cannot be collected")
        items = {item.nodeid: item for item in session.items}
        reach = self.reach(session.items)
        for mutant in self.mutants:
            tests, seconds = self.chosen(mutant, reach, items)
            outcome, by = ("unreached", "") if not tests else self.forked(tests, seconds, self.changed_by(mutant))
            if by:
                self.killers[mutant.path][by] += 1
            with self.options.mutant_results.open("a", encoding="utf-8") as file:
                line = {"name": mutant.name, "outcome": outcome, "by": by, "tests": len(tests)}
                file.write(json.dumps(line) + "\n")
        return True

    def chosen(self, mutant: Mutant, reach: dict, items: dict[str, pytest.Item]) -> tuple[list[pytest.Item], float]:
        """Return the tests that reach a mutant's statement, those first that have found others in its file, and their time."""
        known = [
            (-self.killers[mutant.path][name], seconds, name)
            for name, (seconds, statements) in reach.items()
            if mutant.statement in statements.get(mutant.path, ()) and name in items
        ]
        tests, total = [], 0.0
        for _, seconds, name in sorted(known):
            if total + seconds <= self.options.mutant_seconds or not tests:
                tests.append(items[name])
                total += seconds
        return tests, total

    def changed_by(self, mutant: Mutant) -> Callable[[], None]:
        def change() -> None:
            source = (self.root / mutant.path).read_text(encoding="utf-8")
            live(mutant.path, mutant.function).__code__ = mutated(mutant, source)

        return change

    def forked(self, tests: Sequence[pytest.Item], seconds: float, change: Callable[[], None]) -> tuple[str, str]:
        """Run tests in a fork until one fails: "killed" and by which, "survived", or "timeout"."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            code = 3
            try:
                quiet = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(quiet, stream)
                os.setpgid(0, 0)
                limit = int(MOST_TIMES * seconds + MORE_S)
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
                try:
                    change()
                except Exception:  # noqa: BLE001  # whatever it is, it is told
                    os.write(writer, traceback.format_exc()[-MOST_SAID:].encode())
                    code = NOT_CHANGED
                else:
                    os.write(writer, self.first_failure(tests).encode())
                    code = 0
            finally:
                os._exit(code)
        os.close(writer)
        status = _wait(child)
        with os.fdopen(reader) as pipe:
            by = pipe.read()
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_CHANGED:
            raise RuntimeError(f"the code could not be changed:\n{by}")
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            return "timeout", ""
        if status:
            return "killed", f"crash ({status})"
        return ("killed", by) if by else ("survived", "")

    def first_failure(self, tests: Sequence[pytest.Item]) -> str:
        for number, test in enumerate(tests, 1):
            after = tests[number] if number < len(tests) else None
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=after)
            if self.failed:
                return test.nodeid
        return ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def reach(self, tests: Sequence[pytest.Item]) -> dict[str, tuple[float, dict[str, set[int]]]]:
        """Return each test's processor time and the statements that it reaches, by file; made once and kept.

        Tests that fail without a mutant, because of how mutants are run, are left out.
        """
        kept: Path = self.options.mutant_map
        done = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
        names = {line["test"] for line in done}
        left = [test for test in tests if test.nodeid not in names]
        while left:
            # What kills the process, or skips all that follow, loses no more than the test that did.
            self.forked([], 1e6, partial(self.watch, left, kept))
            done = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
            names = {line["test"] for line in done}
            before, left = left, [test for test in left if test.nodeid not in names]
            if left and left[0] is before[0]:
                print(f"{left.pop(0).nodeid}: ends the process, left out")
        failed = [line["test"] for line in done if not line["passed"]]
        for test in failed:
            print(f"{test}: fails without a mutant where loops run as they stand, left out")
        if len(failed) > MOST_LEFT_OUT * len(done):
            raise RuntimeError(f"{len(failed)} of {len(done)} tests fail without a mutant: what is left says little")
        return {
            line["test"]: (line["seconds"], {path: set(numbers) for path, numbers in line["reached"].items()})
            for line in done
            if line["passed"]
        }

    def watch(self, tests: Sequence[pytest.Item], kept: Path) -> None:
        """Run tests, each statement marked, and write down what each reaches."""
        marks: dict[str, bytearray] = {}
        for path in self.options.mutant_files.read_text(encoding="utf-8").split():
            module = importlib.import_module(_module(path))
            found, count = marked((self.root / path).read_text(encoding="utf-8"), "__reached__")
            marks[path] = module.__dict__["__reached__"] = bytearray(count)
            for name, code in found.items():
                live(path, name).__code__ = code
        for test, after in zip(tests, [*tests[1:], None], strict=True):
            self.failed = False
            for mark in marks.values():
                mark[:] = bytes(len(mark))
            start = time.process_time()
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=after)
            seconds = time.process_time() - start
            reached = {path: [n for n, one in enumerate(mark) if one] for path, mark in marks.items() if any(mark)}
            line = {"test": test.nodeid, "seconds": seconds, "passed": not self.failed, "reached": reached}
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.failed = False


def live(path: str, name: str) -> FunctionType:
    """Return the function of a loaded module, whatever it is wrapped in."""
    found: Any = importlib.import_module(_module(path))
    for part in name.split("."):
        found = found.__dict__[part]
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        found = next(getattr(found, inner) for inner in WRAPPED_IN if hasattr(found, inner))
    return found


def _module(path: str) -> str:
    return "kvcanary." + path.removesuffix(".py").replace("/", ".")


def _wait(child: int) -> int:
    """Wait for a fork, not for ever; return its status."""
    deadline = time.monotonic() + MOST_WAIT_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(0.02)
