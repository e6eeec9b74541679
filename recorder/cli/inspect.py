"""`kvcanary inspect`: what a trace holds, and whether it is whole."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import printable
from .program import GivenPath

if TYPE_CHECKING:
    from rich.console import Console

    from ..trace.header import PoolGroup, Segment, TraceHeader
    from ..trace.inspect import TraceInspection

_NS = 1_000_000_000
_MAX_SHOWN = 10
_BIGGEST_COLUMNS = 12


_EPILOG = """\b
Examples:
  kvcanary inspect trace.arrow
  kvcanary inspect --json trace.arrow | jq .events_by_kind
  kvcanary inspect /traces/
      a line for each trace and segment of a server, and what is missing between them
"""


@click.command("inspect", epilog=_EPILOG)
@click.argument("trace", type=GivenPath())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def inspect_command(trace: Path, as_json: bool) -> None:
    """Show what TRACE holds: header, events, requests, time span, sizes, losses. Of a folder, a line for each file.

    Exit code 0 for a whole trace, 125 for one that is torn, damaged, lossy or being recorded, 2 for a file that is no trace.
    """
    from ..errors import TraceError
    from ..trace.inspect import inspect_trace
    from .folder_inspection import inspect_folder, show_folder

    try:
        if trace.is_dir():
            all_found = inspect_folder(trace)
            if as_json:
                click.echo(json.dumps(all_found.to_json(), indent=2))
            else:
                show_folder(_console(), all_found)
            sys.exit(all_found.exit_code)
        found = inspect_trace(trace)
    except TraceError as error:
        click.echo(f"Error: {printable(str(error))}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        _show(_console(), found)
    sys.exit(0 if found.state == "complete" else 125)


def _console() -> "Console":
    from rich.console import Console

    # A pipe has no width of its own; lines must not be cut at 80 there.
    return Console(emoji=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def _show(console: "Console", found: "TraceInspection") -> None:
    from rich.table import Table

    header = found.header
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in [*_header_rows(header), *_event_rows(found)]:
        table.add_row(name, _text(value))
    console.print(table)
    sizes = Table(box=None, padding=(0, 2, 0, 0))
    sizes.add_column("column")
    sizes.add_column("in the file", justify="right")
    sizes.add_column("uncompressed", justify="right")
    biggest = found.stored_bytes.most_common(_BIGGEST_COLUMNS)
    for name, stored in biggest:
        sizes.add_row(_text(name), _bytes(stored), _bytes(found.uncompressed_bytes[name]))
    rest = [name for name in found.stored_bytes if name not in dict(biggest)]
    if rest:
        stored, plain = (sum(c[name] for name in rest) for c in (found.stored_bytes, found.uncompressed_bytes))
        sizes.add_row(f"{len(rest)} others", _bytes(stored), _bytes(plain))
    if found.stored_bytes:
        total = [sum(counter.values()) for counter in (found.stored_bytes, found.uncompressed_bytes)]
        sizes.add_row("all columns", _bytes(total[0]), _bytes(total[1]))
        console.print()
        console.print(sizes)
    console.print()
    for line in _loss_lines(found):
        console.print(_text(line), soft_wrap=True)
    console.print(_text(f"next    {found.next_command}"), soft_wrap=True)


def _header_rows(header: "TraceHeader") -> list[tuple[str, str]]:
    engine, ranks, capture = header.engine, header.ranks, header.capture
    rows = [
        ("engine", " ".join(filter(None, [engine.name, engine.version, engine.commit and f"({engine.commit})"]))),
        ("model", f"{header.model.name} {header.model.dtype}".strip()),
        ("format", f"{header.format_major}.{header.format_minor}, recorder {header.recorder_version or 'unknown'}"),
        *([("segment", _segment(header.segment))] if header.segment is not None else []),
        ("created", f"{_when(header.created_ns)}   trace {header.trace_id or 'without an id'}"),
        ("runners", ", ".join(f"{r.name} (token offset {r.token_offset})" for r in header.runners)),
        (
            "ranks",
            f"tp {ranks.tp_rank}/{ranks.tp_size}   pp {ranks.pp_rank}/{ranks.pp_size}   dp {ranks.dp_rank}/{ranks.dp_size}",
        ),
    ]
    rows += [(f"pool {number}", _pool(group)) for number, group in enumerate(header.groups)]
    rows += [(f"table {i}", f"{t.name} [{t.rows:,}, {t.width:,}] int32") for i, t in enumerate(header.tables)]
    rows += [(f"lut {i}", f"full to SWA [{length:,}]") for i, length in enumerate(header.lut_lens)]
    watch = (
        f"prefix re-read every {capture.kv_watch_every} forwards" if capture.kv_watch_every else "prefix not re-read"
    )
    rows.append(
        (
            "capture",
            f"{watch}, truth tokens {'yes' if capture.truth_tokens else 'no'}, {_tokens(header)}{capture.compression}",
        )
    )
    if header.oracle is not None:
        rows.append(("oracle", f"{header.oracle.kind}, vocabulary {header.oracle.vocab_size:,}"))
    rows += [
        ("not watched", f"{e.what}: {e.name}" + (f" ({e.reason})" if e.reason else "")) for e in header.not_watched
    ]
    rows += [("note", note) for note in header.notes[:_MAX_SHOWN]]
    return rows


def _tokens(header: "TraceHeader") -> str:
    return "" if header.tokens == "plain" else f"tokens {header.tokens}, "


def _segment(segment: "Segment") -> str:
    return f"{segment.number}, from event {segment.first_event:,} of its recording"


def _pool(group: "PoolGroup") -> str:
    streams = ", ".join(
        f"{s.half} of layer {s.layer}: {s.capture_bytes} of {s.bytes_per_token} bytes ({s.origin})"
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
    lines = [f"mark    event {mark['event']}: {mark['note'] or mark['labels']}" for mark in found.marks[:_MAX_SHOWN]]
    if found.num_marks > _MAX_SHOWN:
        lines.append(f"        and {found.num_marks - _MAX_SHOWN:,} more marks")
    for loss in found.losses[:_MAX_SHOWN]:
        count = "an unknown number of" if loss["lost_events"] < 0 else f"{loss['lost_events']:,}"
        lines.append(f"loss    event {loss['event']}: {count} events lost: {loss['note']}")
    if found.num_losses > _MAX_SHOWN:
        lines.append(f"        and {found.num_losses - _MAX_SHOWN:,} more losses")
    lines += [f"gap     {gap['reason']}" for gap in found.gaps[:_MAX_SHOWN]]
    if found.num_gaps > _MAX_SHOWN:
        lines.append(f"        and {found.num_gaps - _MAX_SHOWN:,} more gaps")
    if found.being_recorded:
        lines.append(f"live    being recorded; events in the file so far: {found.num_events:,}")
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
