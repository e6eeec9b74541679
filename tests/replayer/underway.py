"""Waiting until a replay in another process is well under way, however busy the machine is."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def wait_until_under_way(process: subprocess.Popen[str], reports: Sequence[Path], *, cpu_seconds: float) -> None:
    """Wait until all of `reports` exist, then until the process and its children have worked on for `cpu_seconds`.

    The process must lead a session of its own. Fails where it ends before.
    """
    while not all(path.exists() for path in reports):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    enough = _cpu_seconds(process.pid) + cpu_seconds
    while _cpu_seconds(process.pid) < enough:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def _cpu_seconds(session: int) -> float:
    """Return what the processes of a session that are still there have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS
