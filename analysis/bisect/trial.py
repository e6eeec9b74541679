"""One trial of `kvcanary bisect run`: run the user's command for a version, and judge what it recorded."""

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from ...recorder.process.endings import endings_deferred
from ..errors import AnalysisError
from .criteria import Criterion, judge_traces
from .search import BisectVerdict, Mark
from .versions import folder_name, git, one_each, read_order

NOT_STARTED: Final = (126, 127)  # what a shell says of a command that is not executable, or not there
SKIP: Final = 125
VERSION_VARIABLE: Final = "KVCANARY_BISECT_VERSION"
TRACE_VARIABLE: Final = "KVCANARY_BISECT_TRACE"
FOLDER_VARIABLE: Final = "KVCANARY_TRACE"
KEPT_OUTPUT_BYTES: Final = 4096
_GRACE_S: Final = 5.0
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The user's command, its words filled in for each trial; `keep` is where traces stay, None for nowhere."""

    words: tuple[str, ...]
    timeout_s: float | None = None
    keep: Path | None = None

    def filled(self, version: str, folder: Path) -> list[str]:
        """Return the words for a trial that records into `folder`."""
        values = {"{version}": version, "{trace}": str(folder / "trace.arrow"), "{out}": str(folder)}
        words = list(self.words)
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        return words


def run_trial(command: Command, version: str, number: int, criterion: Criterion) -> BisectVerdict:
    """Run the command once, and judge every trace that it left in its folder; raise `AnalysisError` if it cannot be started."""
    with tempfile.TemporaryDirectory(prefix="kvcanary-bisect-") as temporary:
        folder = Path(temporary)
        if command.keep is not None:
            folder = command.keep / f"{folder_name(version)}-{number}"
            _make(folder)
        try:
            if problem := _run(command, version, folder):
                return BisectVerdict(mark=Mark.SKIP, words=problem)
            return judge_traces(sorted(folder.rglob("*.arrow")), criterion)
        finally:
            if command.keep is not None:
                with suppress(OSError):  # it holds something
                    folder.rmdir()


def _run(command: Command, version: str, folder: Path) -> str:
    """Return why there is nothing to judge, "" if there is."""
    words = command.filled(version, folder)
    places = {VERSION_VARIABLE: version, TRACE_VARIABLE: str(folder / "trace.arrow"), FOLDER_VARIABLE: str(folder)}
    environment = {**os.environ, **places}
    with tempfile.TemporaryFile() as output:
        process: subprocess.Popen[bytes] | None = None
        try:
            with endings_deferred():  # what ends us before we know the process would leave it running
                # A session of its own, so that a time limit ends the engine's other processes too.
                process = subprocess.Popen(
                    words, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            code = process.wait(command.timeout_s)
        except OSError as error:
            raise AnalysisError(f"{words[0]}: cannot be run ({error.strerror or error})") from None
        except ValueError:  # no program takes such a word
            raise AnalysisError(
                f"version {version!r}: its name holds a NUL byte, which no command can be given"
            ) from None
        except subprocess.TimeoutExpired:
            return f"took more than {command.timeout_s:g} s"
        finally:
            if process is not None:
                _end(process)
        if code in NOT_STARTED:
            raise AnalysisError(f"the command ended with {code}, not found or not executable:\n{_tail(output)}")
        if code == SKIP:
            return "the command said skip (125)"
        if code:
            return f"the command ended with {code}: {_tail(output) or 'no output'}"
    return ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    for kind in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _GRACE_S
        for group in _groups(process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, kind)
        while process.poll() is None or _groups(process.pid):
            if time.monotonic() > until:
                break
            time.sleep(_POLL_S)
        else:
            return
    process.wait()


def _groups(session: int) -> set[int]:
    """Return the process groups of a session that still run: `timeout` and shells with job control make their own."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # pid (name) state ppid pgrp session; the name may hold anything
            state, _, group, of = stat.read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()[:4]
            if int(of) == session and state not in "ZX":
                found.add(int(group))
    return found


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - KEPT_OUTPUT_BYTES))
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for trace in folder.rglob("*.arrow"):  # of an earlier bisection, which would be judged along
            trace.unlink()
    except OSError as error:
        raise AnalysisError(f"{folder}: cannot be made ({error.strerror or error}); name another with --keep") from None


def listed_versions(text: str | None, good: str, bad: str) -> list[str]:
    """Return the versions from `good` to `bad`, oldest first: joined by commas, a file's lines, or git's commits here."""
    if text is None:
        return [good, *_commits(good, bad)]
    if os.path.isfile(text):  # noqa: PTH113  # a list of many versions is too long a name for a Path to be asked
        names = read_order(Path(text))
    else:
        names = one_each([name.strip() for name in text.split(",") if name.strip()], "--versions")
    for option, name in (("--good", good), ("--bad", bad)):
        if name not in names:
            shown = ", ".join(names[:20]) + (f" and {len(names) - 20:,} more" if len(names) > 20 else "")
            alone = "; if that is a file, there is none of that name here" if len(names) == 1 else ""
            raise AnalysisError(f"{option} {name} is not among the versions: {shown}{alone}")
    first, last = names.index(good), names.index(bad)
    if first >= last:
        raise AnalysisError(f"--good {good} does not come before --bad {bad} in --versions: oldest first, please")
    return list(names[first : last + 1])


def _commits(good: str, bad: str) -> list[str]:
    named = "name the versions with --versions"
    try:
        commits = git("rev-list", "--reverse", "--first-parent", "--end-of-options", f"{good}..{bad}").split()
    except AnalysisError as error:
        raise AnalysisError(f"{error}; {named}, or run this in a git repository") from None
    if not commits:
        raise AnalysisError(f"git knows no commit after {good} up to {bad}")
    return commits
