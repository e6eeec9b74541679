"""A pytest plugin for an engine's own tests: they run with the recorder on, and an incident in what a test recorded fails it.

Off unless asked for (`pytest --kvcanary`, or `kvcanary = true` in pytest's configuration). Engines attach as under `kvcanary
record`, in this process and in those that it starts. pytest imports this module in every run of whoever has kvcanary installed,
so it imports nothing of weight.
"""

import fcntl
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

_FLUSH_MS: Final = 50  # a recording that goes on over several tests is judged as far as it is flushed
_PHASES: Final = ("call", "teardown")
_NAME: Final = "kvcanary"
_MOST_SHOWN: Final = 3
_OURS: Final = ("*.arrow", "*.arrow.tail?", "*.frozen-*", "*.report")  # what an earlier run left
_ADVICE: Final = "is kvcanary installed where the engine runs, and is it SGLang or vLLM?"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup(_NAME, "KV cache recorder")
    group.addoption(
        "--kvcanary", action="store_true", help="Record engines that tests run; an incident fails the test."
    )
    group.addoption(
        "--kvcanary-dir", metavar="DIR", help="Where traces of failed tests stay. [default: .kvcanary/pytest]"
    )
    group.addoption("--kvcanary-keep", action="store_true", help="Keep the traces of clean tests too.")
    parser.addini(_NAME, "The same as --kvcanary.", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Put the recorder's settings into the environment, where engines of this process and others find them."""
    if config.getoption("--kvcanary") or config.getini(_NAME):
        worker = getattr(config, "workerinput", {}).get("workerid", "main")
        top = Path(config.getoption("--kvcanary-dir") or config.rootpath / ".kvcanary" / "pytest").absolute()
        folder, lock = _own_folder(top, worker)
        keep = config.getoption("--kvcanary-keep")
        config.pluginmanager.register(KvCanary(folder, lock, keep=keep), "kvcanary-session")


def _own_folder(top: Path, worker: str) -> tuple[Path, int]:
    """Make a folder that no other run records into now: `worker`, or `worker-2` and so on; return it with its open lock.

    Engines that were forked hold the lock too: what goes on behind a run that was killed is not judged by the next one.
    """
    for number in itertools.count(1):
        folder = top / (worker if number == 1 else f"{worker}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError:  # no locks on this file system
            pass
        break
    return folder, lock


class KvCanary:
    """Judges after each test what changed in `folder`, which is this run's own, and one pytest-xdist worker's, by its `lock`."""

    def __init__(self, folder: Path, lock: int, *, keep: bool) -> None:
        from ..recorder.process.environment import TRACE
        from ..recorder.process.settings import PREFIX

        self._folder, self._lock, self._keep = folder, lock, keep
        for path in (one for pattern in _OURS for one in folder.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        self._before = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        self._mine = {TRACE: str(folder), f"{PREFIX}FLUSH_INTERVAL_MS": str(_FLUSH_MS)}
        os.environ.update(
            {name: value for name, value in self._mine.items() if name not in self._before or name == TRACE}
        )
        self._judged: dict[Path, tuple[int, int]] = {}
        self._known: dict[str, int] = {}  # violations and findings of each recording so far

    def pytest_unconfigure(self) -> None:
        """Put the environment back, and let go of the folder."""
        for name in self._mine:
            os.environ.pop(name, None)
        os.environ.update(self._before)
        os.close(self._lock)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
        """Judge what was recorded up to the end of a test's own code, and of its teardown."""
        report = (yield).get_result()
        if call.when not in _PHASES:
            return
        found, notes = self._judge()
        if found or notes:
            report.user_properties.append((_NAME, json.dumps(notes)))
        text = "\n\n".join(found)
        if text and report.passed:
            report.outcome, report.longrepr = "failed", text
        elif text:
            report.sections.append((_NAME, text))

    def _judge(self) -> tuple[list[str], list[dict[str, Any]]]:
        """Return what is wrong with what was recorded since the last time, and a note on each recording."""
        from ..recorder.process.recorded_files import changed, stamps
        from ..recorder.trace.files import is_being_written, recording_path, segments_of

        live = [path for path in self._folder.glob("*.arrow") if is_being_written(path)]
        if live:
            time.sleep(3 * _FLUSH_MS / 1000)
        paths, _ = changed(self._folder, self._judged)
        if not paths:
            return [], []
        whole = sorted({part for path in paths for part in (segments_of(recording_path(path)) or [path])})
        seen = stamps(self._folder)
        self._judged.update({path: seen[path] for path in whole if path in seen})
        found_wrong, notes = [], []
        for one in _replayed(whole):
            under_way = bool(one.get("being_recorded")) and one.get("exit_code") == 125
            notes.append({"trace": one.get("trace", ""), "verdict": "clean so far" if under_way else one["verdict"]})
            notes[-1]["why"] = "" if under_way else "; ".join(one.get("doubts", [])[:1]) or one.get("error", "")
            wrong = int(one.get("violations", 0)) + int(one.get("findings", 0))
            if wrong > self._known.get(str(one.get("trace_id")), 0):
                found_wrong.append(_sentence(one))
            elif one["verdict"] == "clean" and not self._keep:
                self._drop(one)
            self._known[str(one.get("trace_id"))] = wrong
        return found_wrong, notes

    def _drop(self, one: dict[str, Any]) -> None:
        from ..recorder.trace.files import is_being_written, segments_of

        trace = Path(one["trace"])
        for path in segments_of(trace) or [trace]:
            if not is_being_written(path, unknown=True):
                path.unlink(missing_ok=True)
        shutil.rmtree(one.get("report") or trace.with_suffix(".report"), ignore_errors=True)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many recordings were judged, and which could not be."""
        notes = [
            (report.nodeid, note)
            for reports in terminalreporter.stats.values()
            for report in reports
            for name, text in getattr(report, "user_properties", ())
            if name == _NAME
            for note in json.loads(text)
        ]
        terminalreporter.section(_NAME)
        if not notes:
            terminalreporter.line(f"no test recorded anything: {_ADVICE}")
            return
        verdicts = [note["verdict"] for _, note in notes]
        counted = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted({*verdicts}))
        terminalreporter.line(f"{len(notes)} replay(s) after {len({test for test, _ in notes})} test(s): {counted}")
        for test, note in notes:
            if note["verdict"] not in ("clean", "clean so far"):
                terminalreporter.line(
                    f"{note['verdict']}  {test}  {note['why']}  {note['trace']}".replace("    ", "  ")
                )


def _replayed(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Replay traces in a process of its own, which a test's changes to this one do not reach; return their summaries."""
    from ..recorder.process.settings import PREFIX

    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    words = [sys.executable, "-m", _NAME, "replay", "--json", "--quiet", *map(str, paths)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    try:
        said = json.loads(done.stdout)
    except ValueError:
        said = {"error": (done.stderr.strip().splitlines() or ["the replay said nothing"])[-1], "trace": str(paths[0])}
    said = said.get("recordings", [said]) if isinstance(said, dict) else said
    return [{"verdict": "not judged", **one} for one in said]


def _sentence(one: dict[str, Any]) -> str:
    lines = []
    for incident in one.get("incidents", [])[:_MOST_SHOWN]:
        lines += [f"{_NAME}: {incident['title']} ({incident['kind']}, confidence {incident['confidence']})"]
        lines += [f"    {incident['sentence']}"]
    lines = lines or [f"{_NAME}: the KV cache went wrong"]
    lines += [
        f"found   {one['violations']} violations, {one['findings']} findings, {one.get('num_incidents') or 0} incidents"
    ]
    lines += [f"trace   {one['trace']}"]
    if report := one.get("report"):
        lines += [f"next    kvcanary triage {shlex.quote(report)}"]
    return "\n".join(lines)
