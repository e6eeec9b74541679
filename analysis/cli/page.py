"""`kvcanary page`: the report as one HTML file."""

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
