"""`kvcanary recover`: write what is whole in a torn or damaged trace to a new file."""

import sys
from pathlib import Path

import click

_EPILOG = """\b
Examples:
  kvcanary recover torn.arrow
  kvcanary recover torn.arrow -o saved.arrow --force
  kvcanary recover /traces/
      every file there that is not whole; kvcanary-replay /traces/ then takes what was recovered
"""


@click.command("recover", epilog=_EPILOG)
@click.argument("torn", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: TORN's name with .recovered.arrow.")
@click.option("--force", is_flag=True, help="Replace the output file if it exists.")
def recover_command(torn: Path, output: Path | None, force: bool) -> None:
    """Write every whole batch of TORN to a new trace, which opens anywhere, and say what was lost.

    Of a folder, every file that is torn or damaged is recovered to one beside it.
    """
    from ..errors import TraceError
    from ..recordings import RECOVERED
    from ..recovery import recover
    from .text import printable

    if torn.is_dir():
        if output is not None:
            raise click.UsageError("-o names one file; what is recovered of a folder goes beside each torn file")
        sys.exit(_recover_folder(torn, force=force))
    target = output or torn.with_name(f"{torn.stem}{RECOVERED}")
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


def _recover_folder(folder: Path, *, force: bool) -> int:
    """Recover what is not whole in a folder, a line a file; return the exit code."""
    from ..batch import TraceBatch
    from ..errors import TraceError
    from ..reader import TraceReader
    from ..recordings import RECOVERED, traces_in
    from ..recovery import recover
    from .text import printable

    code = whole = 0
    try:
        paths = [path for path in traces_in(folder) if not path.name.endswith(RECOVERED)]
    except TraceError as error:
        click.echo(f"Error: {printable(str(error))}", err=True)
        return 2
    for path in paths:
        target = path.with_name(f"{path.stem}{RECOVERED}")
        try:
            with TraceReader(path) as reader:
                if reader.complete and all(isinstance(item, TraceBatch) for item in reader.stream()):
                    whole += 1
                    continue
            result = recover(path, target, overwrite=force)
        except TraceError as error:
            click.echo(f"Error: {printable(str(error))}", err=True)
            code = 2
            continue
        lost = "an unknown number lost" if result.lost_events is None else f"{result.lost_events:,} lost"
        click.echo(f"wrote   {printable(str(target))}   {result.kept_events:,} events kept, {lost}")
    click.echo(f"whole   {whole:,} of {len(paths):,} files")
    click.echo(f"next    kvcanary-replay {printable(str(folder))}")
    return code
