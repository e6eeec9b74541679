"""`kvcanary triage`: the questions asked of every damage, answered."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...recorder.errors import printable
from ..errors import AnalysisError
from . import errors_end, report_argument, say_error, trace_option

if TYPE_CHECKING:
    from ..store.sources import Source
    from ..store.triage import Triage

MAX_LINE, MAX_NAME = 500, 120

_EPILOG = """\b
Examples:
  kvcanary triage trace.report
      ten questions, in words and small tables
  kvcanary triage trace.report --sql
      the same with the SQL behind each, for kvcanary sql
  kvcanary triage trace.report --json | jq '.questions[] | {question, answer}'
  kvcanary triage trace.report --trace /mnt/traces/trace.arrow
      where the trace is no longer where it was replayed

\b
Exit codes: 0 answered (also where nothing was found), 2 wrong usage or an unreadable report.
"""


@click.command("triage", epilog=_EPILOG)
@report_argument
@trace_option
@click.option("--sql", "show_sql", is_flag=True, help="Show the SQL behind each answer.")
@click.option("--json", "as_json", is_flag=True, help="Print answers, rows and SQL as JSON.")
def triage_command(report: Path, trace: Path | None, show_sql: bool, as_json: bool) -> None:
    """Answer the questions that are asked of every damage: who held the slot before, which forward wrote it first, is
    it the prefix cache, chunk boundaries, page sizes, the same slots, other requests' tokens, the draft, the prefill
    or decode side, a transfer.

    REPORT is the folder that kvcanary-replay wrote. The first call writes report.duckdb into it, which answers from
    then on and opens with any DuckDB client.
    """
    from ...replayer.report.report import STORE_NAME
    from ..store.session import open_sources
    from ..store.sources import find_sources, read_summary
    from ..store.store import fresh_store, made_store
    from ..store.triage import triage

    with errors_end():
        read_summary(report)
        [source] = find_sources([report], trace=trace)
        if source.trace is None and fresh_store(source) is None:
            raise AnalysisError(
                f"{source.problem}; without {STORE_NAME}, which {source.report} does not have, triage reads the trace: "
                "say with --trace where it is now"
            )
        if why := made_store(source):
            say_error(f"{why}; answering from the files, which is slower", kind="note: ")
        with open_sources([source]) as session:
            found = triage(session)
    if as_json:
        click.echo(json.dumps(_to_json(source, found), indent=2, default=str))
        return
    for line in _lines(source, found, show_sql):
        click.echo(line)


def _to_json(source: Source, found: Triage) -> dict[str, object]:
    facts = asdict(found)
    first, answers, lost = (facts.pop(name) for name in ("first", "answers", "lost"))
    asked = ("name", "question", "words", "first", "overall", "first_sql", "overall_sql")
    questions = [{"answer" if name == "words" else name: answer[name] for name in asked} for answer in answers]
    trace = str(source.trace) if source.trace else None
    damage = {"first_damage": first, "questions": questions, "lost": lost}
    return {"report": str(source.report), "trace": trace, **facts, **damage}


def _lines(source: Source, found: Triage, show_sql: bool) -> list[str]:
    from ..store.output import text_table
    from ..store.triage import lost_line

    lines = [f"report  {printable(str(source.report))}   {found.violations:,} violations, {found.findings:,} findings"]
    first = found.first
    if first:
        request = f"   request {first['request']}" if first["request"] else ""
        where = f", position {first['position']}" if first["position"] >= 0 else ""
        when = f"forward {first['forward']}" if first["forward"] >= 0 else f"event {first['event']}"
        slot = f"slot {first['slot']} of group {first['pool_group']}{where}"
        lines.append(_line(f"first   {when}{_line(request, MAX_NAME)}   {slot}   {first['what']}"))
    lines += _incident_lines(source, found)
    if not found.answers:
        lines.append("nothing was found, so there is nothing to ask")
    for number, answer in enumerate(found.answers, 1):
        lines += ["", f"{number:2}  {answer.question}", f"    {_line(answer.words)}"]
        for title, rows, columns, sql in (
            ("the first damage", answer.first, answer.first_columns, answer.first_sql),
            ("over all", answer.overall, answer.overall_columns, answer.overall_sql),
        ):
            if rows:
                lines += [f"    {title}:", *text_table(rows, columns, indent="      ")]
            if show_sql and sql:
                lines += ["", *(f"      {line}" for line in sql.splitlines()), ""]
    lines.append("")
    lines += [printable(f"lost    {lost_line(row)}") for row in found.lost]
    lines.append(f"next    kvcanary sql {printable(shlex.quote(str(source.report)))}")
    return lines


def _line(text: str, most: int = MAX_LINE) -> str:
    """Text on one line, cut where it is long: whoever names a request may send any name."""
    shown = printable(text)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def _incident_lines(source: Source, found: Triage) -> list[str]:
    """Cite the report's incidents, a line each; say how to have them where something was found and there are none."""
    command = f"kvcanary incidents {shlex.quote(str(source.report))}"
    if not found.incidents:
        return [printable(f"        no incidents in this report yet: {command}")] if found.answers else []
    lines = []
    for row in found.incidents:
        title = f"{row['title'][:1].upper()}{row['title'][1:]}"
        what = title if row["title"] == row["kind"] else f"{title} ({row['kind']})"
        since = f"from forward {row['first_forward']:,}" if row["first_forward"] >= 0 else "between forwards"
        lines.append(
            f"#{row['incident']:<7}{what}, confidence {row['confidence']}   {since}   "
            f"{row['num_requests']:,} request{'' if row['num_requests'] == 1 else 's'} hit"
        )
    more = found.num_incidents - len(found.incidents)
    explain = f"{command} --explain {found.incidents[0]['incident']}"
    lines.append(f"        {f'and {more:,} more; ' if more else ''}why: {explain}")
    return [printable(line) for line in lines]
