"""Which files belong together: the traces of a folder, the segments of one recording."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import NoTracesError, TraceError
from ..remote import mapped
from .files import recording_path, segments_of, split_segment_name
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


class _Part(NamedTuple):
    number: int
    path: Path
    header: TraceHeader | None
    complete: bool


def recording_name(paths: Sequence[Path]) -> str:
    """Return `trace.arrow` for `trace.000000.arrow`, `trace.000001.arrow` and so on, a single file's own name for it."""
    return str(paths[0] if len(paths) == 1 else recording_path(paths[0]))


def traces_in(folder: Path) -> list[Path]:
    """Return the trace files of a folder, not of those in it, and for a report's the trace beside it; of a recovered trace
    the recovered file alone. Where a
    trace has been written to since, by an engine that was still running, it is the trace alone. Raises `TraceError` if
    the folder cannot be read, `NoTracesError` if it holds none.
    """
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix == ".arrow" and not path.name.startswith("."))
    except OSError as error:
        raise TraceError(f"{folder}: cannot be read: {error.strerror}") from None
    recovered = {path.name.removesuffix(RECOVERED): path for path in found if path.name.endswith(RECOVERED)}
    pairs = [(torn, recovered[torn.stem]) for torn in found if torn.stem in recovered]
    passed_over = {made if _newer(torn, made) else torn for torn, made in pairs}
    found = [path for path in found if path not in passed_over]
    if not found and (folder / "summary.json").exists():
        beside = folder.with_suffix(".arrow")
        found = [beside] if beside.exists() else segments_of(beside)
    if not found:
        raise NoTracesError(f"{folder}: holds no .arrow file; name a folder with traces in it")
    return found


def one_recording(path: Path) -> tuple[Path, ...]:
    """Return a trace's file, or the segments of a recording: of that name, or the only one of a folder. Raises `TraceError`
    if there are more.
    """
    folder = path.is_dir()
    there = traces_in(path) if folder else [] if path.exists() else segments_of(path)
    if not there:
        return (path,)
    recordings, _ = group_recordings(there)
    if len(recordings) > 1:
        names = ", ".join(Path(recording.name).name for recording in recordings[:5])
        raise TraceError(f"{path}: holds {len(recordings)} recordings, {names}; name one of them")
    return recordings[0].paths


def _newer(path: Path, than: Path) -> bool:
    try:
        return path.stat().st_mtime_ns > than.stat().st_mtime_ns
    except OSError:  # gone meanwhile
        return False


def group_recordings(paths: Iterable[Path]) -> tuple[list[Recording], list[str]]:
    """Return recordings in the order of their first files, segments of one together, and what was left out, in words. A
    file without a readable header belongs to the recording that its name speaks of, if others of it are there. Of two
    copies of a segment the one with an end is taken.
    """
    found: dict[tuple[str, ...], list[_Part]] = {}
    unreadable: list[Path] = []
    owners: dict[Path, tuple[str, ...]] = {}
    given = list(paths)
    for path, opened in zip(given, mapped(_opened, given), strict=True):
        if opened is None:
            unreadable.append(path)
            continue
        header, complete = opened
        segment = header.segment
        key = ("file", str(path), str(len(found))) if segment is None else ("recording", header.trace_id)
        found.setdefault(key, []).append(_Part(segment.number if segment else 0, path, header, complete))
        if segment is not None and split_segment_name(path) is not None:
            owners[recording_path(path)] = key
    for path in unreadable:
        split, alone = split_segment_name(path), ("unreadable", str(path), str(len(found)))
        owner = alone if split is None else owners.get(recording_path(path), alone)
        found.setdefault(owner, []).append(_Part(split[1] if split else 0, path, None, False))
    notes: list[str] = []
    recordings = []
    for parts in found.values():
        chosen: dict[int, _Part] = {}
        for part in sorted(parts, key=lambda one: (one.number, not one.complete)):
            if part.number in chosen:
                notes.append(f"{part.path}: left out, {chosen[part.number].path.name} is the same segment")
            else:
                chosen[part.number] = part
        known = next((part.header for part in chosen.values() if part.header), None)
        recordings.append(Recording(paths=tuple(part.path for part in chosen.values()), header=known))
    return recordings, notes


def _opened(path: Path) -> tuple[TraceHeader, bool] | None:
    """Return a trace's header and whether it is complete, None if it cannot be read."""
    try:
        with TraceReader(path) as reader:
            return reader.header, reader.complete
    except TraceError:
        return None
