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

from ...recorder.cli.program import CommandError, GivenPath, console_for
from ...recorder.errors import TraceError
from . import command_line, errors_end, say
from .hunt import engine_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...replayer.run.settings import Progress
    from ..hunt.run import Plan
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
  kvcanary shrink hunt/workload.jsonl --run 'vllm serve MODEL --port 8000' -o small.jsonl
      the fewest and shortest requests that still bring it, by running the engine; a workload file is what kvcanary hunt writes
  kvcanary shrink hunt/round-0002/workload.jsonl --script --run 'python engine.py' --repeat 3
      a fault that shows now and then: a workload is given up only if it does not in three runs

\b
Exit codes: 0 written, 125 nothing to shrink (no incident, or none that events alone show again), 2 wrong usage or an
unreadable trace, 130 interrupted: the smallest trace so far is written. docs/guide/shrink.md says what is left out.
"""


@click.command("shrink", epilog=_EPILOG)
@click.argument("trace", metavar="TRACE|FOLDER|WORKLOAD", type=GivenPath())
@click.option("-o", "--output", type=GivenPath(dir_okay=False), help="Default: its name with .shrunk before its end.")
@click.option("--incident", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Which one.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=300,
    show_default=True,
    help="How long to look for a smaller one.",
)
@click.option(
    "--run",
    "run",
    metavar="COMMAND",
    callback=command_line,
    help="Shrink a workload instead, by running this engine again and again.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --run: runs in which a workload has to show it once, a smaller one twice over.",
)
@engine_options
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print sizes, incident and replays as JSON.")
def shrink_command(
    trace: Path,
    output: Path | None,
    incident: int,
    seconds: float,
    run: str | None,
    repeat: int,
    patience: float,
    url: str,
    script: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the smallest part of TRACE that still shows an incident: fit to be attached to a public issue.

    Requests, forwards and other events are left out by trial, and each trial is replayed. What is left is an ordinary trace
    that says of itself what it is. Tokens and KV bytes are salted with a salt that nobody keeps, requests and slots have new
    names, and a last replay proves that it shows the same: the same kind, who wrote what and who read it.
    """
    from ...recorder.trace.files import shrunk_path
    from ...recorder.trace.recordings import one_recording
    from ..hunt.run import Plan
    from ..shrink.shrink import NothingToShrinkError, shrink

    target = output or (shrunk_path(trace) if run is None else trace.with_suffix(".shrunk.jsonl"))
    if target.exists() and not force:
        raise CommandError(f"{target}: exists; pass --force to replace it, or name another with -o")
    if not target.parent.is_dir():
        raise CommandError(f"{target}: its folder does not exist; create it first")
    if run is not None:
        plan = Plan(command=shlex.split(run), script=script, url=url, patience_s=patience)
        _shrink_by_running(trace, target, plan, incident, seconds, repeat, as_json)
        return
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


def _shrink_by_running(
    workload: Path, target: Path, plan: Plan, incident: int, seconds: float, repeat: int, as_json: bool
) -> None:
    from ...kernels.dispatch import prepare
    from ...kernels.replay_pass.state import STATE_LOOPS
    from ..hunt.reducing import Reduction
    from ..hunt.workload import read_workload, shape, write_workload
    from ..shrink.shrink import NothingToShrinkError

    prepare(*STATE_LOOPS, backend="cpu")
    folder, console = target.with_suffix(".runs"), console_for(sys.stderr)
    with errors_end(TraceError), console.status("") as status:

        def told(so_far: Reduction) -> None:
            status.update(f"run {so_far.runs}; the smallest so far: {_asked(shape(so_far.steps))}")

        whole = read_workload(workload)
        reduction = Reduction(plan=plan, steps=whole, folder=folder, repeat=repeat, told=told)
        try:
            reduction.reduce(incident, seconds)
        except NothingToShrinkError as error:
            raise CommandError(str(error), EXIT_NOTHING) from None
        write_workload(target, reduction.steps)
    row, sizes = reduction.wanted, [shape(whole), shape(reduction.steps)]
    trace = reduction.trace or folder
    often = f"{reduction.shown[0]} of {reduction.shown[1]}" if reduction.shown[1] else ""
    if as_json:
        facts = {"incident": row, "before": sizes[0], "after": sizes[1], "runs": reduction.runs, "shown_in": often}
        click.echo(
            json.dumps({"workload": str(target), "trace": str(trace), **facts, "stopped": reduction.stopped}, indent=2)
        )
    else:
        say(f"incident  {row['title']}   {row['kind']}, confidence {row['confidence']}")
        say(f"before    {_asked(sizes[0])}   {workload}")
        say(f"after     {_asked(sizes[1])}   {target}")
        why = f"; {reduction.stopped}, so there may be a smaller one" if reduction.stopped else ""
        say(f"took      {reduction.runs:,} runs of the engine{f', the last shows it in {often}' if often else ''}{why}")
        say(f"trace     {trace}   of the last run that showed it, whose replay has an incident of the same kind")
        say(f"next      kvcanary shrink {shlex.quote(str(trace))} -o small.arrow")
    if reduction.stopped == "interrupted":
        sys.exit(EXIT_INTERRUPTED)


def _asked(size: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in size.items())


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
