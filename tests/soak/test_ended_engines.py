"""200 real engines (transformers) killed with SIGKILL at random moments: no forward whose outcome reached the host is lost."""

import os
import random
import signal
import time
from pathlib import Path

from ..support.killed.ended_series import EndedEngines, check, steps_of
from ..support.killed.engine_process import wait_until_gone

KILLS = 200


def test_no_forward_is_lost(tmp_path: Path) -> None:
    forwards = unflushed = 0
    with EndedEngines() as engines:
        for number in range(KILLS):
            folder = tmp_path / str(number)
            folder.mkdir()
            pid = engines.start_in(folder)
            while not steps_of(folder):
                os.kill(pid, 0)  # raises where it died by itself
                time.sleep(0.005)
            time.sleep(random.Random(number).random() * 1.5)
            os.kill(pid, signal.SIGKILL)
            wait_until_gone(pid)
            unflushed += check(folder)
            forwards += steps_of(folder)
    print(
        f"{KILLS} kills, {forwards:,} forwards whose outcome reached the host, all there; {unflushed:,} from the tail"
    )
