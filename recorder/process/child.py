"""Running a command as a shell would: in the foreground, with signals passed on, and its exit code for ours."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_POLL_S: Final = 0.05
_ORPHANS_S: Final = 2.0  # a server that has ended by itself has ended its processes before


def run_child(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, int]:
    """Run a command to its end, in a process group of its own; return its exit code, and its process group.

    A signal that this process gets meanwhile goes to the whole group, once, as from a terminal; SIGTERM to the command
    alone, which may have work to finish with the help of its own processes, and to the rest of the group once it has
    ended without them. On a terminal the group is in the foreground, so that Ctrl-C and Ctrl-Z go there and not here. A
    command that signal n ended gives 128 + n. Raises `OSError` if the command cannot be started.
    """
    group = 0
    early: list[int] = []
    got: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        (got if group else early).append(number)
        if group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.kill if number == signal.SIGTERM else os.killpg)(group, number)

    before = {n: signal.signal(n, pass_on) for n in PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        process = subprocess.Popen(command, env=dict(environ), process_group=0)
        group = process.pid
        for number in early:
            pass_on(number, None)
        with _terminal() as terminal:
            process.returncode = _wait(group, terminal)
        if signal.SIGTERM in got and not wait_for_group(group, _ORPHANS_S):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return (process.returncode if process.returncode >= 0 else 128 - process.returncode), group


def wait_for_group(group: int, patience_s: float) -> bool:
    """Wait until no process of a group is left; return whether that came true in time."""
    deadline = time.monotonic() + patience_s
    while _alive(group):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _alive(group: int) -> bool:
    """Say whether a process of the group runs; one that has ended and waits to be heard of does not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return bool(group_members(group))


def group_members(group: int) -> list[int]:
    """Return the processes of a group that have not ended, by number."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(path.parent.name))
    return sorted(found)


@contextlib.contextmanager
def _terminal() -> Iterator[int | None]:
    """Yield the controlling terminal, if this process is in its foreground, and be there again afterwards."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        ours = os.tcgetpgrp(terminal) == os.getpgrp()
        yield terminal if ours else None
        if ours:
            _to_foreground(terminal, os.getpgrp())
    finally:
        os.close(terminal)


def _to_foreground(terminal: int, group: int) -> None:
    """Put a process group into the foreground, from whichever side of it this process is on."""
    ignored = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):  # the terminal, or the group, is gone
            os.tcsetpgrp(terminal, group)
    finally:
        signal.signal(signal.SIGTTOU, ignored)


def _wait(group: int, terminal: int | None) -> int:
    """Wait for the group's leader; return its exit code, negative for a signal. Ctrl-Z stops this process with it."""
    if terminal is not None:
        _to_foreground(terminal, group)
    while True:
        _, status = os.waitpid(group, os.WUNTRACED if terminal is not None else 0)
        if not os.WIFSTOPPED(status) or terminal is None:
            return os.waitstatus_to_exitcode(status)
        # It asked for the terminal before it had it; otherwise the user stopped it, and so this process too.
        if os.WSTOPSIG(status) not in (signal.SIGTTIN, signal.SIGTTOU):
            _to_foreground(terminal, os.getpgrp())
            os.kill(os.getpid(), signal.SIGSTOP)
        if os.tcgetpgrp(terminal) == os.getpgrp():
            _to_foreground(terminal, group)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGCONT)
