"""What the page shows one by one: incidents where the report has them, else what was found by kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...replayer.checks import FINDING_KINDS
from ..store.live import quoted
from .ask import Ask, Limits, page_sql

# SQL over `damage`: four classes, which the page shows in their own colours.
DAMAGE_CLASS: Final = (
    "case when source = 'finding' then 'history' when what = 'VERIFY_KV_HASH' then 'KV bytes' "
    "when what not like '%VERIFY%' then 'input' else 'record' end"
)

# Without incidents: kinds beside everything together.
_MAX_KINDS: Final = 4
_REASONS: Final = {
    "VERIFY_CHAIN_HASH": "broken chain",
    "VERIFY_POSITION": "wrong position",
    "VERIFY_KV_HASH": "changed KV bytes",
    "VERIFY_TOKEN": "wrong token",
    "WRITE_TOKEN": "wrong input token",
    "WRITE_POSITION": "wrong input position",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One incident, or one kind of damage; SQL conditions pick its rows of `damage` and `violations`, `facts` are shown."""

    title: str
    damage_where: str
    violations_where: str
    first_forward: int
    last_forward: int
    facts: dict[str, Any]

    def values(self, limit: int) -> dict[str, object]:
        """Return what a query of its damage is given."""
        return {"title": self.title, "where": self.damage_where, "limit": limit}


def find_subjects(ask: Ask, limits: Limits) -> tuple[list[Subject], dict[str, Any], bool]:
    """Return what to show, how many there are in all (a number of the page), and whether they are incidents."""
    incidents = ask.records(f"select * from incidents order by incident limit {limits.subjects}")
    if incidents:
        return [_incident(ask, row) for row in incidents], ask.number("select count(*) from incidents"), True
    sql = page_sql("kinds", {"class": DAMAGE_CLASS, "limit": min(_MAX_KINDS, limits.subjects)})
    subjects = [_kind(ask, row) for row in ask.records(sql)]
    if len(subjects) > 1:
        subjects.insert(0, _everything(ask, subjects))
    return subjects, ask.number("select count(distinct (source, what)) from damage"), False


def in_words(source: str, what: str) -> str:
    """Return a reason or a finding's kind in words."""
    if source == "finding":
        words = FINDING_KINDS.get(what, what.replace("_", " "))
    else:
        words = ", ".join(_REASONS.get(reason, reason) for reason in what.split("+"))
    return words[:1].upper() + words[1:]


def _everything(ask: Ask, kinds: list[Subject]) -> Subject:
    sentence = "Everything that was found, of whatever kind"
    facts = {"title": "everything that was found", "sentence": sentence, "kind": ""}
    first, last = min(kind.first_forward for kind in kinds), max(kind.last_forward for kind in kinds)
    return _without_incident(ask, facts, "true", "true", {"first_forward": first, "last_forward": last})


def _kind(ask: Ask, row: Mapping[str, Any]) -> Subject:
    what = quoted(row["what"])
    sentence = in_words(row["source"], row["what"])
    facts = {"title": f"{row['source']}s of kind {row['what']}", "sentence": sentence, "kind": row["what"]}
    damage = f"source = {quoted(row['source'])} and what = {what}"
    violations = f"reasons::varchar = {what}" if row["source"] == "violation" else "false"
    return _without_incident(ask, facts, damage, violations, row)


def _without_incident(
    ask: Ask, facts: dict[str, Any], damage: str, violations: str, forwards: Mapping[str, Any]
) -> Subject:
    of = f"from damage where {damage}"
    numbers = {
        "violations": f"select coalesce(sum(num_forwards), 0)::bigint {of} and source = 'violation'",
        "findings": f"select count(*) {of} and source = 'finding'",
        "requests": f"select count(distinct nullif(request_id, -1)) {of}",
        "slots": f"select count(distinct (pool_group, slot)) filter (where slot >= 0) {of}",
        "first_forward": f"select min(forward) {of}",
        "last_forward": f"select max(last_forward) {of}",
    }
    return _subject(ask, facts, damage, violations, forwards, numbers)


def _incident(ask: Ask, row: Mapping[str, Any]) -> Subject:
    number = int(row["incident"])
    members, of = f"from incident_members where incident = {number}", f"from incidents where incident = {number}"
    facts = {
        **{name: row[name] for name in ("sentence", "kind", "detail")},
        "title": f"incident {number}",
        "number": number,
        "confidence": str(row["confidence"]),
        "kind_title": row["title"],
        "seen_by": list(row["seen_by"]),
        "alternatives": [kind for kind in row["alternatives"] if kind != row["kind"]],
        "first_sign": {name: row[name] for name in ("first_request", "in_slot", "expected") if row[name]},
        "evidence": [ask.query(sql) for sql in row["evidence"]],
    }
    numbers = {name: f"select {name} {of}" for name in ("violations", "findings", "first_forward", "last_forward")}
    numbers |= {name: f"select num_{name} {of}" for name in ("requests", "slots")}
    damage = f"(source, number) in (select (source::varchar, number) {members})"
    return _subject(ask, facts, damage, f"number in (select number {members} and source = 'violation')", row, numbers)


def _subject(
    ask: Ask,
    facts: dict[str, Any],
    damage: str,
    violations: str,
    forwards: Mapping[str, Any],
    numbers: Mapping[str, str],
) -> Subject:
    facts["numbers"] = {name: ask.number(sql) for name, sql in numbers.items()}
    return Subject(
        title=" ".join(facts["title"].split()),  # it stands in a comment of the SQL, which a line break would end
        damage_where=damage,
        violations_where=violations,
        first_forward=forwards["first_forward"],
        last_forward=forwards["last_forward"],
        facts=facts,
    )
