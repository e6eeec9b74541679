"""`kvcanary incidents`: a report's incidents, found anew and explained."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...recorder.cli.program import console_for
from ...recorder.errors import printable
from ..errors import AnalysisError
from . import errors_end, report_argument, say_error, trace_option

if TYPE_CHECKING:
    from rich.console import Console

_EPILOG = """\b
Examples:
  kvcanary incidents trace.report
      every incident: what it is, how sure that is, where it was seen
  kvcanary incidents trace.report --explain 1
      one incident with its mechanism, its look-alikes, and the queries that prove it
  kvcanary incidents trace.report --json | jq '.incidents[] | {kind, confidence, sentence}'
  kvcanary incidents /traces/
      of every report of a folder
  kvcanary incidents trace.report --trace /mnt/traces/trace.arrow
      where the trace is no longer where it was replayed

\b
Exit codes: 0 shown (also where there is none), 2 wrong usage or an unreadable report. docs/reference/incidents.md describes the
kinds.
"""


@click.command("incidents", epilog=_EPILOG)
@report_argument
@trace_option
@click.option("--explain", type=click.IntRange(min=1), metavar="N", help="Explain incident N with its evidence.")
@click.option("--json", "as_json", is_flag=True, help="Print incidents as JSON.")
def incidents_command(report: Path, trace: Path | None, explain: int | None, as_json: bool) -> None:
    """Put violations and findings that share a cause together, and say what kind of mistake each looks like.

    REPORT is the folder that kvcanary-replay wrote, the trace that it is of, or a folder with several. The incidents are
    found anew and written into it, as incidents.parquet and incident_members.parquet. Without the trace those that were found with it stay; where there
    are none, the kinds are less certain.
    """
    from ..store.sources import reports_named

    with errors_end():
        reports = reports_named(report)
        answers = [_answer(one, trace, explain) for one in reports]
    if as_json:
        shown = [answer for answer, _ in answers]
        click.echo(json.dumps(shown if len(shown) > 1 else shown[0], indent=2, default=str))
        return
    for number, (one, (answer, begin)) in enumerate(zip(reports, answers, strict=True)):
        if number:
            click.echo()
        rows, total = answer["incidents"], answer["num_incidents"]
        _show(console_for(sys.stdout), one, rows, total, begin, explained=explain is not None)


def _answer(report: Path, trace: Path | None, explain: int | None) -> tuple[dict[str, Any], int]:
    """Return a report's incidents as JSON has them, and when its trace began."""
    from ..store.report_incidents import incidents_of

    found = incidents_of(report, trace)
    if explain is not None and explain > len(found.rows):
        has = f"the report has {len(found.rows)} incident(s)"
        raise AnalysisError(f"--explain {explain}: {has}; without --explain they are listed")
    for note in found.notes:
        say_error(note, kind="note: ")
    begin = found.summary.get("first_time_ns")
    rows = found.rows if explain is None else [found.rows[explain - 1]]
    answer = {"report": str(report), "num_incidents": len(found.rows), "incidents": rows}
    return answer, begin if isinstance(begin, int) else 0


def _show(
    console: Console, report: Path, rows: list[dict[str, Any]], total: int, begin: int, *, explained: bool
) -> None:
    from rich.text import Text

    from ...replayer.cli.incident_blocks import show_incident

    noun = "incident" if total == 1 else "incidents"
    console.print(Text(printable(f"report  {report}   {total:,} {noun}")), soft_wrap=not console.is_terminal)
    for row in rows:
        console.print()
        show_incident(console, row, begin)
        if explained:
            _explain(console, row)
    if rows and not explained:
        console.print()
        command = shlex.join(["kvcanary", "incidents", str(report), "--explain", str(rows[0]["incident"])])
        console.print(Text(printable(f"next    {command}"), style="dim"), soft_wrap=True)


def _explain(console: Console, row: dict[str, Any]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from ..incidents.rules import RULES

    def show(text: str, *, style: str = "") -> None:
        console.print(Padding(Text(text, style=style), (0, 0, 0, 4), expand=False))

    parts = [("mechanism", row["detail"] or "no rule knows this kind")]
    parts += [(f"or {kind}", RULES[kind].mechanism) for kind in row["alternatives"] if kind != row["kind"]]
    parts += [
        (
            f"a public bug that looks like it, {one['likeness']:.2f}",
            f"https://github.com/{one['tracker'].replace('#', '/issues/')}  {one['kind']}",
        )
        for one in row.get("alike") or ()
        if one["tracker"]
    ]
    for title, text in parts:
        console.print()
        show(f"{title}: {printable(text)}")
    console.print()
    show("evidence, for kvcanary sql:", style="dim")
    for query in row["evidence"]:  # to be pasted, so whole
        console.print(Text(f"      {printable(query)}"), soft_wrap=True)
