"""Everything that the page shows, as plain data: asked once, bounded whatever the size of the report."""

import dataclasses
from typing import Any

from ... import __version__
from ..store.session import Session
from ..store.sources import Source
from ..store.triage import triage
from .ask import Ask, Limits, page_sql, plain
from .chain import chain_windows
from .facts import numbers, unknown, verdict
from .found import DAMAGE_CLASS, find_subjects
from .requests import request_lives
from .slot_map import slot_map


def page_content(session: Session, source: Source, limits: Limits) -> dict[str, Any]:
    """Return the page's data: numbers as `{v, q}`, tables as `{q, columns, data}`, `queries` being what q counts.

    Raises:
        SqlError: a query failed.
    """
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
                    "reached": ask.table(
                        page_sql(
                            "subject_requests",
                            {"title": subject.title, "where": subject.damage_where, "limit": limits.requests},
                        )
                    ),
                    "map": slot_map(ask, subject, {g["pool_group"]: g["num_slots"] for g in groups}, limits),
                    "chains": chain_windows(ask, subject, groups, limits),
                }
                for subject in subjects
            ],
        },
        "timeline": _timeline(ask, limits),
        "requests": request_lives(ask, limits),
        "questions": _questions(session, ask),
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
    return {
        "last": span,
        "width": width,
        "damage": ask.table(page_sql("timeline_damage", values)),
        "load": ask.table(page_sql("timeline_load", values)),
        "marks": ask.table(page_sql("timeline_marks", values)),
    }


def _questions(session: Session, ask: Ask) -> list[dict[str, Any]]:
    return [
        {
            "question": answer.question,
            "words": plain(answer.words),
            "queries": [ask.query(sql) for sql in (answer.first_sql, answer.overall_sql) if sql],
        }
        for answer in triage(session).answers
    ]
