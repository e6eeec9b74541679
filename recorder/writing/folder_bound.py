"""What recordings that are over may take of a folder: a server that crashes again and again must not fill the disk.

A segment is locked as long as it is written (`flock`, which ends with the process, however it ends). So a recording
whose newest segment is locked is somebody's, also in another container. Where the file system knows no locks, every
recording is taken for somebody's, and nothing is deleted.
"""

import logging
import os
import stat
import time
from pathlib import Path
from typing import Final

from ..trace.files import is_locked, split_segment_name, tail_paths
from ..trace.schema import HEADER_KEY
from .trace_file import MAGIC

_BEGINNING_NS: Final = 10_000_000_000
_BEGINNING_BYTES: Final = 1 << 16  # of a file, in which its header begins

_log = logging.getLogger("kvcanary")


def drop_the_past(folder: Path, most_bytes: int) -> list[Path]:
    """Delete segments of recordings that are over, oldest first, until all segments of the folder fit `most_bytes`.

    Those of recordings that are being written count, and stay; so do frozen folders, traces of one file, and files of
    other programs that are called as segments are, which do not count. What cannot be deleted is logged and stays.
    """
    recordings: dict[str, list[Path]] = {}
    for path in folder.glob("*.arrow"):
        found = split_segment_name(path)
        if found is not None and _is_ours(path):
            recordings.setdefault(found[0], []).append(path)
    sizes = {path: _size_and_time(path) for paths in recordings.values() for path in (*paths, *_tails(paths))}
    total = sum(size for size, _ in sizes.values())
    over = [
        path
        for paths in recordings.values()
        # Two, since the newest has no lock yet at the moment in which it is begun.
        if total > most_bytes and not any(map(_is_written, sorted(paths, key=_number)[-2:])) and not _begins(paths)
        for path in (*paths, *_tails(paths))
    ]
    deleted = []
    for path in sorted(over, key=lambda path: (sizes[path][1], _number(path))):
        if total <= most_bytes:
            break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.error("kvcanary: %s: a segment of an earlier recording cannot be deleted: %s", path, error.strerror)
            continue
        total -= sizes[path][0]
        deleted.append(path)
    if deleted:
        _log.info("kvcanary: %s: %d segments of earlier recordings deleted", folder, len(deleted))
    return deleted


def _tails(paths: list[Path]) -> list[Path]:
    """Return what the process of a recording has beside its segments, or left there when it died."""
    return [path for path in tail_paths(paths[0]) if path.is_file() and not path.is_symlink()]


def _is_ours(path: Path) -> bool:
    """Say whether a file is a segment of a trace: others, too, have shards of Arrow files with a number in the name."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        beginning = os.read(descriptor, _BEGINNING_BYTES)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return beginning.startswith(MAGIC) and HEADER_KEY in beginning


def _begins(paths: list[Path]) -> bool:
    """Say whether a recording has its first segment only, so lately that it may not be locked yet."""
    return len(paths) == 1 and time.time_ns() - _size_and_time(paths[0])[1] < _BEGINNING_NS


def _number(path: Path) -> int:
    found = split_segment_name(path)
    return found[1] if found is not None else -1


def _is_written(path: Path) -> bool:
    """Say whether somebody writes a file, or may."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return is_locked(descriptor, unknown=True)
    finally:
        os.close(descriptor)


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
