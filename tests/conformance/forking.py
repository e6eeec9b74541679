"""Running something in a process of its own, forked from one that has imported what it needs, with its log in a file."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path


def fork(log: Path, act: Callable[[], None], environment: Mapping[str, str] | None = None) -> int:
    """Call `act` in a child, in a session of its own, what it prints going to `log`; return its process id.

    The child ends with 0, or with 1 if `act` raises, which the log then says.
    """
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setsid()
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment or {})
        act()
        status = 0
    except BaseException:  # noqa: BLE001  # told, and the child ends: it must not come back into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for(pid: int, timeout_s: float) -> int:
    """Return a child's exit status; -1 if it took longer, and was killed with what it had started."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1
