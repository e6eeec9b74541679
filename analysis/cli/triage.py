"""`kvcanary triage`: the questions asked of every damage, answered."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...recorder.cli.program import terminal_width
from ...recorder.errors import printable
from ...recorder.text_tables import folded, text_table
from ..errors import AnalysisError
from . import errors_end, reports_argument, say_error, sources_named, trace_option

if TYPE_CHECKING:
    from ..store.sources import Source
    from ..store.triage import Answer, Asked, Triage

MAX_LINE, MAX_NAME, MAX_CELL = 500, 120, 60

_EPILOG = """\b
Examples:
  kvcanary triage trace.report
      ten questions, in words and small tables
  kvcanary triage trace.report --sql
      the same with the SQL behind each, for kvcanary sql
  kvcanary triage /traces
      the reports of a folder, one after another
  kvcanary triage trace.report --incident 2
      the second incident alone; of several together, answers are in words only
  kvcanary triage trace.report --json | jq '.questions[] | {question, answer}'
  kvcanary triage trace.report --trace /mnt/traces/trace.arrow
      where the trace is no longer where it was replayed

\b
Exit codes: 0 answered (also where nothing was found), 2 wrong usage or an unreadable report.
"""


@click.command("triage", epilog=_EPILOG)
@reports_argument
@click.option("--incident", type=click.IntRange(min=1), metavar="N", help="Ask about this incident alone.")
@trace_option
@click.option("--sql", "show_sql", is_flag=True, help="Show the SQL behind each answer.")
@click.option("--json", "as_json", is_flag=True, help="Print answers, rows and SQL as JSON; of several reports a list.")
def triage_command(path: Path, incident: int | None, trace: Path | None, show_sql: bool, as_json: bool) -> None:
    """Answer the questions that are asked of every damage: who held the slot before, which forward wrote it first, is
    it the prefix cache, chunk boundaries, page sizes, the same slots, other requests' tokens, the draft, the prefill
    or decode side, a transfer. Each incident has its own answers.

    A REPORT is the folder that kvcanary-replay wrote, beside its TRACE, or in a FOLDER with others. The first call writes
    report.duckdb into it, which answers from then on and opens with any DuckDB client.
    """
    answered = []
    with errors_end():
        for number, source in enumerate(sources_named(path, trace)):
            found, asked = _ask(source, incident)
            if as_json:
                answered.append(_to_json(source, found, asked))
                continue
            for line in [*([""] if number else []), *_lines(source, found, asked, show_sql)]:
                for part in folded(line, terminal_width()):
                    click.echo(part)
    if as_json:
        click.echo(json.dumps(answered if len(answered) > 1 else answered[0], indent=2, default=str))


def _ask(source: Source, incident: int | None) -> tuple[Triage, dict[int, Asked]]:
    """Return the answers about one report, and about each of its incidents, or one, by number."""
    from ...replayer.report.report import STORE_NAME
    from ..store.session import open_sources
    from ..store.store import fresh_store, made_store
    from ..store.triage import Asked, triage, triage_incident

    if source.trace is None and fresh_store(source) is None:
        raise AnalysisError(
            f"{source.problem}; without {STORE_NAME}, which {source.report} does not have, triage reads the trace: "
            "say with --trace where it is now"
        )
    if why := made_store(source):
        say_error(f"{why}; answering from the files, which is slower", kind="note: ")
    with open_sources([source]) as session:
        found = triage(session)
        if incident is not None:
            if incident > found.num_incidents:
                raise AnalysisError(f"--incident {incident}: {source.report} has {found.num_incidents} incident(s)")
            return found, {incident: triage_incident(session, incident)}
        numbers = [row["incident"] for row in found.incidents]
        if len(numbers) == 1:  # all that was found
            return found, {numbers[0]: Asked(first=found.first, answers=found.answers)}
        return found, {number: triage_incident(session, number) for number in numbers}


def _to_json(source: Source, found: Triage, asked: dict[int, Asked]) -> dict[str, Any]:
    facts = asdict(found)
    first, answers, lost = (facts.pop(name) for name in ("first", "answers", "lost"))
    for row in facts["incidents"]:
        if one := asked.get(row["incident"]):
            row |= {"first_damage": one.first, "questions": [_question(asdict(answer)) for answer in one.answers]}
    trace = str(source.trace) if source.trace else None
    damage = {"first_damage": first, "questions": [_question(answer) for answer in answers], "lost": lost}
    return {"report": str(source.report), "trace": trace, **facts, **damage}


def _question(answer: dict[str, Any]) -> dict[str, Any]:
    asked = ("name", "question", "words", "first", "overall", "first_sql", "overall_sql")
    return {"answer" if name == "words" else name: answer[name] for name in asked}


def _lines(source: Source, found: Triage, asked: dict[int, Asked], show_sql: bool) -> list[str]:
    from ...replayer.cli.incident_blocks import count_of
    from ..store.triage import lost_line

    lines = [
        f"report  {printable(str(source.report))}   {count_of(found.violations, 'violation')}, {count_of(found.findings, 'finding')}"
    ]
    lines += _shrunk_line(source)
    if len(asked) > 1:
        for row in found.incidents:
            one = asked[row["incident"]]
            lines += [
                "",
                _incident_line(row),
                *_first_line(one.first),
                *_answer_lines(one.answers, show_sql, rows=False),
            ]
        lines += ["", *_more_lines(source, found)]
        tables = f"kvcanary triage {shlex.quote(str(source.report))} --incident {found.incidents[0]['incident']}"
        lines.append(printable(f"        one of them, with the rows behind each answer: {tables}"))
    else:
        shown = next(iter(asked.values()), found)
        rows = [row for row in found.incidents if row["incident"] in asked]
        lines += [*_first_line(shown.first), *map(_incident_line, rows), *_more_lines(source, found)]
        lines += _answer_lines(shown.answers, show_sql, rows=True)
    if not found.answers:
        lines.append("nothing was found, so there is nothing to ask")
    lines.append("")
    lines += [printable(f"lost    {lost_line(row)}") for row in found.lost]
    lines.append(f"next    kvcanary sql {printable(shlex.quote(str(source.report)))}")
    return lines


def _shrunk_line(source: Source) -> list[str]:
    """Say that what follows speaks of a part of a recording, and not in the recording's own names and numbers."""
    from ...recorder.errors import TraceError
    from ...recorder.trace.reader import TraceReader

    try:
        with TraceReader(source.files[0]) as reader:
            shrunk = reader.header.shrunk
    except (IndexError, TraceError):
        return []
    if shrunk is None:
        return []
    part = f"a part of {shrunk.events:,} events that kvcanary shrink cut out"
    return [f"shrunk  {part}: requests, tokens and slots have new names, forwards their numbers"]


