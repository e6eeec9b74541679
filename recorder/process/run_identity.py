"""One id for all processes of a server, so that the ranks of two servers in one folder are not taken for one another's.

The first process that loads a plugin puts the id into its environment before it starts the others, which inherit it.
A process that found none may have siblings that have none of its own either: its trace then names no run.
"""

import os
from collections.abc import MutableMapping
from typing import Final

RUN_ID: Final = "KVCANARY_RUN_ID"

_made_by = -1  # the process that made the id, where that is this one or its parent


def share_run_id() -> None:
    """Have the processes that this one will start know one another by an id, unless it got one itself."""
    global _made_by
    if not os.environ.get(RUN_ID):
        give_run_id(os.environ)
        _made_by = os.getpid()


def give_run_id(environ: MutableMapping[str, str]) -> None:
    """Put a fresh id into the environment of processes that belong together."""
    environ[RUN_ID] = os.urandom(16).hex()


def run_id() -> str:
    """Return the id that this process got from the one that started it, empty for none."""
    return "" if _made_by == os.getpid() else os.environ.get(RUN_ID, "")
