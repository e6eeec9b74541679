"""Rows as text: a table for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...recorder.text import printable

MAX_CELL = 60


def text_table(
    rows: Sequence[Mapping[Any, Any]],
    columns: Sequence[str | int],
    *,
    headings: Sequence[str] | None = None,
    indent: str = "",
) -> list[str]:
    """Return lines: the headings (default: the columns), a rule, and a line a row; numbers right, long cells cut."""
    titles = [printable(str(title)) for title in headings or columns]
    cells = [[cell_text(row[key]) for key in columns] for row in rows]
    widths = [max([len(title), *(len(row[i]) for row in cells)]) for i, title in enumerate(titles)]
    right = [_is_numeric([row[key] for row in rows]) for key in columns]

    def line(values: Sequence[str]) -> str:
        padded = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True)]
        return (indent + "  ".join(padded)).rstrip()

    return [line(titles), indent + "  ".join("-" * width for width in widths), *(line(row) for row in cells)]


def cell_text(value: Any) -> str:
    """Return a value as one short line that cannot steer a terminal."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    text = printable(value.hex() if isinstance(value, bytes) else str(value))
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 3] + "..."


def _is_numeric(values: Sequence[Any]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known)
