"""Runs a scenario again and again, each time with another of its I/O calls failing, or of its requests for memory; a program
of its own, since the calls are caught by a library that must be preloaded.

    LD_PRELOAD=failing_calls.so python -m tests.recorder.failures.failing_calls SCENARIO FOLDER --first 1 1 --step 1
    PYTHONMALLOC=malloc ARROW_DEFAULT_MEMORY_POOL=system LD_PRELOAD=... SCENARIO FOLDER --memory 16384

Each run is a fork of this process, in a folder of its own. A line of JSON says how many runs there were, and what was
wrong with which.
"""

import argparse
import contextlib
import ctypes
import errno
import faulthandler
import importlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
from kvcanary.cli import kvcanary_main, replay_main
from kvcanary.kernels.dispatch import prepare
from kvcanary.kernels.replay_pass.state import STATE_LOOPS
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.engines.simulated import engine
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.errors import TraceError, UnreadableTraceError
from kvcanary.recorder.trace.reader import TraceGap, TraceReader
from kvcanary.replayer.run.replay import ReplaySettings, replay, replay_joined

from ...support.engines.documented_engine import run_requests, toy_engine
from ...support.places import DATA

ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE)
LIBRARY = ctypes.CDLL(None)
TRACE = DATA / "kv_flip.arrow"


class Scenario:
    """What is done while a call fails, and what must be so afterwards, whichever it was."""

    def prepare(self, folder: Path) -> None:
        """Put there what is read."""

    def run(self, folder: Path, begin: Callable[[], None]) -> None:
        """Do it; runs in a child, which ends with exit code 0 unless this ends it otherwise. Calls fail after `begin()`."""
        raise NotImplementedError

    def judge(self, folder: Path, code: int, said: str) -> str:
        """Return what is wrong, nothing where all is as it must be."""
        raise NotImplementedError