def _first_line(first: dict[str, Any] | None) -> list[str]:
    if not first:
        return []
    request = f"   request {first['request']}" if first["request"] else ""
    where = f", position {first['position']}" if first["position"] >= 0 else ""
    when = f"forward {first['forward']}" if first["forward"] >= 0 else f"event {first['event']}"
    slot = f"slot {first['slot']} of group {first['pool_group']}{where}"
    return [_line(f"first   {when}{_line(request, MAX_NAME)}   {slot}   {first['what']}")]


def _answer_lines(answers: list[Answer], show_sql: bool, *, rows: bool) -> list[str]:
    lines = []
    for number, answer in enumerate(answers, 1):
        lines += [*([""] if rows else []), f"{number:2}  {answer.question}", f"    {_line(answer.words)}"]
        for title, found, columns, sql in (
            ("the first damage", answer.first, answer.first_columns, answer.first_sql),
            ("over all", answer.overall, answer.overall_columns, answer.overall_sql),
        ):
            if found and rows:
                lines += [
                    f"    {title}:",
                    *text_table(found, columns, indent="      ", width=terminal_width(), longest=MAX_CELL),
                ]
            if show_sql and sql:
                lines += ["", *(f"      {line}" for line in sql.splitlines()), ""]
    return lines


def _line(text: str, most: int = MAX_LINE) -> str:
    """Text on one line, cut where it is long: whoever names a request may send any name."""
    shown = printable(text)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def _incident_line(row: dict[str, Any]) -> str:
    title = f"{row['title'][:1].upper()}{row['title'][1:]}"
    what = title if row["title"] == row["kind"] else f"{title} ({row['kind']})"
    since = f"from forward {row['first_forward']:,}" if row["first_forward"] >= 0 else "between forwards"
    hit = f"{row['num_requests']:,} request{'' if row['num_requests'] == 1 else 's'} hit"
    return printable(f"#{row['incident']:<7}{what}, confidence {row['confidence']}   {since}   {hit}")


def _more_lines(source: Source, found: Triage) -> list[str]:
    """Say why the incidents are what they are; or how to have them, where something was found and there are none."""
    command = f"kvcanary incidents {shlex.quote(str(source.report))}"
    if not found.incidents:
        return [printable(f"        no incidents in this report yet: {command}")] if found.answers else []
    more = found.num_incidents - len(found.incidents)
    explain = f"{command} --explain {found.incidents[0]['incident']}"
    return [printable(f"        {f'and {more:,} more; ' if more else ''}why: {explain}")]
