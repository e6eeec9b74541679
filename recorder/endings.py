"""What ends a program from outside: Ctrl-C, SIGTERM, a closed terminal."""

import signal
from typing import Final

ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_endings() -> None:
    """Ignore them: in workers, since they go to the whole process group and the parent tells its workers itself; in a
    program that has been ended and is clearing away.
    """
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
