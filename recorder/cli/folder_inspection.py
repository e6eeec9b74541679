"""What `kvcanary inspect` says of a folder: a line for each file, and what is missing between segments."""

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TraceError, printable
from ..trace.inspect import TraceInspection, inspect_trace
from ..trace.recordings import group_recordings, traces_in
from ..trace.schema import MAX_MISSING_SEGMENTS

if TYPE_CHECKING:
    from rich.console import Console

_BAD_SHOWN = 10


@dataclass(slots=True, kw_only=True)
class FolderInspection:
    """`recordings` in the order of their first files; `unreadable` maps a file to why it cannot be read."""

    folder: Path
    recordings: list["RecordingInspection"] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if all is whole, 125 if something is torn, damaged, lossy, missing or being recorded, 2 if a file is unreadable."""
        if self.unreadable:
            return 2
        whole = all(not r.missing and all(f.state == "complete" for f in r.files) for r in self.recordings)
        return 0 if whole else 125

    def to_json(self) -> dict[str, Any]:
        """Return the findings as plain JSON values."""
        return {
            "folder": str(self.folder),
            "recordings": [
                {
                    "name": recording.name,
                    "trace_id": recording.files[0].header.trace_id,
                    "ranks": dataclasses.asdict(recording.files[0].header.ranks),
                    "missing_segments": recording.missing,
                    "files": [found.to_json() for found in recording.files],
                }
                for recording in self.recordings
            ],
            "unreadable": self.unreadable,
            "notes": self.notes,
        }


@dataclass(slots=True, kw_only=True)
class RecordingInspection:
    """One recording's files in order; `missing` are the numbers of segments that lack between them."""

    name: str
    files: list[TraceInspection]
    missing: list[int]


def inspect_folder(folder: Path) -> FolderInspection:
    """Inspect every trace of a folder; raise `TraceError` if it holds none or cannot be read."""
    recordings, notes = group_recordings(traces_in(folder))
    found = FolderInspection(folder=folder, notes=notes)
    for recording in recordings:
        files = []
        for path in recording.paths:
            try:
                files.append(inspect_trace(path))
            except TraceError as error:
                found.unreadable[str(path)] = str(error)
        if files:
            numbers = [f.header.segment.number for f in files if f.header.segment is not None]
            found.recordings.append(RecordingInspection(name=recording.name, files=files, missing=_missing(numbers)))
    return found


def _missing(numbers: Sequence[int]) -> list[int]:
    """Return the first of the numbers that lack between others: a file may claim any number."""
    there = sorted(set(numbers))
    between = itertools.chain.from_iterable(range(a + 1, b) for a, b in itertools.pairwise(there))
    return list(itertools.islice(between, MAX_MISSING_SEGMENTS))


def show_folder(console: "Console", found: FolderInspection) -> None:
    """Print a line for each file, then what is wrong with them."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("file", "rank", "segment", "events", "forwards", "seconds", "bytes", "lost", "state"):
        table.add_column(name, justify="right" if name in ("events", "forwards", "seconds", "bytes") else "left")
    for recording in found.recordings:
        for one in recording.files:
            segment = "" if one.header.segment is None else str(one.header.segment.number)
            table.add_row(
                Text(printable(Path(one.path).name)),
                _rank(one),
                segment,
                f"{one.num_events:,}",
                f"{one.forwards:,}",
                _seconds(one),
                f"{one.size_bytes:,}",
                _lost(one),
                one.state,
            )
    console.print(table)
    lines = [_missing_line(r) for r in found.recordings if r.missing]
    for recording in found.recordings:
        lines += [_loss(one, loss) for one in recording.files for loss in one.losses]
        lines += [f"gap     {gap['reason']}" for one in recording.files for gap in one.gaps]
    lines += [f"error   {message}" for message in found.unreadable.values()]
    lines += [f"note    {note}" for note in found.notes]
    _print_lines(console, lines)
    torn = any(one.num_gaps for recording in found.recordings for one in recording.files)
    command = ["kvcanary", "recover"] if torn else ["kvcanary-replay"]
    console.print(Text(printable(f"next    {shlex.join([*command, str(found.folder)])}")), soft_wrap=True)


def _missing_line(recording: RecordingInspection) -> str:
    more = " and more" if len(recording.missing) == MAX_MISSING_SEGMENTS else ""
    return f"missing {recording.name}: segments {', '.join(map(str, recording.missing))}{more}"


def _print_lines(console: "Console", lines: Sequence[str]) -> None:
    from rich.text import Text

    console.print()
    for line in lines[:_BAD_SHOWN]:
        console.print(Text(printable(line)), soft_wrap=True)
    if len(lines) > _BAD_SHOWN:
        console.print(Text(f"        and {len(lines) - _BAD_SHOWN:,} more lines of that kind, see --json"))
    if not lines:
        console.print(Text("whole   nothing lost"))


def _rank(one: TraceInspection) -> str:
    ranks = one.header.ranks
    pairs = (
        ("tp", ranks.tp_rank, ranks.tp_size),
        ("pp", ranks.pp_rank, ranks.pp_size),
        ("dp", ranks.dp_rank, ranks.dp_size),
    )
    named = [f"{name} {rank}/{size}" for name, rank, size in pairs if size > 1]
    return " ".join([*([one.header.role] if one.header.role else []), *named])


def _seconds(one: TraceInspection) -> str:
    if one.first_ns is None or one.last_ns is None:
        return ""
    return f"{(one.last_ns - one.first_ns) / 1e9:,.1f}"


def _loss(one: TraceInspection, loss: dict[str, Any]) -> str:
    count = "an unknown number of" if loss["lost_events"] < 0 else f"{loss['lost_events']:,}"
    return f"loss    {Path(one.path).name}: event {loss['event']}: {count} events lost: {loss['note']}"


def _lost(one: TraceInspection) -> str:
    known = f"{one.lost_events:,} events" if one.lost_events else ""
    unknown = "unknown" if one.unknown_losses else ""
    return " and ".join(filter(None, [known, unknown])) or ("slots" if one.num_losses else "")
