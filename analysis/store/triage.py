"""Triage: the questions that engineers ask of every damage, each with its SQL, for the first damage and over all."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ..errors import AnalysisError
from .library import sql_sections
from .session import SqlSession

_PLACEHOLDER = re.compile(
    r"(?<!:):(slot|pool_group|forward|event|request_id|position|runner|mode|writer_forward|writer_request)\b"
)
_TEXTS = ("mode", "writer_request")  # stand in quotes in the SQL; the others are numbers
MAX_INCIDENTS = 5


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
class Asked:
    """One incident's first damage, as a row of `first_damage`, and the answers about it and over all of the incident."""

    first: dict[str, Any] | None
    answers: list[Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """What triage says of one report: `first` is a row of `first_damage`, `incidents` are the first of `num_incidents`."""

    violations: int
    findings: int
    num_incidents: int
    incidents: list[dict[str, Any]]
    first: dict[str, Any] | None
    answers: list[Answer]
    lost: list[dict[str, Any]]


def triage(session: SqlSession) -> Triage:
    """Answer every question about one report, none if nothing was found; raise `AnalysisError` if the report is damaged."""
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


def triage_incident(session: SqlSession, incident: int) -> Asked:
    """Answer every question about one incident of the only report."""
    earliest = (
        "select * exclude (last_forward, num_forwards) from damage where slot >= 0 "
        "order by event, source desc, pool_group, request_id, position, slot, what, number limit 1"
    )
    first = next(iter(session.sql(_within(earliest, incident)).to_pylist()), None)
    return Asked(first=first, answers=[answer(session, name, first, incident) for name in ANSWERS])


# By the relation that a query over all asks: which of its rows are an incident's.
_OF_INCIDENT: Mapping[str, str] = {
    **dict.fromkeys(("damage", "damage_forwards"), "(source, number) in (select (source::varchar, number) {members})"),
    "findings": "number in (select number {members} and source = 'finding')",
}


def _within(sql: str, incident: int) -> str:
    """Return a query that sees the damage of one incident alone."""
    members = f"from incident_members where incident = {incident}"
    parts = [
        f"{name} as (select * from main.{name} where {condition.format(members=members)})"
        for name, condition in _OF_INCIDENT.items()
        if re.search(rf"\b(?:from|join) {name}\b", sql)
    ]
    if not parts:
        return sql
    begin = "with " + ",\n".join(parts)
    return f"{begin},\n{sql.removeprefix('with ')}" if sql.startswith("with ") else f"{begin}\n{sql}"


def answer(session: SqlSession, name: str, first: Mapping[str, Any] | None, incident: int | None = None) -> Answer:
    """Answer one question; `first` as in `Triage`. Over all is over the whole report, or over one incident."""
    text = sql_sections("triage", name)  # the question in its first comment; of the first damage, and over all
    first_sql = "" if first is None else fill(text["first"], first)
    overall_sql = text["overall"] if incident is None else _within(text["overall"], incident)
    at_first = session.sql(first_sql) if first_sql else pa.table({})
    over_all = session.sql(overall_sql)
    first_rows, rows = at_first.to_pylist(), over_all.to_pylist()
    return Answer(
        name=name,
        question=text[""].removeprefix("-- "),
        words=ANSWERS[name](first_rows, rows),
        first=first_rows,
        overall=rows,
        first_columns=at_first.column_names,
        overall_columns=over_all.column_names,
        first_sql=first_sql,
        overall_sql=overall_sql,
    )


def fill(sql: str, first: Mapping[str, Any]) -> str:
    """Return SQL with the first damage's values in place of its placeholders; texts stand in quotes already.

    Raise `AnalysisError` if a value that belongs outside of quotes is no number, so that it could be SQL.
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


Row = Mapping[str, Any]
Rows = Sequence[Row]

NO_SLOT = "no damage names a slot"


def _held_before(first: Rows, overall: Rows) -> str:
    at_first = "the trace does not say who held the slot"
    if first:
        now = list(dict.fromkeys(_holder(row) for row in first if row["at_the_damage"]))
        before = list(dict.fromkeys(_holder(row) for row in first if not row["at_the_damage"]))
        # Without a slot history a write says who wrote, and not who held the slot from then on.
        verb = "last written by" if any(row["began"] == "write" for row in first) else "held by"
        at_first = f"{verb} {' and '.join(now) or 'nobody'}; before that by {', '.join(before) or 'nobody'}"
    if not overall:
        return at_first
    shares = ", ".join(_shares(overall, "last_written_by", "found", "{} {}"))
    return f"{at_first}; damaged slots were written last by: {shares}"


def _first_writer(first: Rows, overall: Rows) -> str:
    if not first:
        return "no forward of this trace wrote it before the damage"
    begin, last = first[0], first[-1]
    words = f"forward {begin['forward']} ({begin['mode']}) for {_name(begin['request'])}, position {begin['position']}"
    if last is not begin:
        words += f"; last before the damage forward {last['forward']} for {_name(last['request'])}, position {last['position']}"
    if overall:
        words += f"; the damage seen first over all was written in forward {overall[0]['writer_forward']}"
    return words


def _prefix_cache(first: Rows, overall: Rows) -> str:
    cached = next((row for row in overall if row["began_with_cached_prefix"]), None)
    fresh = next((row for row in overall if not row["began_with_cached_prefix"]), None)
    if cached is None:
        return "no request of this trace began with a cached prefix, so it happens without one too"
    said = f"{cached['hit']} of {cached['requests']} requests with a cached prefix are hit"
    if fresh is None:
        said = f"cannot be known: every request began with a cached prefix; {said}"
    else:
        hit = "no" if fresh["hit"] else "yes" if cached["hit"] else "no request was hit"
        said = f"{hit}: {said}, {fresh['hit']} of {fresh['requests']} without"
    if first and first[0]["in_cached_prefix"]:
        said += f"; the first damage lies inside the cached prefix of {first[0]['prefix_hit']} tokens"
    return said


def _chunk_boundaries(_: Rows, overall: Rows) -> str:
    if not overall:
        return "no damage names a request's position"
    total = sum(row["requests"] for row in overall)
    at_bounds = sum(row["requests"] for row in overall if row["first_damaged_position"].endswith("of a chunk"))
    verdict = "yes" if at_bounds == total else "no" if not at_bounds else "not only"
    places = ", ".join(f"{row['requests']} {row['first_damaged_position']}" for row in overall)
    return f"{verdict}: of {total} request(s) the first damaged position lies: {places}"


def _page_modulo(_: Rows, overall: Rows) -> str:
    if not overall:
        return "no prompt length is known"
    if overall[0]["page_size"] == 1:
        return "no: pages hold one token"
    bad = [row for row in overall if row["hit"]]
    if not bad:
        return "no request with a known prompt length is hit"
    hits, remainder = sum(row["hit"] for row in bad), f"{bad[0]['remainder']} of {bad[0]['page_size']}"
    if len(bad) > 1:
        return f"no: {hits} requests hit have {len(bad)} remainders of {bad[0]['page_size']}"
    if hits == 1:
        return f"cannot be known from one request; its remainder is {remainder}"
    return f"perhaps: all {hits} requests hit have remainder {remainder}"


def _slot_range(_: Rows, overall: Rows) -> str:
    if not overall:
        return NO_SLOT
    row = overall[0]
    where = f"slots {row['first_slot']} to {row['last_slot']}" if row["slots"] > 1 else f"slot {row['first_slot']}"
    where += f" of group {row['pool_group']}, for {'several requests' if row['several_requests'] else 'one request'}"
    return (
        f"yes: all of it lies in {where}"
        if row["ranges"] == 1
        else f"no: {row['ranges']} ranges; most of it in {where}"
    )


def _whose_tokens(_: Rows, overall: Rows) -> str:
    if not overall:
        return "no token differs: what is wrong is elsewhere (KV bytes, positions, chain, or the bookkeeping)"
    total = sum(row["tokens"] for row in overall)
    return f"of {total} wrong tokens: {', '.join(_shares(overall, 'stored_tokens_are', 'tokens', '{} ({})'))}"


def _target_or_draft(_: Rows, overall: Rows) -> str:
    names = list(dict.fromkeys(row["runner_name"] for row in overall if row["runner_name"]))
    if not names:
        return "no damage names a runner"
    begin = overall[0]
    when = f"in mode {begin['mode']}" if begin["mode"] else "between forwards"
    return f"{' and '.join(names)}; first {begin['runner_name']}, {when}, forward {begin['first_forward']}"


def _prefill_or_decode(_: Rows, overall: Rows) -> str:
    if not overall:
        return NO_SLOT
    role = overall[0]["role"]
    side = f"this is the {role} engine's trace" if role else "one engine does both"
    seen = ", ".join(dict.fromkeys(f"{row['seen_in'] or 'between forwards'}" for row in overall))
    written = ", ".join(dict.fromkeys(row["written_in"] for row in overall if row["written_in"]))
    return f"{side}; seen in: {seen}; the slots were written in: {written or 'no forward of this trace'}"


def _transfer_sides(_: Rows, overall: Rows) -> str:
    if not overall:
        return "nothing was transferred in this trace"
    found = {row["kind"]: row["found"] for row in overall}
    source = found.get("transfer_source_damaged", 0) + found.get("transfer_source_changed", 0)
    differs = found.get("transfer_differs", 0)
    if source:
        when = "the source was damaged or changed while it was sent"
        return f"no: {source} time(s) {when}; received differently: {differs}"
    if differs:
        return f"{differs} received part(s) differ from what was sent; the detail says which side went wrong"
    failed = sum(count for kind, count in found.items() if "failed" in kind)
    return f"no transfer was found to differ; {failed} failed"


# By the name of the question's file: what the rows of its two queries come to, in words.
ANSWERS: Mapping[str, Callable[[Rows, Rows], str]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_held_before, _first_writer, _prefix_cache, _chunk_boundaries, _page_modulo),
        *(_slot_range, _whose_tokens, _target_or_draft, _prefill_or_decode, _transfer_sides),
    )
}


def _holder(row: Row) -> str:
    return "the prefix cache" if row["holder"] == "cache" else _name(row["request"])


def _name(name: str | None) -> str:
    return f"request {name}" if name else "nobody"


def _shares(rows: Rows, name: str, count: str, form: str) -> list[str]:
    whole = sum(row[count] for row in rows)
    return [form.format(row[name], f"{100 * row[count] / whole:.0f} %") for row in rows]
