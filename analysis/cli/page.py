"""`kvcanary page` and `kvcanary fleet page`: a report, or a table of reports, as one HTML file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...recorder.cli.program import GivenPath
from ..errors import AnalysisError
from . import errors_end, reports_argument, say, sources_named, trace_option

_EPILOG = """\b
Examples:
  kvcanary page trace.report
      writes trace.report/report.html
  kvcanary page trace.report --open
      and shows it in the browser
  kvcanary page /traces
      of all reports in a folder
  kvcanary page trace.report -o /tmp/for-a-colleague.html
  kvcanary page trace.report --trace /mnt/traces/trace.arrow
      where the trace is no longer where it was replayed

\b
Exit codes: 0 written, 2 wrong usage, an unreadable report, or the plot library is missing. docs/guide/page.md describes it.
"""


@click.command("page", epilog=_EPILOG)
@reports_argument
@click.option("-o", "--output", type=GivenPath(dir_okay=False), help="Where to. [default: report.html in the report]")
@click.option("--open", "show", is_flag=True, help="Open it in the browser.")
@trace_option
@click.option("--json", "as_json", is_flag=True, help="Print path and size as JSON.")
def page_command(path: Path, output: Path | None, show: bool, trace: Path | None, as_json: bool) -> None:
    """Make a page of a report: one file that works offline and asks no network for anything.

    Verdict and incidents, a timeline, a map of the damaged slots, the lives of requests, chains, and behind every
    number the SQL that made it. Below 5 MB however large the trace. It may hold tokens: only you can read the file.
    Of a FOLDER every report gets its page.
    """
    from ..page.build import build_page

    with errors_end():
        sources = sources_named(path, trace)
        if output is not None and len(sources) > 1:
            raise AnalysisError(f"-o names one file, and {path} holds {len(sources)} reports; name one of them")
        made = []
        for source in sources:
            page = build_page(source, output)
            size = page.stat().st_size
            made.append({"page": str(page), "bytes": size})
            if not as_json:
                say(f"wrote   {page}   {size / 1e6:.1f} MB")
            if show:
                click.launch(page.absolute().as_uri())
    if as_json:
        click.echo(json.dumps(made if len(made) > 1 else made[0]))


_FLEET_EPILOG = """\b
Examples:
  kvcanary collect /reports s3://bucket/table
  kvcanary fleet page s3://bucket/table
      writes fleet.html here
  kvcanary fleet page /fleet/table -o /var/www/fleet.html
      where reports lie on this machine, with their pages, each recording links to its own

\b
Exit codes: 0 written, 2 wrong usage, no table, or the plot library is missing. docs/guide/fleet.md describes it.
"""


@click.command("page", epilog=_FLEET_EPILOG)
@click.argument("table", metavar="TABLE", type=GivenPath(url=True))
@click.option(
    "-o", "--output", type=GivenPath(dir_okay=False), default="fleet.html", show_default=True, help="Where to."
)
@click.option("--open", "show", is_flag=True, help="Open it in the browser.")
@click.option("--json", "as_json", is_flag=True, help="Print path, size and what was left out as JSON.")
def fleet_page_command(table: Path, output: Path, show: bool, as_json: bool) -> None:
    """Make a page of a TABLE of reports, a folder or a URL: one file that works offline and asks no network for anything.

    Incidents per day and kind, a map of nodes and versions in which a bad GPU stands out, what share was recorded and judged, kinds
    that are new since yesterday, and the recordings that are not clean, with a way to each one's own page.
    """
    from ..page.fleet import build_fleet_page

    with errors_end(OSError):
        page, problems = build_fleet_page(table, output)
    size = page.stat().st_size
    for problem in problems:
        say(f"note: {problem}", err=True)
    if as_json:
        click.echo(json.dumps({"page": str(page), "bytes": size, "left_out": list(problems)}))
    else:
        say(f"wrote   {page}   {size / 1e6:.1f} MB")
    if show:
        click.launch(page.absolute().as_uri())
