"""`kvcanary fleet page`: a table of reports as one HTML file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...recorder.cli.program import GivenPath
from . import errors_end, say

_EPILOG = """\b
Examples:
  kvcanary collect /reports s3://bucket/table
  kvcanary fleet page s3://bucket/table
      writes fleet.html here
  kvcanary fleet page /fleet/table -o /var/www/fleet.html
      where reports lie on this machine, with their pages, each recording links to its own

\b
Exit codes: 0 written, 2 wrong usage, no table, or the plot library is missing. docs/guide/fleet.md describes it.
"""


@click.command("page", epilog=_EPILOG)
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
