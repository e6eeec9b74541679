"""One life of an engine: started with the recorder on, asked, judged while it runs, ended."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from ...recorder.errors import printable
from ...recorder.process.child import group_members, wait_for_group
from ...recorder.process.environment import TRACE, WORKLOAD, give_run_id
from ...recorder.process.recorded_files import why_nothing
from ...recorder.trace.batch import TraceBatch
from ...replayer.run.settings import ReplaySettings
from ...replayer.watch.folder import WatchedFolder
from ...replayer.watch.recording import WatchedRecording
from ..errors import AnalysisError
from .coverage import Coverage
from .server import Asker, Server
from .workload import Step, write_workload

TRACES: Final = "traces"
WORKLOAD_NAME: Final = "workload.jsonl"
LOG_NAME: Final = "engine.log"
_END_S: Final = 30.0  # for an engine that is asked to end
_MORE_S: Final = 3.0  # of evidence behind the first damage
_BEGINS_S: Final = 15.0
_LOG_END_BYTES: Final = 16_384
_WORDS: Final = 300
_ERROR: Final = re.compile(r"\w*(Error|Exception)\b: ")
_LOOK_S: Final = 0.5
_IDLE_S: Final = 0.05
# What vLLM needs to have its prefix cache emptied, and adapters loaded.
_ENGINES: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


class EngineError(AnalysisError):
    """The engine could not be started, or recorded nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How an engine is run: a server at `url`, or with `script` a program that does the workload that `KVCANARY_WORKLOAD`
    names and ends, of `rounds` rounds each time. `start_s` is how long an engine may take to start, `patience_s` how long nothing may come from one that
    has requests.
    """

    command: Sequence[str]
    script: bool = False
    url: str = ""
    rounds: int = 4
    start_s: float = 900.0
    patience_s: float = 120.0

    @property
    def address(self) -> str:
        """Where the server listens: `url`, else by the command's --port."""
        port = "30000" if any("sglang" in word for word in self.command) else "8000"
        for word, behind in zip(self.command, [*self.command[1:], ""], strict=True):
            port = behind if word == "--port" else word.partition("=")[2] if word.startswith("--port=") else port
        return self.url or f"http://127.0.0.1:{port}"