class _NotSpared:
    """A recorder for whose calls there may be no memory, while there is for the engine around them."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._recorder, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            LIBRARY.spare(0)
            try:
                return found(*arguments, **named)
            finally:
                LIBRARY.spare(1)

        return call


class Record(Scenario):
    """An engine is recorded: it never notices, what is in the file opens, and what is missing is told."""

    options: ClassVar[dict[str, Any]] = {"flush_interval_ns": 1_000_000, "compression": "none"}
    expected: Any = None

    def run(self, folder: Path, begin: Callable[[], None]) -> None:
        begin()
        try:
            toy = toy_engine(folder / "t.arrow", **self.options)
        except TraceError:  # at the start whoever records is told
            os._exit(3)
        answers = run_requests(toy)
        toy.recorder.close()
        Path(os.environ["KVCANARY_ANSWERS"]).write_text(json.dumps(answers))

    def judge(self, folder: Path, code: int, said: str) -> str:
        if code == 3:
            return ""
        if code:
            return f"the engine saw an exception, exit code {code}: {said}"
        answers = json.loads(Path(os.environ["KVCANARY_ANSWERS"]).read_text())
        Record.expected = Record.expected or answers
        if answers != Record.expected:
            return "the engine gave other answers"
        files = sorted(folder.glob("*.arrow"))
        try:
            (summary,) = replay_joined([files], settings=ReplaySettings(), reports=[None])
        except UnreadableTraceError as error:
            return "" if "torn" in str(error) or "empty" in str(error) else f"unreadable: {error}"
        if summary.violations or summary.findings:
            return "what was recorded is held against the engine"
        whole = summary.forwards == self.forwards(summary.forwards, said)
        if summary.verdict.value == "clean" and not whole:
            return f"{summary.forwards} forwards are called clean, and there were more"
        return ""

    def forwards(self, now: int, said: str) -> int:
        """The forwards of the run in which nothing failed, which is the first."""
        Record.all_forwards = getattr(Record, "all_forwards", None) or now
        return Record.all_forwards


class RecordSegments(Record):
    """The same in segments."""

    options: ClassVar[dict[str, Any]] = {**Record.options, "segment_bytes": 4096}


class RecordInSmallMemory(Record):
    """A recording of a larger engine that began, in segments; what the engine itself asks for is given."""

    options: ClassVar[dict[str, Any]] = {"segment_bytes": 1 << 16, "flush_bytes": 1 << 15}

    def run(self, folder: Path, begin: Callable[[], None]) -> None:
        engine.Recorder = lambda *given, **named: _NotSpared(Recorder(*given, **named))  # type: ignore[assignment, misc]
        config = EngineConfig(page_size=16, num_pages=200, chunk_tokens=512)
        workload = RandomWorkload(requests=24, prompt_tokens=200, output_tokens=12, max_tokens=500, arrival_rate=4000.0)
        simulated = engine.SimulatedEngine(config, workload, folder / "t.arrow", **self.options)
        LIBRARY.spare(1)
        begin()
        simulated.run()
        simulated.close()
        Path(os.environ["KVCANARY_ANSWERS"]).write_text(json.dumps(asdict(simulated.counters)))


class Command(Scenario):
    """A command: as without the failure, or one clear error."""

    program: Callable[[], Any] = staticmethod(kvcanary_main)
    arguments: tuple[str, ...] = ()
    right = 0

    def prepare(self, folder: Path) -> None:
        shutil.copy(TRACE, folder / "t.arrow")

    def run(self, folder: Path, begin: Callable[[], None]) -> None:
        begin()
        sys.argv = ["kvcanary", *(word.format(folder) for word in self.arguments)]
        type(self).program()

    def judge(self, folder: Path, code: int, said: str) -> str:
        if "Traceback" in said or "internal error" in said:
            return f"exit code {code}: {said}"
        if code not in (self.right, 2, 125):
            return f"exit code {code}, expected {self.right} or 2: {said}"
        if code == 2 and not said.strip():
            return "exit code 2 without a word"
        return self.outcome(folder, whole=code == self.right)

    def outcome(self, folder: Path, *, whole: bool) -> str:
        """Return what is wrong with the files; `whole` says that the command did not tell of an error."""
        raise NotImplementedError


class Replay(Command):
    """A replay into a report: a whole one, or none that is called whole."""

    program = staticmethod(replay_main)
    arguments = ("{}/t.arrow", "--jobs", "1", "--no-page")
    right = 1
    rows = 0

    def outcome(self, folder: Path, *, whole: bool) -> str:
        report = folder / "t.report"
        if not (report / "summary.json").exists():
            return "exit code 1 without a report" if whole else ""
        summary = json.loads((report / "summary.json").read_text())
        if summary["verdict"] != "corrupt":
            return "" if summary["verdict"] == "inconclusive" else f"the summary says {summary['verdict']}"
        rows = pq.read_metadata(report / "violations.parquet").num_rows
        Replay.rows = Replay.rows or rows
        return "" if rows == Replay.rows or summary["doubts"] else f"{rows} of {Replay.rows} rows in a whole report"


class Recover(Command):
    """A recovery: the new trace is whole, or not there."""

    arguments = ("recover", "{}/t.arrow")

    def prepare(self, folder: Path) -> None:
        data = TRACE.read_bytes()
        (folder / "t.arrow").write_bytes(data[: len(data) * 2 // 3])

    def outcome(self, folder: Path, *, whole: bool) -> str:
        made = folder / "t.recovered.arrow"
        if not made.exists():
            return "exit code 0 and no trace" if whole else ""
        with TraceReader(made) as reader:
            gaps = [item for item in reader.stream() if isinstance(item, TraceGap)]
            return "" if reader.complete and not gaps else "half a trace took the place of a whole one"


class OfReport(Command):
    """A command about a report that is there."""

    made: Path

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        (folder / "t.report").mkdir()
        replay(folder / "t.arrow", settings=ReplaySettings(), report=folder / "t.report")


class Page(OfReport):
    """The page: whole, or not there."""

    arguments = ("page", "{}/t.report")

    def outcome(self, folder: Path, *, whole: bool) -> str:
        page = folder / "t.report" / "report.html"
        if not page.exists():
            return "exit code 0 and no page" if whole else ""
        return "" if page.read_text().rstrip().endswith("</html>") else "half a page"


class Store(OfReport):
    """The store: one that fits and answers, or none that is used."""

    arguments = ("sql", "{}/t.report", "--save", "select count(*) as n from violations")

    def outcome(self, folder: Path, *, whole: bool) -> str:
        from kvcanary.analysis.store.session import open_report

        with open_report(folder / "t.report") as session:
            counted = session.sql("select count(*) as n from violations")["n"].to_pylist()
        return "" if counted == [1] else f"the store answers {counted}"


SCENARIOS: dict[str, type[Scenario]] = {
    "record": Record,
    "segments": RecordSegments,
    "memory": RecordInSmallMemory,
    "replay": Replay,
    "recover": Recover,
    "page": Page,
    "store": Store,
}


def main() -> None:
    """Run a scenario with one failing call after another, until a run has none: each alone, then with all behind it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, nargs=2, default=(1, 1), help="alone, and with all calls behind it")
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument(
        "--memory", type=int, help="no I/O call, but a request for so many bytes of memory or more fails"
    )
    options = parser.parse_args()
    options.stay = False
    os.environ["KVCANARY_ANSWERS"] = str(options.folder / "answers.json")
    scenario = SCENARIOS[options.scenario]()
    prepare(*STATE_LOOPS, backend="cpu")
    wrong: list[str] = []
    if (
        options.memory
    ):  # what is imported is not what is looked at: libraries end the process where theirs has no memory
        _run(scenario, options, 0, 0, wrong)
        for name in json.loads((options.folder / "modules").read_text()):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    runs, calls = 0, _run(scenario, options, 0, 0, wrong)
    for stay, number in enumerate(options.first):
        options.stay = bool(stay)
        # Threads make the count differ a little from run to run: it ends with the first run that has no n-th call.
        while len(wrong) < 20:
            error = ERRORS[number % len(ERRORS)]
            runs += 1
            if _run(scenario, options, number, error, wrong) < number:
                break
            number += options.step
    print(json.dumps({"calls": calls, "runs": runs, "wrong": wrong}), flush=True)
    os._exit(0)  # the libraries' threads have nothing left to do


