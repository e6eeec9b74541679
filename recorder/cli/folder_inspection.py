"""What `kvcanary inspect` says of a folder: a line for each file, and what is missing between segments."""

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import TraceError, printable
from ..text_tables import show_columns
from ..trace.inspect import TraceInspection, inspect_trace
from ..trace.recordings import group_recordings, traces_in
from ..trace.schema import MAX_MISSING_SEGMENTS

if TYPE_CHECKING:
    from rich.console import Console

_BAD_SHOWN: Final = 10


class RecordingInspection(NamedTuple):
    """One recording's files in order; `missing` are the numbers of segments that lack between them."""

    name: str
    files: list[TraceInspection]
    missing: list[int]

    def to_json(self) -> dict[str, Any]:
        """Return the findings as plain JSON values."""
        header = self.files[0].header
        named = {"name": self.name, "trace_id": header.trace_id, "ranks": dataclasses.asdict(header.ranks)}
        return {**named, "missing_segments": self.missing, "files": [found.to_json() for found in self.files]}


class FolderInspection(NamedTuple):
    """`recordings` in the order of their first files; `unreadable` maps a file to why it cannot be read."""

    folder: Path
    recordings: list[RecordingInspection]
    unreadable: dict[str, str]
    notes: list[str]

    @property
    def files(self) -> list[TraceInspection]:
        """All files that can be read."""
        return [one for recording in self.recordings for one in recording.files]

    @property
    def exit_code(self) -> int:
        """0 if all is whole, 125 if something is torn, damaged, lossy, missing or being recorded, 2 if a file is unreadable."""
        lacking = any(recording.missing for recording in self.recordings)
        incomplete = lacking or any(one.state != "complete" for one in self.files)
        return 2 if self.unreadable else 125 if incomplete else 0

    def to_json(self) -> dict[str, Any]:
        """Return the findings as plain JSON values."""
        recordings = [recording.to_json() for recording in self.recordings]
        return self._asdict() | {"folder": str(self.folder), "recordings": recordings}


def inspect_folder(folder: Path) -> FolderInspection:
    """Inspect every trace of a folder; raise `TraceError` if it holds none or cannot be read."""
    recordings, notes = group_recordings(traces_in(folder))
    found = FolderInspection(folder, [], {}, notes)
    for recording in recordings:
        files = []
        for path in recording.paths:
            try:
                files.append(inspect_trace(path))
            except TraceError as error:
                found.unreadable[str(path)] = str(error)
        if files:
            missing = missing_segments([one.header.segment.number for one in files if one.header.segment is not None])
            found.recordings.append(RecordingInspection(recording.name, files, missing))
    return found


def missing_segments(numbers: Sequence[int]) -> list[int]:
    """Return the first of the numbers that lack between others: a file may claim any number."""
    there = sorted(set(numbers))
    between = itertools.chain.from_iterable(range(a + 1, b) for a, b in itertools.pairwise(there))
    return list(itertools.islice(between, MAX_MISSING_SEGMENTS))


def show_folder(console: "Console", found: FolderInspection) -> None:
    """Print a line for each file, then what is wrong with them."""
    from rich.text import Text

    numbers = ("events", "forwards", "seconds", "bytes")
    rows = [
        (
            *(Path(one.path).name, _rank(one), "" if one.header.segment is None else str(one.header.segment.number)),
            *(f"{one.num_events:,}", f"{one.forwards:,}", _seconds(one), f"{one.size_bytes:,}", _lost(one), one.state),
        )
        for one in found.files
    ]
    show_columns(console, rows, ("file", "rank", "segment", *numbers, "lost", "state"), right=numbers)
    console.print()
    lines = []
    for recording in found.recordings:
        if recording.missing:
            more = " and more" if len(recording.missing) == MAX_MISSING_SEGMENTS else ""
            lines.append(f"missing {recording.name}: segments {', '.join(map(str, recording.missing))}{more}")
    for one in found.files:
        lines += [f"live    {Path(one.path).name}: {one.live_line}"] if one.being_recorded else []
        lines += [f"loss    {Path(one.path).name}: {loss}" for loss in one.loss_lines]
        lines += [f"gap     {gap['reason']}" for gap in one.gaps]
    lines += [f"error   {message}" for message in found.unreadable.values()]
    lines += [f"note    {note}" for note in found.notes]
    for line in lines[:_BAD_SHOWN] or ["whole   nothing lost"]:
        console.print(Text(printable(line)), soft_wrap=not console.is_terminal)
    if len(lines) > _BAD_SHOWN:
        console.print(Text(f"        and {len(lines) - _BAD_SHOWN:,} more lines of that kind, see --json"))
    command = ["kvcanary", "recover"] if any(one.can_be_recovered for one in found.files) else ["kvcanary-replay"]
    console.print(Text(printable(f"next    {shlex.join([*command, str(found.folder)])}")), soft_wrap=True)


def _rank(one: TraceInspection) -> str:
    ranks = dataclasses.asdict(one.header.ranks)
    named = [f"{n} {ranks[f'{n}_rank']}/{ranks[f'{n}_size']}" for n in ("tp", "pp", "dp") if ranks[f"{n}_size"] > 1]
    return " ".join(filter(None, [one.header.role, *named]))


def _seconds(one: TraceInspection) -> str:
    return "" if one.first_ns is None or one.last_ns is None else f"{(one.last_ns - one.first_ns) / 1e9:,.1f}"


def _lost(one: TraceInspection) -> str:
    known = f"{one.lost_events:,} events" if one.lost_events else ""
    unknown = "unknown" if one.unknown_losses else ""
    return " and ".join(filter(None, [known, unknown])) or ("slots" if one.num_losses else "")
