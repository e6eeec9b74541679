"""`kvcanary recover`: write what is whole in a torn or damaged trace to a new file."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import TraceError, printable
from ..remote import beside
from .program import CommandError, GivenPath

if TYPE_CHECKING:
    from ..writing.recovery import RecoveryResult

_EPILOG = """\b
Examples:
  kvcanary recover torn.arrow
  kvcanary recover torn.arrow -o saved.arrow --force
  kvcanary recover /traces/
      every file there that is not whole; kvcanary-replay /traces/ then takes what was recovered
  kvcanary recover torn.arrow --json | jq .lost_events
"""


@click.command("recover", epilog=_EPILOG)
@click.argument("torn", type=GivenPath(url=True))
@click.option("-o", "--output", type=GivenPath(), help="Default: TORN's name with .recovered.arrow.")
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print what was kept and lost as JSON.")
def recover_command(torn: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Write every whole batch of TORN to a new trace, which opens anywhere, and say what was lost.

    Of a folder, every file that is torn or damaged is recovered to one beside it.
    """
    from ..trace.recordings import RECOVERED
    from ..writing.recovery import recover

    if torn.is_dir():
        if output is not None:
            raise click.UsageError("-o names one file; what is recovered of a folder goes beside each torn file")
        sys.exit(_recover_folder(torn, force=force, as_json=as_json))
    target = output or beside(torn) / f"{torn.stem}{RECOVERED}"
    try:
        result = recover(torn, target, overwrite=force)
    except TraceError as error:
        raise CommandError(str(error), trace=str(torn)) from None
    if as_json:
        click.echo(json.dumps(_as_json(result), indent=2))
        return
    click.echo(f"kept    {result.kept_events:,} events in {result.kept_batches:,} batches")
    if result.lost_events is None:
        known = f"{result.known_lost_events:,} events that are known of, and " if result.known_lost_events else ""
        click.echo(f"lost    {known}an unknown number behind them" if known else "lost    an unknown number of events")
    elif result.lost_events:
        click.echo(f"lost    {result.lost_events:,} events")
    else:
        click.echo("lost    nothing")
    for cause in result.causes:
        click.echo(f"        {printable(cause)}")
    if result.num_gaps > len(result.causes):
        click.echo(f"        and {result.num_gaps - len(result.causes):,} more gaps")
    click.echo(f"wrote   {printable(str(target))}")
    click.echo(f"next    {printable(shlex.join(['kvcanary-replay', str(target)]))}")


def _recover_folder(folder: Path, *, force: bool, as_json: bool) -> int:
    """Recover what is not whole in a folder, a line a file; return the exit code."""
    from ..trace.batch import TraceBatch
    from ..trace.files import is_being_written
    from ..trace.reader import TraceReader
    from ..trace.recordings import RECOVERED, traces_in
    from ..writing.recovery import recover

    whole = live = 0
    recovered: list[dict[str, Any]] = []
    unreadable: dict[str, str] = {}

    def fail(path: Path, error: TraceError) -> None:
        unreadable[str(path)] = str(error)
        click.echo(f"Error: {printable(str(error))}", err=True)

    paths: list[Path] = []
    try:
        paths = [path for path in traces_in(folder) if not path.name.endswith(RECOVERED)]
    except TraceError as error:
        fail(folder, error)
    for path in paths:
        target = beside(path) / f"{path.stem}{RECOVERED}"
        if is_being_written(path):
            live += 1
            continue
        renewed = target.exists()
        if renewed and not force:
            older = f"{target}: is older than {path.name}, which was written since; pass --force to renew it"
            fail(path, TraceError(older))
            continue
        try:
            with TraceReader(path) as reader:
                complete = reader.complete and not renewed
                if complete and all(isinstance(item, TraceBatch) for item in reader.stream()):
                    whole += 1
                    continue
            result = recover(path, target, overwrite=force)
        except TraceError as error:
            fail(path, error)
            continue
        recovered.append(_as_json(result))
        if not as_json:
            lost = "an unknown number lost" if result.lost_events is None else f"{result.lost_events:,} lost"
            click.echo(f"wrote   {printable(str(target))}   {result.kept_events:,} events kept, {lost}")
    if as_json:
        report = {"folder": str(folder), "files": len(paths), "whole": whole, "being_recorded": live}
        click.echo(json.dumps({**report, "recovered": recovered, "unreadable": unreadable}, indent=2))
    elif str(folder) not in unreadable:
        click.echo(f"whole   {whole:,} of {len(paths):,} files" + (f"   {live:,} being recorded" if live else ""))
        click.echo(f"next    {printable(shlex.join(['kvcanary-replay', str(folder)]))}")
    return 2 if unreadable else 0


def _as_json(result: RecoveryResult) -> dict[str, Any]:
    """Return what was kept and lost; `lost_events` is null if nobody can know."""
    names = ("kept_events", "kept_batches", "lost_events", "known_lost_events", "num_gaps", "causes")
    named = {"trace": str(result.source), "recovered": str(result.target)}
    return named | {name: getattr(result, name) for name in names}