def _ended_in_arrow(said: str) -> bool:
    """Return whether a crash was in Arrow's Parquet writer, which does not survive all failures; nobody here can mend that.

    What must hold then is what holds after `kill -9`: no half of a report is taken for a whole one.
    """
    frames = [line for line in said.splitlines() if line.startswith("  File ")]
    return "Fatal Python error" in said and bool(frames) and "/pyarrow/parquet/" in frames[0]


def _arm(folder: Path, number: int, error: int, options: Any) -> None:
    if options.memory:
        LIBRARY.arm_memory(ctypes.c_size_t(options.memory), ctypes.c_long(number), int(options.stay))
    else:
        LIBRARY.arm(os.fsencode(folder), ctypes.c_long(number), error, int(options.stay))


def _run(scenario: Scenario, options: Any, number: int, error: int, wrong: list[str]) -> int:
    """Run once in a child; return how many calls there were."""
    folder, told = options.folder / "run", options.folder / "said"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            scenario.prepare(folder)
            output = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            faulthandler.enable()
            scenario.run(folder, lambda: _arm(folder, number, error, options))
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 2
        except BaseException:  # noqa: BLE001  # the parent is told
            traceback.print_exc()
            code = 70
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            if not number:
                (options.folder / "modules").write_text(json.dumps([n for n in sys.modules if n != "__main__"]))
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    calls = LIBRARY.armed_calls()
    code = os.waitstatus_to_exitcode(status)
    # What is printed on success is no message.
    said = told.read_text(errors="replace")
    try:
        if code >= 0:
            problem = scenario.judge(folder, code, said)
        elif options.memory and isinstance(scenario, Command) and _ended_in_arrow(said):
            problem = scenario.outcome(folder, whole=False)
        else:
            problem = f"signal {-code}: {said}"
    except Exception:  # noqa: BLE001  # what cannot be judged is wrong too
        problem = traceback.format_exc()
    if problem:
        why = "MemoryError" if options.memory else errno.errorcode.get(error)
        wrong.append(f"call {number} fails{' and all behind it' * options.stay} with {why}: {problem[-1500:]}")
    return calls


if __name__ == "__main__":
    main()
