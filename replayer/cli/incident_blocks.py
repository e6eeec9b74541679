"""Incidents on a screen: a block each, from the rows that stand in a summary (docs/reference/incidents.md has the columns)."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...recorder.errors import printable

Row = Mapping[str, Any]

MOST_SHOWN: Final = 5
_MOST_NAMES: Final = 6
_CLOSE: Final = 0.7  # how much a known bug looks like an incident that it is named
_STYLES: Final = {"high": "bold red", "medium": "bold yellow", "low": "bold"}


def show_incidents(console: Console, incidents: Sequence[Row], *, total: int, first_time_ns: int) -> None:
    """Print the first of a summary's incidents, a block each, and how many of `total` are left."""
    shown = incidents[:MOST_SHOWN]
    for row in shown:
        show_incident(console, row, first_time_ns)
        console.print()
    if total > len(shown):
        console.print(Text(f"and {total - len(shown):,} more: kvcanary incidents shows them", style="dim"))


def show_incident(console: Console, row: Row, first_time_ns: int) -> None:
    """Print one incident: its number and kind, what happened, and where it was seen."""
    head = Text.assemble(
        (f"#{row['incident']}  ", "bold"),
        (row["title"][:1].upper() + row["title"][1:], _STYLES.get(row["confidence"], "bold")),
        (f"   {row['kind']}, confidence {row['confidence']} ({row['score']:.2f})", "dim"),
    )
    console.print(head, soft_wrap=not console.is_terminal)
    console.print(Padding(grid(_lines(row, first_time_ns)), (0, 0, 0, 4), expand=False))


def grid(rows: Sequence[tuple[str, str]]) -> Table:
    """Return titles with their values, without those that have none."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for title, value in rows:
        if value:  # names come from the trace: no markup, no control characters
            table.add_row(Text(title), Text(printable(value)))
    return table


def _lines(row: Row, first_time_ns: int) -> list[tuple[str, str]]:
    since = max(0.0, (row["time_ns"] - first_time_ns) / 1e9) if first_time_ns else 0.0
    mode = f", {row['mode']}" if row["mode"] else ""
    shown = some_of(row["requests"], row["num_requests"])
    first, last = row["first_forward"], row["last_forward"]
    forwards = f"forward {first:,}" if first == last else f"forwards {first:,}-{last:,}"
    spread = [f"{count_of(row['num_requests'], 'request')}{': ' + shown if shown else ''}", forwards]
    spread.append(f"{count_of(row['num_slots'], 'slot')}{_runs(row['slots'])}")
    seen = f"{count_of(row['violations'], 'violation')}, {count_of(row['findings'], 'finding')}: {', '.join(row['seen_by'][:4])}"
    others = [
        f"{kind} ({score:.2f})"
        for kind, score in zip(row["alternatives"], row["alternative_scores"], strict=False)
        if kind != row["kind"]
    ]
    return [
        ("what", row["sentence"]),
        ("first seen", f"forward {first:,} (+{duration(since)}{mode})   {row['first_request']}".rstrip()),
        ("in slot", row["in_slot"]),
        ("expected", row["expected"]),
        ("spread", "   ".join(spread)),
        ("seen by", seen),
        ("or else", ", ".join(others)),
        ("looks like", ", ".join(alike(row))),
    ]


def alike(row: Row) -> list[str]:
    """Return the public bugs that look like an incident, each with its kind if that is another one."""
    close = [one for one in row.get("alike") or () if one["tracker"] and one["likeness"] >= _CLOSE]
    return [one["tracker"] + ("" if one["kind"] == row["kind"] else f" ({one['kind']})") for one in close]


def _runs(runs: Sequence[Mapping[str, int]]) -> str:
    words = [
        f"{r['start']:,}" if r["count"] == 1 else f"{r['start']:,}-{r['start'] + r['count'] - 1:,}" for r in runs[:3]
    ]
    return f": {', '.join(words)}{', ...' if len(runs) > len(words) else ''}" if runs else ""


def some_of(names: Sequence[str], total: int) -> str:
    """Return the first names, and how many of `total` are left."""
    more = f" and {total - _MOST_NAMES:,} more" if total > _MOST_NAMES else ""
    return ", ".join(list(names)[:_MOST_NAMES]) + more


def count_of(count: int, noun: str) -> str:
    """Return `1 slot`, `2 slots`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Return seconds as people read them: `4.2 s`, `7:41`, `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
