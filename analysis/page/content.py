"""Everything that the page shows, as plain data: asked once, bounded whatever the size of the report."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ... import __version__
from ..store.session import SqlSession
from ..store.sources import Source
from ..store.triage import MAX_INCIDENTS, Answer, is_whole, lost_line, triage, triage_incident
from .ask import Ask, Limits, page_sql, plain
from .found import DAMAGE_CLASS, chain_windows, find_subjects, slot_map


def page_content(session: SqlSession, source: Source, limits: Limits) -> dict[str, Any]:
    """Return the page's data: numbers as `{v, q}`, tables as `{q, columns, data}`, `queries` being what q counts."""
    ask = Ask(session)
    present = bool(ask.records("select present from traces")[0]["present"])
    groups = ask.records("select * from pool_groups order by pool_group")
    subjects, total, are_incidents = find_subjects(ask, limits)
    content = {
        "version": __version__,
        "report": plain(str(source.report)),
        "present": present,
        "head": verdict(source),
        "numbers": numbers(ask, present=present),
        "unknown": unknown(ask, limits),
        "groups": [{"name": plain(g["name"]), "kind": plain(g["kind"]), "page_size": g["page_size"]} for g in groups],
        "subjects": {
            "are_incidents": are_incidents,
            "total": total,
            "shown": [
                {
                    **{key: plain_facts(value) for key, value in subject.facts.items()},
                    "first": subject.first_forward,
                    "last": subject.last_forward,
                    "reached": ask.table(page_sql("subject_requests", subject.values(limits.requests))),
                    "map": slot_map(ask, subject, {g["pool_group"]: g["num_slots"] for g in groups}, limits),
                    "chains": chain_windows(ask, subject, groups, limits),
                    "questions": _questions(ask, triage_incident(session, subject.facts["number"]).answers)
                    if are_incidents and len(subjects) > 1 and subject.facts["number"] <= MAX_INCIDENTS
                    else None,
                }
                for subject in subjects
            ],
        },
        "timeline": _timeline(ask, limits),
        "requests": request_lives(ask, limits),
        "questions": _questions(ask, triage(session).answers),
        "rows": {
            "kinds": ask.table(page_sql("kinds", {"class": DAMAGE_CLASS, "limit": limits.rows})),
            "spread": ask.table(page_sql("spread", {"limit": limits.rows})),
            "violations": ask.table(page_sql("violation_rows", {"limit": limits.rows})),
            "findings": ask.table(page_sql("finding_rows", {"limit": limits.rows})),
        },
        "limits": dataclasses.asdict(limits),
    }
    return {**content, "queries": ask.queries}


def plain_facts(value: Any) -> Any:
    """Return a subject's facts, whose numbers are plain already, with their texts cut."""
    if isinstance(value, dict) and not value.keys() >= {"v", "q"}:
        return {key: plain_facts(item) for key, item in value.items()}
    return plain(value) if isinstance(value, str | list) else value


