"""How the files of a recording that was cut are called."""

import re
from pathlib import Path
from typing import Final

_NUMBERED: Final = re.compile(r"\.(\d{6,})\.arrow$")


def segment_path(path: Path, number: int) -> Path:
    """Return where segment `number` of the recording `path` lies: `trace.000003.arrow` for `trace.arrow`."""
    return path.with_name(f"{base_name(path)}.{number:06d}.arrow")


def all_segments(path: Path) -> Path:
    """Return what all segments of the recording `path` are called: `trace.*.arrow` for `trace.arrow`."""
    return path.with_name(f"{base_name(path)}.*.arrow")


def split_segment_name(path: Path) -> tuple[str, int] | None:
    """Return the recording's name and the segment's number that a file name speaks of, None where it does not."""
    found = _NUMBERED.search(path.name)
    return (path.name[: found.start()], int(found[1])) if found else None


def base_name(path: Path) -> str:
    """Return `trace` for `trace.arrow`."""
    return path.name.removesuffix(".arrow")


def glob_escape(name: str) -> str:
    """Return a name as a pattern that only it matches."""
    return re.sub(r"([*?[])", r"[\1]", name)
