"""Triage: the questions that engineers ask of every damage, each with its SQL, for the first damage and over all."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import AnalysisError
from .answers import ANSWERS
from .session import Session

_SECTION = re.compile(r"^-- section: (\w+)\n", re.MULTILINE)
_PLACEHOLDER = re.compile(
    r"(?<!:):(slot|pool_group|forward|event|request_id|position|runner|mode|writer_forward|writer_request)\b"
)
_TEXTS = ("mode", "writer_request")  # stand in quotes in the SQL; the others are numbers
MAX_INCIDENTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSql:
    """A question, and its queries: of the first damage (with placeholders such as `:slot`), and over all."""

    question: str
    first: str
    overall: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question's answer in words, the rows behind it, and the SQL behind those; `first_sql` empty: it was not asked."""

    name: str
    question: str
    words: str
    first: list[dict[str, Any]]
    overall: list[dict[str, Any]]
    first_columns: list[str]
    overall_columns: list[str]
    first_sql: str
    overall_sql: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """What triage says of one report.

    `first` is a row of `first_damage`, None where nothing names a slot; `incidents` are the first rows of `incidents`, of
    `num_incidents`: none where the report has not got them.
    """

    violations: int
    findings: int
    num_incidents: int
    incidents: list[dict[str, Any]]
    first: dict[str, Any] | None
    answers: list[Answer]
    lost: list[dict[str, Any]]


def triage(session: Session) -> Triage:
    """Answer every question about one report; none where nothing was found.

    Raises:
        SqlError: a query failed.
        AnalysisError: the first damage of the report has text where a number belongs.
    """
    counts = session.sql(
        "select (select coalesce(sum(num_forwards), 0)::bigint from violations) as violations, (select count(*) from findings) as findings, "
        "(select count(*) from incidents) as num_incidents"
    ).to_pylist()[0]
    incidents = session.sql(
        "select incident, kind, title, confidence, coalesce(first_forward, -1) as first_forward, "
        "coalesce(num_requests, 0) as num_requests, sentence from incidents "
        f"order by trace, incident limit {MAX_INCIDENTS}"
    ).to_pylist()
    first = next(iter(session.sql("select * from first_damage order by trace").to_pylist()), None)
    answers = []
    if counts["violations"] or counts["findings"]:
        answers = [answer(session, name, first) for name in ANSWERS]
    lost = session.sql("select * from lost order by trace").to_pylist()
    return Triage(**counts, incidents=incidents, first=first, answers=answers, lost=lost)


def answer(session: Session, name: str, first: Mapping[str, Any] | None) -> Answer:
    """Answer one question; `first` as in `Triage`."""
    text = question_sql(name)
    first_sql = "" if first is None else fill(text.first, first)
    at_first = session.sql(first_sql) if first_sql else None
    over_all = session.sql(text.overall)
    first_rows = at_first.to_pylist() if at_first is not None else []
    rows = over_all.to_pylist()
    return Answer(
        name=name,
        question=text.question,
        words=ANSWERS[name](first_rows, rows),
        first=first_rows,
        overall=rows,
        first_columns=at_first.column_names if at_first is not None else [],
        overall_columns=over_all.column_names,
        first_sql=first_sql,
        overall_sql=text.overall,
    )


@cache
def question_sql(name: str) -> QuestionSql:
    """Read a question's file: the question in its first comment, then its two sections."""
    text = (files(__package__) / "sql" / "triage" / f"{name}.sql").read_text(encoding="utf-8")
    head, _, first, _, overall = _SECTION.split(text)
    return QuestionSql(question=head.removeprefix("-- ").strip(), first=first.strip(), overall=overall.strip())


def fill(sql: str, first: Mapping[str, Any]) -> str:
    """Return SQL with the first damage's values in place of its placeholders; texts stand in quotes already.

    Raises:
        AnalysisError: a value that belongs outside of quotes is no number, so that it could be SQL.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name in _TEXTS:
            return str(first[name]).replace("'", "''").replace("\0", "")
        try:
            return str(int(first[name]))
        except (TypeError, ValueError):
            raise AnalysisError(
                f"the report's first damage has {first[name]!r} for {name}, expected a number; replay the trace again"
            ) from None

    return _PLACEHOLDER.sub(value, sql)


def lost_line(row: Mapping[str, Any]) -> str:
    """Return what one trace does not know, in words."""
    if not row["present"]:
        return "the trace is not at hand"
    parts = []
    if row["losses"]:
        count = f"{row['lost_events']:,} event(s)" if not row["unknown_losses"] else "an unknown number of events"
        parts.append(f"{count} lost while recording, at {row['losses']:,} place(s)")
    if row["gaps"]:
        parts.append(f"{row['gaps']:,} damaged or torn part(s) left out")
    if not row["complete"] and not row["gaps"]:
        parts.append("the trace has no end")
    return "; ".join(parts) or "nothing: the trace is whole"


def is_whole(row: Mapping[str, Any]) -> bool:
    """Whether a trace, a row of `lost`, misses nothing."""
    return bool(row["present"] and row["complete"] and not row["losses"] and not row["gaps"])
