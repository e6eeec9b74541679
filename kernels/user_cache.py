"""This user's own folder for what can be made again, and whether something on disk is this user's own."""

import os
import stat
from pathlib import Path
from typing import Final

_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def user_cache() -> Path:
    """Return this user's folder for what can be made again; it may not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "kvcanary"


def is_own(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, or to root, and nobody else may write to it.

    `status` is of the entry itself (`lstat`): a link is nobody's own.
    """
    return (
        status.st_uid in (os.geteuid(), 0)
        and not stat.S_ISLNK(status.st_mode)
        and not status.st_mode & _OTHERS_MAY_WRITE
    )