class RecordedRun:
    """An engine's run in `folder`, which gets the traces, the workload and the log; a context manager that ends the engine.

    `damaged` says that a recording shows damage, `failed` why the engine ended by itself; `verdicts` are of recordings that
    are over. Raises `EngineError` if the command cannot be started.
    """

    def __init__(self, plan: Plan, folder: Path, coverage: Coverage) -> None:
        self._plan, self.folder, self._coverage = plan, folder, coverage
        self.traces = folder / TRACES
        self.traces.mkdir(parents=True, exist_ok=True)
        self._watched = WatchedFolder(self.traces, ReplaySettings(), self._news)
        self._environ = {**_ENGINES, **os.environ, TRACE: str(self.traces.absolute())}
        self._environ[WORKLOAD] = str((folder / WORKLOAD_NAME).absolute())
        give_run_id(self._environ)
        self._engine: subprocess.Popen[bytes] | None = None
        self._looked = self._moved = 0.0
        self.steps: list[Step] = []
        self.damaged, self.failed, self.refusal = False, "", ""
        self.counts: Counter[str] = Counter()
        self.recordings: dict[str, tuple[list[Path], Mapping[str, Any]]] = {}
        self.unreadable: list[str] = []  # recordings, and why they are
        self.headers: list[Any] = []
        self.server: Server | None = None
        self.longest, self.adapters = 0, list[str]()  # as the server says

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._watched.close()

    def start(self) -> None:
        """Start a server, wait for it, and learn what it serves; a script starts with its workload."""
        self.server, until = Server(self._plan.address, self._plan.patience_s), time.monotonic() + self._plan.start_s
        if self.server.is_taken():  # whoever that is must not be asked in its place
            raise EngineError(
                f"{self._plan.address}: somebody listens there before the engine is started; end that, or give the engine "
                "another port with --port"
            )
        self._start()
        while not self.server.is_ready():
            if self._ended():
                raise EngineError(f"{self._plan.command[0]}: before it was ready {self.failed}")
            if time.monotonic() > until:
                raise EngineError(
                    f"{self._plan.address}: no server answered within {self._plan.start_s:.0f} s; name its address with --url; "
                    f"the engine's log is {self._log}"
                )
            time.sleep(_LOOK_S)
        self.longest, self.adapters = self.server.describe()

    def drive(self, steps: Sequence[Step], until: float) -> None:
        """Have the engine do more steps: up to their end, the first damage, or `until` by `time.monotonic`; a script that has
        recorded nothing yet is let go on.
        """
        self.steps += steps
        write_workload(self.folder / WORKLOAD_NAME, self.steps)
        asker = None
        if self._plan.script:
            self._start()
        elif self.server is not None:
            asker = Asker(self.server, steps, self._pause)
        self._moved = time.monotonic()
        try:
            while not self._ended() and not (asker is not None and asker.done):
                moved = self._judge()
                until = min(until, time.monotonic() + _MORE_S) if self.damaged else until
                if time.monotonic() > until and (self.headers or not self._plan.script):
                    break
                patience = self._plan.patience_s if self.headers else self._plan.start_s
                if not moved and time.monotonic() > self._moved + patience:
                    self.failed = f"the engine stood still: no forward for {patience:.0f} s, with requests"
                    break
                if not moved:
                    time.sleep(_IDLE_S)
        finally:
            if asker is not None:
                asker.stop()
                self.counts.update(dict(asker.counts))  # a copy: what is asked still ends
                self.refusal = self.refusal or asker.refusal

    def is_recorded(self) -> bool:
        """Whether a recording has begun, which shows a moment after the first forward."""
        until = time.monotonic() + _BEGINS_S
        while not self.headers and time.monotonic() < until:
            self._judge()
            time.sleep(_IDLE_S)
        return bool(self.headers)

    def end(self) -> None:
        """End the engine, and judge its recordings to their end."""
        self._stop()
        while True:
            pending = self._watched.look()
            if not (self._watched.step() or pending or self._watched.under_way):
                break

    @property
    def forwards(self) -> int:
        """How many forwards were judged."""
        return sum(facts["forwards"] for facts in self._watched.facts())

    @property
    def corrupt(self) -> list[list[Path]]:
        """The files of recordings that are over and show damage."""
        return [paths for paths, facts in self.recordings.values() if facts["verdict"] == "corrupt"]

    @property
    def why_nothing(self) -> list[str]:
        """Why nothing may have been recorded."""
        return why_nothing(self._plan.command, self._environ)

    @property
    def _log(self) -> Path:
        return self.folder / LOG_NAME

    def _start(self) -> None:
        try:
            with self._log.open("ab") as log:
                self._engine = subprocess.Popen(
                    self._plan.command,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                )
        except OSError as error:
            raise EngineError(f"{self._plan.command[0]}: cannot be started: {error.strerror}") from None

    def _last_words(self) -> str:
        """The last line of the engine's log, an error's first one if it has several."""
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_END_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.search(line)]
        return printable((errors or lines or ["nothing"])[-1][:_WORDS])

    def _ended(self) -> bool:
        code = self._engine.poll() if self._engine is not None else None
        if code is not None and (code or not self._plan.script):
            self.failed = f"the engine ended with {code}; its log {self._log} ends with: {self._last_words()}"
        return code is not None

    def _stop(self) -> None:
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        for member in group_members(engine.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGCONT)
        engine.terminate()  # which does nothing if it has ended
        try:
            engine.wait(_END_S)
        except subprocess.TimeoutExpired:
            engine.kill()
            engine.wait()
        if not wait_for_group(engine.pid, 5.0):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(engine.pid, signal.SIGKILL)
            wait_for_group(engine.pid, 5.0)

    def _pause(self, process: int, seconds: float) -> None:
        """Stop one of the engine's processes; what runs on a device goes on meanwhile."""
        engine = self._engine  # another thread ends it
        members = group_members(engine.pid) if engine is not None else []
        with contextlib.suppress(ProcessLookupError, IndexError, ZeroDivisionError):
            one = members[process % len(members)]
            os.kill(one, signal.SIGSTOP)
            try:
                time.sleep(seconds)
            finally:
                os.kill(one, signal.SIGCONT)

    def _judge(self) -> bool:
        if time.monotonic() - self._looked > _LOOK_S:
            self._watched.look()
            self._looked = time.monotonic()
        return self._watched.step()

    def _taken(self, trace: str, batch: TraceBatch) -> None:
        self._moved = time.monotonic()
        self._coverage.take(trace, batch)

    def _news(self, what: str, one: WatchedRecording | None, facts: Mapping[str, Any]) -> None:
        if one is None:
            self.unreadable.append(f"{facts['recording']}: {facts['error']}")
            return
        if what == "begun":
            self._moved = time.monotonic()
            self.headers.append(one.run.summary.header)
            one.run.on_batch = lambda batch: self._taken(one.trace_id, batch)
        self.damaged |= what == "damage"
        if what == "over":
            self.recordings[one.trace_id] = (one.paths, facts)
