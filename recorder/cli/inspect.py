"""`kvcanary inspect`: what a trace holds, and whether it is whole."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ..errors import TraceError, printable
from .program import GivenPath, console_for, fail

if TYPE_CHECKING:
    from rich.console import Console

    from ..trace.header import PoolGroup, TraceHeader
    from ..trace.inspect import TraceInspection

_NS: Final = 1_000_000_000
_MAX_SHOWN: Final = 10
_BIGGEST_COLUMNS: Final = 12


_EPILOG = """\b
Examples:
  kvcanary inspect trace.arrow
  kvcanary inspect --json trace.arrow | jq .events_by_kind
  kvcanary inspect /traces/
      a line for each trace and segment of a server, and what is missing between them
"""


@click.command("inspect", epilog=_EPILOG)
@click.argument("trace", type=GivenPath(url=True))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def inspect_command(trace: Path, as_json: bool) -> None:
    """Show what TRACE holds: header, events, requests, time span, sizes, losses. Of a folder, a line for each file.

    Exit code 0 for a whole trace, 125 for one that is torn, damaged, lossy or being recorded, 2 for a file that is no trace.
    """
    from ..trace.inspect import inspect_trace
    from .folder_inspection import FolderInspection, inspect_folder, show_folder

    try:
        found = inspect_folder(trace) if trace.is_dir() else inspect_trace(trace)
    except TraceError as error:
        fail(str(error))
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    elif isinstance(found, FolderInspection):
        show_folder(console_for(sys.stdout), found)
    else:
        _show(console_for(sys.stdout), found)
    if isinstance(found, FolderInspection):
        sys.exit(found.exit_code)
    sys.exit(0 if found.state == "complete" else 125)


def _show(console: "Console", found: "TraceInspection") -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in [*_header_rows(found.header), *_event_rows(found)]:
        table.add_row(name, _text(value))
    console.print(table)
    sizes = Table(box=None, padding=(0, 2, 0, 0))
    sizes.add_column("column")
    sizes.add_column("in the file", justify="right")
    sizes.add_column("uncompressed", justify="right")
    biggest = [name for name, _ in found.stored_bytes.most_common(_BIGGEST_COLUMNS)]
    rest = [name for name in found.stored_bytes if name not in biggest]
    rows = [(_text(name), [name]) for name in biggest]
    rows += [(f"{len(rest)} others", rest)] if rest else []
    rows += [("all columns", list(found.stored_bytes))] if biggest else []
    for title, names in rows:
        sums = (sum(counter[name] for name in names) for counter in (found.stored_bytes, found.uncompressed_bytes))
        sizes.add_row(title, *map(_bytes, sums))
    if biggest:
        console.print()
        console.print(sizes)
    console.print()
    for line in _loss_lines(found):
        console.print(_text(line), soft_wrap=not console.is_terminal)
    console.print(_text(f"next    {found.next_command}"), soft_wrap=True)


def _header_rows(header: "TraceHeader") -> list[tuple[str, str]]:
    engine, ranks, capture, segment = header.engine, header.ranks, header.capture, header.segment
    ranks_text = (
        f"tp {ranks.tp_rank}/{ranks.tp_size}   pp {ranks.pp_rank}/{ranks.pp_size}   dp {ranks.dp_rank}/{ranks.dp_size}"
    )
    rows = [
        ("engine", " ".join(filter(None, [engine.name, engine.version, engine.commit and f"({engine.commit})"]))),
        ("model", f"{header.model.name} {header.model.dtype}".strip()),
        ("format", f"{header.format_major}.{header.format_minor}, recorder {header.recorder_version or 'unknown'}"),
    ]
    if segment is not None:
        rows.append(("segment", f"{segment.number}, from event {segment.first_event:,} of its recording"))
    rows += [
        ("created", f"{_when(header.created_ns)}   trace {header.trace_id or 'without an id'}"),
        ("runners", ", ".join(f"{r.name} (token offset {r.token_offset})" for r in header.runners)),
        ("ranks", ranks_text),
    ]
    rows += [(f"pool {number}", _pool(group)) for number, group in enumerate(header.groups)]
    rows += [
        (
            f"states {i}",
            f"{p.name}, {p.num_slots:,} slots, the {'last' if p.from_end else 'first'} {p.hashed_bytes:,} bytes of a part of layer {p.layer} hashed",
        )
        for i, p in enumerate(header.states)
    ]
    rows += [(f"table {i}", f"{t.name} [{t.rows:,}, {t.width:,}] int32") for i, t in enumerate(header.tables)]
    rows += [(f"lut {i}", f"full to SWA [{length:,}]") for i, length in enumerate(header.lut_lens)]
    every = capture.kv_watch_every
    watch = f"prefix re-read every {every} forwards" if every else "prefix not re-read"
    tokens = "" if header.tokens == "plain" else f"tokens {header.tokens}, "
    truth = "yes" if capture.truth_tokens else "no"
    rows.append(("capture", f"{watch}, truth tokens {truth}, {tokens}{capture.compression}"))
    if header.oracle is not None:
        rows.append(("oracle", f"{header.oracle.kind}, vocabulary {header.oracle.vocab_size:,}"))
    rows += [
        ("not watched", f"{e.what}: {e.name}" + (f" ({e.reason})" if e.reason else "")) for e in header.not_watched
    ]
    rows += [("note", note) for note in header.notes[:_MAX_SHOWN]]
    return rows


def _pool(group: "PoolGroup") -> str:
    streams = ", ".join(
        f"{s.half} of layer {', '.join(map(str, s.layers or (s.layer,)))}: {s.capture_bytes} of {s.bytes_per_token} bytes ({s.origin})"
        for s in group.streams
    )
    window = f", window {group.window:,}" if group.window else ""
    return (
        f"{group.name}: {group.kind}{window}, {group.num_slots:,} slots, page {group.page_size}, "
        f"{'+'.join(group.halves)}, runner {group.runner}, table {group.table}; {streams or 'no KV bytes'}"
    )


def _event_rows(found: "TraceInspection") -> list[tuple[str, str]]:
    span = "no event"
    if found.first_ns is not None and found.last_ns is not None:
        span = f"{(found.last_ns - found.first_ns) / _NS:,.3f} s from {_when(found.first_ns)}"
    return [
        ("file", f"{found.path}   {_bytes(found.size_bytes)}   {found.num_batches:,} batches   {found.state}"),
        ("events", f"{found.num_events:,}{_counts(found.events_by_kind)}"),
        ("forwards", f"{found.forwards:,}{_counts(found.forwards_by_mode)}"),
        ("requests", f"{found.requests:,}"),
        ("tokens", f"{found.input_tokens:,} in, {found.sampled_tokens:,} sampled"),
        ("time", span),
    ]


def _loss_lines(found: "TraceInspection") -> list[str]:
    lines: list[str] = []
    for what, count, texts in (
        ("mark", found.num_marks, [f"event {mark['event']}: {mark['note'] or mark['labels']}" for mark in found.marks]),
        ("loss", found.num_losses, found.loss_lines),
        ("gap", found.num_gaps, [gap["reason"] for gap in found.gaps]),
    ):
        lines += [f"{what:<8}{text}" for text in texts[:_MAX_SHOWN]]
        if count > _MAX_SHOWN:
            lines.append(f"        and {count - _MAX_SHOWN:,} more {'losses' if what == 'loss' else what + 's'}")
    if found.being_recorded:
        lines.append(f"live    {found.live_line}")
    elif not found.num_losses and not found.num_gaps:
        lines.append("whole   nothing lost")
    return lines


def _text(value: str) -> str:
    from rich.markup import escape

    return escape(printable(value))


def _counts(counter: dict[str, int]) -> str:
    parts = [f"{name or 'unnamed'} {count:,}" for name, count in sorted(counter.items(), key=lambda item: -item[1])]
    return f": {', '.join(parts)}" if parts else ""


def _bytes(count: int) -> str:
    if count < 10_000:
        return f"{count:,} B"
    return f"{count / 1e3:,.1f} kB" if count < 10_000_000 else f"{count / 1e6:,.1f} MB"


def _when(time_ns: int) -> str:
    try:
        return datetime.fromtimestamp(time_ns / _NS, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns"
