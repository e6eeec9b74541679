"""A command of the user's, run to its end with everything that it started."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from ...recorder.process.endings import endings_deferred
from ..errors import AnalysisError

NOT_STARTED: Final = (126, 127)  # what a shell says of a command that is not executable, or not there
SKIP: Final = 125
KEPT_OUTPUT_BYTES: Final = 1 << 20
_GRACE_S: Final = 5.0
_POLL_S: Final = 0.02


def run_command(
    words: Sequence[str], environment: Mapping[str, str], timeout_s: float | None = None
) -> tuple[str, list[str]]:
    """Run a command; return why it did not end well, "" if it did, and the last lines that it printed.

    Raise `AnalysisError` if it cannot be started.
    """
    with tempfile.TemporaryFile() as output:
        process: subprocess.Popen[bytes] | None = None
        try:
            with endings_deferred():  # what ends us before we know the process would leave it running
                # A session of its own, so that a time limit ends the engine's other processes too.
                process = subprocess.Popen(
                    words, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            code = process.wait(timeout_s)
        except OSError as error:
            raise AnalysisError(f"{words[0]}: cannot be run ({error.strerror or error})") from None
        except subprocess.TimeoutExpired:
            return f"took more than {timeout_s:g} s", _tail(output)
        finally:
            if process is not None:
                _end(process)
        lines = _tail(output)
        last = lines[-1] if lines else ""
        if code in NOT_STARTED:
            raise AnalysisError(f"the command ended with {code}, not found or not executable:\n{last}")
        if code == SKIP:
            return "the command said skip (125)", lines
        return f"the command ended with {code}: {last or 'no output'}" if code else "", lines


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


def _tail(output: IO[bytes]) -> list[str]:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - KEPT_OUTPUT_BYTES))
    return output.read().decode("utf-8", "replace").strip().splitlines()
