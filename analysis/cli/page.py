"""`kvcanary page`: the report as one HTML file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...recorder.cli.program import GivenPath
from . import errors_end, report_argument, say, trace_option

_EPILOG = """\b
Examples:
  kvcanary page trace.report
      writes trace.report/report.html
  kvcanary page trace.report --open
      and shows it in the browser
  kvcanary page trace.report -o /tmp/for-a-colleague.html
  kvcanary page trace.report --trace /mnt/traces/trace.arrow
      where the trace is no longer where it was replayed

\b
Exit codes: 0 written, 2 wrong usage, an unreadable report, or the plot library is missing. docs/guide/page.md describes it.
"""


@click.command("page", epilog=_EPILOG)
@report_argument
@click.option("-o", "--output", type=GivenPath(dir_okay=False), help="Where to. [default: report.html in the report]")
@click.option("--open", "show", is_flag=True, help="Open it in the browser.")
@trace_option
@click.option("--json", "as_json", is_flag=True, help="Print path and size as JSON.")
def page_command(report: Path, output: Path | None, show: bool, trace: Path | None, as_json: bool) -> None:
    """Make a page of a report: one file that works offline and asks no network for anything.

    Verdict and incidents, a timeline, a map of the damaged slots, the lives of requests, chains, and behind every
    number the SQL that made it. Below 5 MB however large the trace. It may hold tokens: only you can read the file.
    """
    from ..page.build import build_page
    from ..store.sources import find_sources, read_summary

    with errors_end():
        read_summary(report)
        [source] = find_sources([report], trace=trace)
        path = build_page(source, output)
    size = path.stat().st_size
    if as_json:
        click.echo(json.dumps({"page": str(path), "bytes": size}))
    else:
        say(f"wrote   {path}   {size / 1e6:.1f} MB")
    if show:
        click.launch(path.absolute().as_uri())
