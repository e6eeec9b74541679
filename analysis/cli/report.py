"""`kvcanary report`: an incident as text for an issue tracker."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from ...recorder.cli.program import GivenPath
from ...recorder.errors import TraceError
from ..errors import AnalysisError
from . import errors_end, report_argument, say, say_error, trace_option

_EPILOG = """\b
Examples:
  kvcanary report --issue trace.report
      the first incident, in Markdown: to be read through, and pasted into an issue
  kvcanary shrink trace.arrow && kvcanary report --issue trace.report -o issue.md
      with the shrunk trace, which is to be attached
  kvcanary report --issue trace.report --incident 2 --shrunk second.arrow
  kvcanary report --issue trace.report --json | jq -r .text

\b
Exit codes: 0 written, 2 wrong usage, an unreadable report, or no such incident.
"""


@click.command("report", epilog=_EPILOG)
@report_argument
@click.option(
    "--issue", is_flag=True, required=True, help="Markdown for an issue tracker, the only kind that there is."
)
@click.option("--incident", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Which one.")
@click.option(
    "--shrunk",
    type=GivenPath(dir_okay=False, exists=True),
    help="What kvcanary shrink wrote. [default: TRACE.shrunk.arrow beside the trace, if it is there]",
)
@trace_option
@click.option("-o", "--output", type=GivenPath(dir_okay=False), help="Where to. [default: standard output]")
@click.option("--json", "as_json", is_flag=True, help="Print the text and what it is of as JSON.")
def report_command(
    report: Path,
    issue: bool,
    incident: int,
    shrunk: Path | None,
    trace: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write what an issue needs of an incident: versions, settings, what went wrong, the rows that show it, the shrunk trace.

    Requests have other names in it, tokens are T1, T2, and paths are left out. REPORT is the folder that kvcanary-replay
    wrote, or the trace that it is of.
    """
    del issue  # the only kind
    from ..store.output import private_output, spare

    with errors_end(TraceError):
        named, text, kept = _issue(report, incident, shrunk, trace)
        if output is not None:
            spare(kept, output)
    if output is not None:
        try:
            with private_output(output) as file:
                file.write(text.encode())
        except OSError as error:
            raise click.ClickException(f"{output}: cannot be written: {error.strerror or error}") from None
    if as_json:
        click.echo(json.dumps({**named, "output": str(output) if output else None, "text": text}, indent=2))
    elif output is not None:
        say(f"wrote   {output}   read it through before you post it")
    else:
        click.echo(text, nl=False)


def _issue(
    report: Path, number: int, shrunk: Path | None, moved: Path | None
) -> tuple[dict[str, Any], str, list[Path]]:
    """Return what an incident is called and where it is from, its text, and the files that it is made of."""
    from ... import __version__
    from ...recorder.trace.files import shrunk_path
    from ...recorder.trace.reader import TraceReader
    from ..issue import issue_text
    from ..store.report_incidents import incidents_of
    from ..store.sources import reports_named

    reports = reports_named(report)
    if len(reports) > 1:
        raise AnalysisError(f"{report}: holds {len(reports)} reports; name one of them")
    folder = reports[0]
    found = incidents_of(folder, moved)
    if number > len(found.rows):
        lists = shlex.join(["kvcanary", "incidents", str(folder)])
        raise AnalysisError(f"--incident {number}: {folder} has {len(found.rows)} incident(s); {lists} lists them")
    for note in found.notes:
        say_error(note, kind="note: ")
    header = None
    if found.source.files:
        with TraceReader(found.source.files[0]) as reader:
            header = reader.header
    small = shrunk
    if small is None and found.source.trace is not None:
        trace = found.source.trace
        beside = [shrunk_path(trace), *([shrunk_path(trace.parent)] if found.source.segments else [])]
        small = next((path for path in beside if path.is_file()), None)
        if small is None and header is not None and header.shrunk is not None:
            small = trace
    part = None
    if small is not None:
        with TraceReader(small) as reader:
            part = small, reader.header
        if part[1].shrunk is None:
            raise AnalysisError(f"{small}: is no shrunk trace; make one with kvcanary shrink")
    row = found.rows[number - 1]
    members = found.members(folder)
    text = issue_text(folder, found.summary, row, header, members=members, version=__version__, shrunk=part)
    named = {"report": str(folder), "incident": number, "kind": row["kind"], "shrunk": str(small) if small else None}
    return named, text, [*found.source.kept, *([small] if small else [])]
