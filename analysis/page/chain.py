"""The chain around bad slots: what stands in the slots that a request read, against what was expected."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .ask import Ask, Limits, page_sql
from .found import Subject

_BEFORE: Final = 2
_POSITIONS: Final = 14


def chain_windows(
    ask: Ask, subject: Subject, groups: Sequence[Mapping[str, Any]], limits: Limits
) -> list[dict[str, Any]]:
    """Return the windows of one subject: whose chain, as which forward read it, and its rows.

    `groups` are rows of `pool_groups`, by number; without them (the trace is not at hand) there is only what the
    violations say.
    """
    values = {"title": subject.title, "where": subject.violations_where, "limit": limits.windows}
    windows = []
    for row in ask.records(page_sql("chain_windows", values)):
        group = groups[row["pool_group"]] if row["pool_group"] < len(groups) else {}
        first = max(0, row["first_position"] - _BEFORE)
        has_lut = group.get("lut", -1) >= 0
        sql = page_sql(
            "chain",
            {
                "event": row["event"],
                "forward": row["forward"],
                "request_id": row["request_id"],
                "pool_group": row["pool_group"],
                "runner": group.get("runner", -1),
                "table_index": group.get("table_index", -1),
                "first": first,
                "reach": f"prefix_len - {group['window_tokens']}" if group.get("window_tokens") else "0",
                "last": min(row["last_position"] + _BEFORE, first + _POSITIONS - 1),
                "slot": "swa_slot" if has_lut else "slot",
                "lut": f"asof left join lut_changes on lut_changes.lut = {group['lut']} and lut_changes.full_slot = latest.slot and lut_changes.event <= at_event"
                if has_lut
                else "",
            },
        )
        windows.append(
            {
                "request": row["request"],
                "request_id": str(row["request_id"]),
                "forward": row["forward"],
                "pool_group": row["pool_group"],
                "bad_positions": row["positions"],
                "is_first": row["is_first"],
                "rows": ask.table(sql),
            }
        )
    return windows
