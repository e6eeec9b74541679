"""The commands of the analysis, and what they share."""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ...recorder.cli.program import CommandError, GivenPath, terminal_width
from ...recorder.errors import printable, printable_message
from ...recorder.text_tables import folded
from ..errors import AnalysisError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..store.sources import Source

report_argument = click.argument("report", metavar="REPORT", type=GivenPath(url=True))
reports_argument = click.argument("path", metavar="REPORT|TRACE|FOLDER", type=GivenPath(url=True))
trace_option = click.option(
    "--trace", type=GivenPath(url=True), help="Where the report's trace is now, if it has moved."
)


def command_line(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Return an option's value, if a shell would read it as a command."""
    if value is None:
        return None
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: {str(error).lower()}; expected a command, as for a shell") from None
    if not words:
        raise click.BadParameter("is empty; expected a command, as for a shell")
    return value


def say(text: str, *, err: bool = False) -> None:
    """Print a line that cannot steer a terminal, folded at its width."""
    for part in folded(printable(text), None if err else terminal_width()):
        click.echo(part, err=err)


def say_error(error: Exception | str, *, kind: str = "Error: ") -> None:
    """Print an error, or a note, to standard error."""
    click.echo(printable_message(f"{kind}{error}"), err=True)


@contextmanager
def errors_end(*others: type[Exception]) -> Iterator[None]:
    """End the command with exit code 2 if there is an `AnalysisError`, or one of `others`, and say which."""
    ending: tuple[type[Exception], ...] = (AnalysisError, *others)
    try:
        yield
    except ending as error:
        raise CommandError(str(error)) from None


def sources_named(path: Path, trace: Path | None) -> list[Source]:
    """Return the reports that a path stands for, and say which traces of a folder have none; raise `AnalysisError`."""
    from ..store.sources import find_sources, reports_named

    found = find_sources(reports_named(path), trace=trace)
    known = {file for source in found for file in source.files}
    left = sorted(file.name for file in path.glob("[!.]*.arrow") if file not in known) if len(found) > 1 else []
    if left:
        say_error(f"{path}: not replayed yet: {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}", kind="note: ")
    return found