def _timeline(ask: Ask, limits: Limits) -> dict[str, Any]:
    span = ask.records(
        "select coalesce(max(forward), 0) as last from (select forward from forwards union all select last_forward from damage)"
    )[0]["last"]
    width = max(1, -(-(span + 1) // limits.bins))
    values = {"width": width, "class": DAMAGE_CLASS, "limit": limits.rows}
    tables = {name: ask.table(page_sql(f"timeline_{name}", values)) for name in ("damage", "load", "marks")}
    return {"last": span, "width": width, **tables}


def _questions(ask: Ask, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [
        {
            "question": answer.question,
            "words": plain(answer.words),
            "queries": [ask.query(sql) for sql in (answer.first_sql, answer.overall_sql) if sql],
        }
        for answer in answers
    ]


_EVENTS_A_REQUEST = 40


def request_lives(ask: Ask, limits: Limits) -> dict[str, Any]:
    """Return the requests shown, how many there are, and tables of what happened to them."""
    listed = ask.table(page_sql("request_list", {"limit": limits.requests}))
    ids = listed["data"][0]
    lives: dict[str, Any] = {"list": listed, "total": ask.number("select count(*) from requests")}
    if not ids:
        return lives
    wanted = ", ".join(str(int(request_id)) for request_id in ids)
    values = {"requests": wanted, "class": DAMAGE_CLASS, "gap": 4, "each": _EVENTS_A_REQUEST}
    for name, limit in (
        ("request_parts", limits.request_parts),
        ("request_events", limits.request_parts // 2),
        ("request_damage", limits.request_damage),
    ):
        lives[name.removeprefix("request_")] = ask.table(page_sql(name, {**values, "limit": max(1, limit)}))
    return lives


_FOUND: Final = (
    ("violations", "select coalesce(sum(num_forwards), 0)::bigint from violations"),
    ("findings", "select count(*) from findings"),
    ("requests hit", "select count(distinct request_id) from damage where request_id >= 0"),
    ("slots hit", "select count(distinct (pool_group, slot)) from damage where slot >= 0"),
    ("forwards hit", "select count(distinct forward) from damage_forwards where forward >= 0"),
    ("first bad forward", "select forward from first_bad_forward()"),
)
_WHOLE: Final = (
    ("forwards", "select count(*) from forwards"),
    ("requests", "select count(*) from requests"),
    ("tokens", "select count(*) from tokens"),
    ("seconds", "select round((max(time_ns) - min(time_ns)) / 1e9, 3) from events where time_ns > 0"),
    ("last forward", "select max(forward) from forwards"),
)


def verdict(source: Source) -> dict[str, Any]:
    """Return the verdict and what was replayed, from the report's summary; texts only."""
    summary = source.summary or {}
    engine, model, ranks = (_part(summary, name) for name in ("engine", "model", "ranks"))
    replayed = " ".join(str(engine.get(key, "")) for key in ("name", "version")).strip()
    kinds, cut = ("tp", "pp", "dp"), summary.get("cut_at_forward")
    return {
        "verdict": plain(str(summary.get("verdict", "unknown"))),
        "doubts": [plain(doubt) for doubt in _list(summary.get("doubts"))],
        "cut_at_forward": cut if isinstance(cut, int) else None,
        "being_recorded": summary.get("being_recorded") is True,
        "not_watched": [plain(words) for words in _list(summary.get("not_watched"))],
        "stopped": plain(str(summary.get("stopped") or "")),
        "trace": plain(source.name),
        "engine": plain(replayed),
        "commit": plain(str(engine.get("commit") or "")),
        "model": plain(str(model.get("name") or "")),
        "ranks": [
            f"{k} {ranks.get(f'{k}_rank')}/{ranks.get(f'{k}_size')}" for k in kinds if ranks.get(f"{k}_size", 1) != 1
        ],
        "trace_id": plain(str(summary.get("trace_id") or "")),
        "violations_by_reason": {plain(k): plain(v) for k, v in _part(summary, "violations_by_reason").items()},
    }


def numbers(ask: Ask, *, present: bool) -> dict[str, Any]:
    """Return the head's numbers; those of the whole trace only if it is at hand."""
    return {name: ask.number(sql) for name, sql in (*_FOUND, *(_WHOLE if present else ()))}


def unknown(ask: Ask, limits: Limits) -> dict[str, Any]:
    """Return what the trace does not know: in words, as numbers, and place by place."""
    rows = ask.records("select * from lost order by trace")
    return {
        "whole": all(is_whole(row) for row in rows),
        "words": [*(plain(lost_line(row)) for row in rows), *_spread(ask)],
        "losses": ask.number("select count(*) from losses"),
        "lost_events": ask.number("select coalesce(sum(lost_events), 0)::bigint from losses"),
        "gaps": ask.number("select count(*) from gaps"),
        "places": ask.table(page_sql("timeline_lost", {"limit": limits.rows})),
    }


def _spread(ask: Ask) -> list[str]:
    """Say where single forwards of merged rows are a guess, as in the view violation_forwards."""
    query = "select count(*) as n from violations join traces using (trace) where num_forwards > 1 and not present"
    merged = ask.records(query)[0]["n"]
    return [f"in which forwards {merged:,} lasting violations were found: shown spread evenly"] if merged else []


def _part(summary: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = summary.get(name)
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []
