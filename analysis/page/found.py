"""What the page shows one by one: incidents, or what was found by kind; the map of each one's slots, and its chains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...replayer.checks import FINDING_KINDS
from ...replayer.cli.incident_blocks import alike
from ..store.connection import quoted
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
        "alike": alike(row),
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


_LIVES_A_SLOT: Final = 40
# How many slots on either side of a damaged one, by how many are damaged: few can show more around them.
_REACH: Final = ((2, 4), (6, 2))
_LEAST_REACH: Final = 1


def slot_map(ask: Ask, subject: Subject, sizes: Mapping[int, int], limits: Limits) -> dict[str, Any]:
    """Return the map's rows (pool group, slot), and tables of what stands in them; `sizes` are slots by pool group."""
    slots = ask.table(page_sql("subject_slots", subject.values(limits.slots)))
    counted = "select count(distinct (pool_group, slot)) from damage where slot >= 0 and"
    total = ask.number(f"{counted} {subject.damage_where}")
    # An absurd slot, of a damaged block table, came as text, and has no neighbours.
    places = [(int(group), int(slot)) for group, slot in zip(*slots["data"][:2], strict=True) if isinstance(slot, int)]
    ranges = neighbourhoods(places, sizes, limits)
    if not ranges:
        return {"slots": slots, "total": total, "rows": []}
    rows = [(group, slot) for group, first, last in sorted(ranges) for slot in range(first, last + 1)]
    span = max(1, subject.last_forward - subject.first_forward)
    lives = "\n    union all ".join(f"from lifetimes_between({a}, {b}) where pool_group = {g}" for g, a, b in ranges)
    common = {
        "slots": f"({' or '.join(f'(pool_group = {g} and slot between {a} and {b})' for g, a, b in ranges)})",
        "forward": subject.first_forward,
        "class": DAMAGE_CLASS,
        "gap": max(4, span // 100),
        "lives": lives,
        "each": _LIVES_A_SLOT,
    }
    parts = {name: getattr(limits, name) for name in ("lives", "damage", "writes", "changes")}
    tables = {name: ask.table(page_sql(f"slot_{name}", {**common, "limit": limit})) for name, limit in parts.items()}
    return {"slots": slots, "total": total, "rows": rows, **tables}


def neighbourhoods(
    slots: list[tuple[int, int]], sizes: Mapping[int, int], limits: Limits
) -> list[tuple[int, int, int]]:
    """Return the ranges (pool group, first, last) around damaged slots, the most important first, that fit the limits."""
    reach = next((reach for few, reach in _REACH if len(slots) <= few), _LEAST_REACH)
    chosen: set[tuple[int, int]] = set()
    ranges: list[tuple[int, int, int]] = []
    for group, slot in slots:
        end = max(slot + 1, min(slot + reach + 1, sizes.get(group, slot + 1)))
        around = {(group, near) for near in range(min(slot, max(1, slot - reach)), end)}
        if len(chosen | around) > limits.slots and chosen:
            continue
        grown = _runs(chosen | around)
        if len(grown) > limits.places:
            continue
        chosen |= around
        ranges = grown
    return ranges


def _runs(slots: set[tuple[int, int]]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for group, slot in sorted(slots):
        if runs and runs[-1][0] == group and runs[-1][2] == slot - 1:
            runs[-1] = (group, runs[-1][1], slot)
        else:
            runs.append((group, slot, slot))
    return runs


_BEFORE: Final = 2
_POSITIONS: Final = 14


def chain_windows(
    ask: Ask, subject: Subject, groups: Sequence[Mapping[str, Any]], limits: Limits
) -> list[dict[str, Any]]:
    """Return a subject's windows: whose chain, as which forward read it; `groups` are rows of `pool_groups`, or none."""
    values = {"title": subject.title, "where": subject.violations_where, "limit": limits.windows}
    windows = []
    for row in ask.records(page_sql("chain_windows", values)):
        group = groups[row["pool_group"]] if row["pool_group"] < len(groups) else {}
        first = max(0, row["first_position"] - _BEFORE)
        lut = ""
        if group.get("lut", -1) >= 0:
            lut = (
                f"asof left join lut_changes on lut_changes.lut = {group['lut']} and lut_changes.full_slot = latest.slot "
                "and lut_changes.event <= at_event"
            )
        place = {name: row[name] for name in ("event", "forward", "request_id", "pool_group")} | {
            "runner": group.get("runner", -1),
            "table_index": group.get("table_index", -1),
            "first": first,
            "reach": f"prefix_len - {group['window_tokens']}" if group.get("window_tokens") else "0",
            "last": min(row["last_position"] + _BEFORE, first + _POSITIONS - 1),
            "slot": "swa_slot" if lut else "slot",
            "lut": lut,
        }
        windows.append(
            {
                **{name: row[name] for name in ("request", "forward", "pool_group", "is_first")},
                "request_id": str(row["request_id"]),
                "bad_positions": row["positions"],
                "rows": ask.table(page_sql("chain", place)),
            }
        )
    return windows
