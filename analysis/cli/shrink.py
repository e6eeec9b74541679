"""`kvcanary shrink`: the smallest trace that still shows an incident."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ...recorder.cli.program import CommandError, GivenPath
from ...recorder.errors import TraceError
from . import errors_end, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...replayer.run.settings import Progress
    from ..shrink.search import Search
    from ..shrink.shrink import ShrinkResult, Size

EXIT_NOTHING: Final = 125
EXIT_INTERRUPTED: Final = 130

_EPILOG = """\b
Examples:
  kvcanary shrink trace.arrow -o small.arrow
      the first incident; then attach small.arrow to the issue
  kvcanary shrink trace.arrow --incident 2 --seconds 1800
      the second of kvcanary incidents, and half an hour for it
  kvcanary shrink /traces/run -o small.arrow
      a folder with the segments of one recording
  kvcanary shrink trace.arrow --json | jq '.after'

\b
Exit codes: 0 written, 125 nothing to shrink (no incident, or none that events alone show again), 2 wrong usage or an
unreadable trace, 130 interrupted: the smallest trace so far is written. docs/guide/shrink.md says what is left out.
"""


@click.command("shrink", epilog=_EPILOG)
@click.argument("trace", metavar="TRACE|FOLDER", type=GivenPath())
@click.option("-o", "--output", type=GivenPath(dir_okay=False), help="Default: TRACE's name with .shrunk.arrow.")
@click.option("--incident", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Which one.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=300,
    show_default=True,
    help="How long to look for a smaller one.",
)
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print sizes, incident and replays as JSON.")
def shrink_command(trace: Path, output: Path | None, incident: int, seconds: float, force: bool, as_json: bool) -> None:
    """Write the smallest part of TRACE that still shows an incident: fit to be attached to a public issue.

    Requests, forwards and other events are left out by trial, and each trial is replayed. What is left is an ordinary trace
    that says of itself what it is. Tokens and KV bytes are salted with a salt that nobody keeps, requests and slots have new
    names, and a last replay proves that it shows the same: the same kind, who wrote what and who read it.
    """
    from ...recorder.trace.files import shrunk_path
    from ...recorder.trace.recordings import one_recording
    from ..shrink.shrink import NothingToShrinkError, shrink

    target = output or shrunk_path(trace)
    if target.exists() and not force:
        raise CommandError(f"{target}: exists; pass --force to replace it, or name another with -o")
    if not target.parent.is_dir():
        raise CommandError(f"{target}: its folder does not exist; create it first")
    with errors_end(TraceError), _progress(as_json) as told:
        paths = one_recording(trace)
        if any(path.exists() and target.exists() and path.samefile(target) for path in paths):
            raise CommandError(f"{target}: is the trace itself; name another file with -o")
        try:
            result = shrink(paths, target, incident=incident, seconds=seconds, on_replay=told[0], on_trial=told[1])
        except NothingToShrinkError as error:
            raise CommandError(str(error), EXIT_NOTHING) from None
        except OSError as error:
            raise CommandError(f"{target}: cannot be written: {error.strerror or error}") from None
    if as_json:
        click.echo(json.dumps(asdict(result), indent=2))
    else:
        _show(result)
    if result.stopped == "interrupted":
        sys.exit(EXIT_INTERRUPTED)


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Callable[[Progress], None], Callable[[str, Search], None]]]:
    from rich.console import Console

    console: Console = Console(stderr=True, emoji=False, highlight=False)
    if quiet or not console.is_terminal:
        yield lambda _: None, lambda *_: None
        return
    with console.status("replaying") as status:

        def replayed(progress: Progress) -> None:
            status.update(f"replaying the whole trace: {progress.forwards:,} forwards")

        def tried(what: str, search: Search) -> None:
            events = len(search.best.events)
            status.update(f"{events:,} events are left; leaving out {what}; {search.judge.replays:,} replays")

        yield replayed, tried


def _show(result: ShrinkResult) -> None:
    row = result.incident
    say(f"incident  {row['title']}   {row['kind']}, confidence {row['confidence']}")
    say(f"          {row['sentence']}")
    say(f"before    {_size(result.before)}   {result.trace}")
    say(f"after     {_size(result.after)}   {result.shrunk}")
    names = "tokens, KV bytes, requests and slots" if result.slots_renamed else "tokens, KV bytes and requests"
    say(f"proven    a replay of it shows the same incident; {names} have other names")
    why = f"; {result.stopped}, so there may be a smaller one" if result.stopped else ""
    say(f"took      {result.replays:,} replays, {result.seconds:.0f} s{why}")
    say(f"next      kvcanary-replay {shlex.quote(result.shrunk)}")


def _size(size: Size) -> str:
    counts = (f"{getattr(size, name):,} {name}" for name in ("events", "forwards", "requests", "tokens"))
    return f"{', '.join(counts)}, {size.bytes / 1000:,.0f} kB"
