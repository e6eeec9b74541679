"""What recordings that are over may take of a folder: a server that crashes again and again must not fill the disk.

A segment is locked as long as it is written (`flock`, which ends with the process, however it ends). So a recording
whose newest segment is locked is somebody's, also in another container. Where the file system knows no locks, every
recording is taken for somebody's, and nothing is deleted.
"""

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Final

from ..files import regular_file
from ..trace.files import is_being_written, split_segment_name, tail_paths
from ..trace.framing import FILE_START
from ..trace.schema import HEADER_KEY

_BEGINNING_NS: Final = 10_000_000_000
_BEGINNING_BYTES: Final = 1 << 16  # of a file, in which its header begins

_log = logging.getLogger("kvcanary")


def drop_the_past(folder: Path, most_bytes: int) -> list[Path]:
    """Delete segments of recordings that are over, oldest first, until all segments of the folder fit `most_bytes`.
    Those of recordings that are being written count, and stay; so do frozen folders, traces of one file, and files of
    other programs that are called as segments are, which do not count. What cannot be deleted is logged and stays.
    """
    recordings: dict[str, dict[Path, int]] = {}  # each one's segments with their numbers; -1 is its tail
    for path in folder.glob("*.arrow"):
        found = split_segment_name(path)
        if found is not None and _is_ours(path):
            recordings.setdefault(found[0], {})[path] = found[1]
    over: list[tuple[int, int, int, Path]] = []
    total = 0
    for segments in recordings.values():
        tails = [path for path in tail_paths(next(iter(segments))) if path.is_file() and not path.is_symlink()]
        # Two, since the newest has no lock yet at the moment in which it is begun.
        newest = sorted(segments, key=segments.__getitem__)[-2:]
        live = _begins(newest) or any(is_being_written(path, unknown=True) for path in newest)
        for path, number in (segments | dict.fromkeys(tails, -1)).items():
            size, time_ns = _size_and_time(path)
            total += size
            if not live:
                over.append((time_ns, number, size, path))
    deleted = []
    for _, _, size, path in sorted(over):
        if total <= most_bytes:
            break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.error("kvcanary: %s: a segment of an earlier recording cannot be deleted: %s", path, error.strerror)
            continue
        total -= size
        deleted.append(path)
    if deleted:
        _log.info("kvcanary: %s: %d segments of earlier recordings deleted", folder, len(deleted))
    return deleted


def _is_ours(path: Path) -> bool:
    """Say whether a file is a segment of a trace: others, too, have shards of Arrow files with a number in the name."""
    beginning = b""
    with contextlib.suppress(OSError), regular_file(path) as descriptor:
        beginning = os.read(descriptor, _BEGINNING_BYTES)
    return beginning.startswith(FILE_START) and HEADER_KEY in beginning


def _begins(newest: list[Path]) -> bool:
    """Say whether a recording has its first segment only, so lately that it may not be locked yet."""
    return len(newest) == 1 and time.time_ns() - _size_and_time(newest[0])[1] < _BEGINNING_NS


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
