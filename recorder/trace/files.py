"""The files of a recording: their names, and which of them is being written.

A file that is being written is locked (`flock`); the lock ends with the process, however it ends. Where the file system
knows no locks, no file is locked.
"""

import contextlib
import fcntl
import glob
import re
from pathlib import Path
from typing import Final

from ..files import regular_file

_NUMBERED: Final = re.compile(r"\.(\d{6,})\.arrow$")


def segment_path(path: Path, number: int) -> Path:
    """Return where segment `number` of the recording `path` lies: `trace.000003.arrow` for `trace.arrow`."""
    return path.with_name(f"{base_name(path)}.{number:06d}.arrow")


def all_segments(path: Path) -> Path:
    """Return what all segments of the recording `path` are called: `trace.*.arrow` for `trace.arrow`."""
    return path.with_name(f"{base_name(path)}.*.arrow")


def segments_of(path: Path) -> list[Path]:
    """Return the segments of the recording `path` that are there, by name."""
    there = sorted(path.parent.glob(glob.escape(base_name(path)) + ".*.arrow"))
    return [one for one in there if (split_segment_name(one) or ("", 0))[0] == base_name(path)]


def split_segment_name(path: Path) -> tuple[str, int] | None:
    """Return the recording's name and the segment's number that a file name speaks of, None if it does not."""
    found = _NUMBERED.search(path.name)
    return (path.name[: found.start()], int(found[1])) if found else None


def base_name(path: Path) -> str:
    """Return `trace` for `trace.arrow`."""
    return path.name.removesuffix(".arrow")


def recording_path(path: Path) -> Path:
    """Return `trace.arrow` for its segment `trace.000003.arrow`, and a path of no segment as it is."""
    split = split_segment_name(path)
    return path if split is None else path.with_name(f"{split[0]}.arrow")


def shrunk_path(path: Path) -> Path:
    """Return where `kvcanary shrink` writes by default: `trace.shrunk.arrow` for `trace.arrow`, a segment of it, or a folder
    `trace` with its segments.
    """
    return path.with_name(f"{base_name(recording_path(path))}.shrunk.arrow")


def tail_paths(trace: Path) -> tuple[Path, Path]:
    """Return where the tail of a trace lies; all segments of a recording have one."""
    name = recording_path(trace).name
    return trace.with_name(f"{name}.tail0"), trace.with_name(f"{name}.tail1")


def is_locked(descriptor: int, *, unknown: bool = False) -> bool:
    """Say whether somebody else, a recording process as a rule, has locked an open file; `unknown` if no lock is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError) or unknown
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def is_being_written(path: Path, *, unknown: bool = False) -> bool:
    """Say whether a process is writing a trace at this moment; `unknown` if it cannot be opened, or no lock is."""
    with contextlib.suppress(OSError), regular_file(path) as descriptor:
        return is_locked(descriptor, unknown=unknown)
    return unknown
