"""`kvcanary recover`: write what is whole in a torn or damaged trace to a new file."""

import sys
from pathlib import Path

import click

_EPILOG = """\b
Examples:
  kvcanary recover torn.arrow
  kvcanary recover torn.arrow -o saved.arrow --force
"""


@click.command("recover", epilog=_EPILOG)
@click.argument("torn", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: TORN's name with .recovered.arrow.")
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
def recover_command(torn: Path, output: Path | None, force: bool) -> None:
    """Write every whole batch of TORN to a new trace, which opens anywhere, and say what was lost."""
    from ..errors import TraceError
    from ..recovery import recover
    from .text import printable

    target = output or torn.with_name(f"{torn.stem}.recovered.arrow")
    try:
        result = recover(torn, target, overwrite=force)
    except TraceError as error:
        click.echo(f"Error: {printable(str(error))}", err=True)
        sys.exit(2)
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
    click.echo(f"next    kvcanary-replay {printable(str(target))}")
