"""The page's head: what was replayed, the verdict, its numbers, and what the trace does not know."""

from collections.abc import Mapping
from typing import Any, Final

from ..store.sources import Source
from ..store.triage import is_whole, lost_line
from .ask import Ask, Limits, page_sql, plain

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
    sizes = [f"{kind} {ranks.get(f'{kind}_rank')}/{ranks.get(f'{kind}_size')}" for kind in ("tp", "pp", "dp")]
    return {
        "verdict": plain(str(summary.get("verdict", "unknown"))),
        "doubts": [plain(doubt) for doubt in _list(summary.get("doubts"))],
        "cut_at_forward": _whole(summary.get("cut_at_forward")),
        "being_recorded": summary.get("being_recorded") is True,
        "not_watched": [plain(words) for words in _list(summary.get("not_watched"))],
        "stopped": plain(str(summary.get("stopped") or "")),
        "trace": plain(source.name),
        "engine": plain(replayed),
        "commit": plain(str(engine.get("commit") or "")),
        "model": plain(str(model.get("name") or "")),
        "ranks": [
            size for size, kind in zip(sizes, ("tp", "pp", "dp"), strict=True) if ranks.get(f"{kind}_size", 1) != 1
        ],
        "trace_id": plain(str(summary.get("trace_id") or "")),
        "violations_by_reason": {plain(k): plain(v) for k, v in _part(summary, "violations_by_reason").items()},
    }


def numbers(ask: Ask, *, present: bool) -> dict[str, Any]:
    """Return the head's numbers; those of the whole trace only where it is at hand."""
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


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
