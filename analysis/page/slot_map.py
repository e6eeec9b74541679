"""The slot map of one subject: the damaged slots and those around them, who held them, what was found in them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .ask import Ask, Limits, page_sql
from .found import DAMAGE_CLASS, Subject

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
