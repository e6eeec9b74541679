"""`kvcanary collect`: reports into one table of a fleet."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

import click

from ...recorder.cli.program import GivenPath
from ...replayer.cli.incident_blocks import count_of
from ..errors import AnalysisError
from . import errors_end, say, say_error

if TYPE_CHECKING:
    from pathlib import Path

_EPILOG = """\b
Examples:
  kvcanary collect trace.report s3://bucket/table
  kvcanary collect --node gpu-17 /reports /fleet/table
      all reports of a folder; the node is else the name of the folder that the trace lay in
  kvcanary sql s3://bucket/table "from kinds_by_version"
  kvcanary sql s3://bucket/table "from kinds_by_node where share > 0.5"
  kvcanary sql s3://bucket/table "from new_kinds"

\b
Exit codes: 0 all are in the table, 2 some are not (each is named). docs/guide/fleet.md describes the table.
"""


@click.command("collect", epilog=_EPILOG)
@click.argument("reports", nargs=-1, required=True, metavar="REPORT|FOLDER...", type=GivenPath(url=True))
@click.argument("table", metavar="TABLE", type=GivenPath(url=True))
@click.option("--node", default="", help="Where they were recorded. [default: the name of the trace's folder]")
@click.option("--json", "as_json", is_flag=True, help="Print what was added as JSON.")
def collect_command(reports: tuple[Path, ...], table: Path, node: str, as_json: bool) -> None:
    """Put REPORTs into one TABLE, a folder or a URL, which kvcanary sql asks.

    A report is one Parquet file there, below day=.../engine=.../version=.../model=...; one that is collected again takes the place
    of itself. Any number of processes may collect into a table at a time.
    """
    from ..store.report_rows import add_report
    from ..store.reports_table import reports_below

    added: list[str] = []
    failed: dict[str, str] = {}
    with errors_end():
        found = [one for path in reports for one in reports_below(path)]
    for report in found:
        try:
            added.append(add_report(report, table, node=node))
        except AnalysisError as error:
            failed[str(report)] = str(error)
        except OSError as error:
            failed[str(report)] = f"{report}: not added: {error.filename or table}: {error.strerror or error}"
    if as_json:
        click.echo(json.dumps({"table": str(table), "added": added, "failed": failed}, indent=2))
    else:
        say(f"added   {count_of(len(added), 'report')} to {table}")
        if added:
            say(f"next    {shlex.join(['kvcanary', 'sql', str(table), 'from kinds_by_version'])}")
    for reason in failed.values():
        say_error(reason)
    sys.exit(2 if failed else 0)
