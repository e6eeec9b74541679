"""Which files belong together: the traces of a folder, the segments of one recording."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import TraceError
from .files import split_segment_name
from .header import TraceHeader
from .reader import TraceReader

RECOVERED: Final = ".recovered.arrow"  # how the name of a file ends that `kvcanary recover` wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one process recorded: `paths` in the order of their segments. `header` is None if none can be read."""

    paths: tuple[Path, ...]
    header: TraceHeader | None

    @property
    def name(self) -> str:
        """How people call it: its file, or what its segments have in common."""
        return recording_name(self.paths)


def recording_name(paths: Sequence[Path]) -> str:
    """Return `trace.arrow` for `trace.000000.arrow`, `trace.000001.arrow` and so on, a single file's own name for it."""
    split = split_segment_name(paths[0])
    if len(paths) == 1 or split is None:
        return str(paths[0])
    return str(paths[0].with_name(f"{split[0]}.arrow"))


def traces_in(folder: Path) -> list[Path]:
    """Return the trace files of a folder, not of those in it; of a recovered trace the recovered file alone.

    Where a trace has been written to since, by an engine that was still running, it is the trace alone.

    Raises:
        TraceError: it cannot be read, or there are none.
    """
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix == ".arrow" and not path.name.startswith("."))
    except OSError as error:
        raise TraceError(f"{folder}: cannot be read: {error.strerror}") from None
    recovered = {path.name.removesuffix(RECOVERED): path for path in found if path.name.endswith(RECOVERED)}
    pairs = [(torn, recovered[torn.stem]) for torn in found if torn.stem in recovered]
    passed_over = {made if _newer(torn, made) else torn for torn, made in pairs}
    found = [path for path in found if path not in passed_over]
    if not found:
        raise TraceError(f"{folder}: holds no .arrow file; name a folder with traces in it")
    return found


def _newer(path: Path, than: Path) -> bool:
    try:
        return path.stat().st_mtime_ns > than.stat().st_mtime_ns
    except OSError:  # gone meanwhile
        return False


def group_recordings(paths: Iterable[Path]) -> tuple[list[Recording], list[str]]:
    """Put segments of one recording together, in order; other files are recordings of their own.

    A file without a readable header belongs to the recording that its name speaks of, if others of it are there. Of
    two copies of a segment the one with an end is taken.

    Returns:
        The recordings in the order of their first files, and what was left out, in words.
    """
    found: dict[tuple[str, ...], list[tuple[int, Path, TraceHeader | None, bool]]] = {}
    unreadable: list[Path] = []
    owners: dict[tuple[Path, str], tuple[str, ...]] = {}
    for path in paths:
        try:
            with TraceReader(path) as reader:
                header, complete = reader.header, reader.complete
        except TraceError:
            unreadable.append(path)
            continue
        if header.segment is None:
            found[("file", str(path), str(len(found)))] = [(0, path, header, complete)]
            continue
        key = ("recording", header.trace_id)
        found.setdefault(key, []).append((header.segment.number, path, header, complete))
        name = split_segment_name(path)
        if name is not None:
            owners[path.parent, name[0]] = key
    for path in unreadable:
        name = split_segment_name(path)
        owner = owners.get((path.parent, name[0])) if name is not None else None
        if name is not None and owner is not None:
            found[owner].append((name[1], path, None, False))
        else:
            found["unreadable", str(path), str(len(found))] = [(0, path, None, False)]
    notes: list[str] = []
    recordings = []
    for parts in found.values():
        chosen: dict[int, tuple[int, Path, TraceHeader | None, bool]] = {}
        for part in sorted(parts, key=lambda one: (one[0], not one[3])):
            if part[0] in chosen:
                notes.append(f"{part[1]}: left out, {chosen[part[0]][1].name} is the same segment")
            else:
                chosen[part[0]] = part
        paths_ = tuple(part[1] for part in chosen.values())
        recordings.append(Recording(paths=paths_, header=next((p[2] for p in chosen.values() if p[2]), None)))
    return recordings, notes
