"""Ways in which a real engine ends without a word: the last forward whose outcome it had is in the trace."""

import os
import signal
import time
from pathlib import Path

from ..support.killed.ended_series import EndedEngines, check, steps_of
from ..support.killed.engine_process import wait_until_gone

BY_ITSELF = ("os_exit", "abort", "segfault", "kill", "sigterm")


def test_the_last_forward_is_in_the_trace(tmp_path: Path) -> None:
    with EndedEngines() as engines:
        for number, way in enumerate(BY_ITSELF):
            folder = tmp_path / way
            folder.mkdir()
            wait_until_gone(engines.start_in(folder, way=way, steps=7 + number))
            assert steps_of(folder) == 7 + number
            assert check(folder) > 0, "the last second is not in the trace but behind it"
        for times in (1, 2):
            folder = tmp_path / f"interrupted{times}"
            folder.mkdir()
            pid = engines.start_in(folder)
            while steps_of(folder) < 5:
                time.sleep(0.01)
            for _ in range(times):
                os.killpg(pid, signal.SIGINT)
            wait_until_gone(pid)
            check(folder)
