"""Tables as text that stay tables on a narrow terminal: names are cut in the middle, and no two become the same."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from .errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_SHORTEST: Final = 8  # no name is cut further, however narrow the terminal
_GAP: Final = "  "
_CUT: Final = "..."


def text_table(
    rows: Sequence[Mapping[Any, Any]],
    columns: Sequence[Any],
    *,
    headings: Sequence[str] | None = None,
    indent: str = "",
    width: int | None = None,
    longest: int | None = None,
    right: Sequence[Any] = (),
) -> list[str]:
    """Return lines: the headings (default: the columns), a rule, and a line a row; numbers and `right` columns to the right.

    Above `width`, if it is given, texts are cut in the middle as far as they stay different from one another; columns that do
    not fit even then follow in a table of their own, with the rows numbered in each. No text is longer than `longest`.
    """
    titles = [printable(str(title)) for title in headings or columns]
    cells = [[cell_text(row[key]) for row in rows] for key in columns]
    if longest is not None:
        cells = [[cut_middle(cell, longest) for cell in column] for column in cells]
    to_right = [key in right or _is_numeric([row[key] for row in rows]) for key in columns]
    widths = [max(map(len, [title, *column])) for title, column in zip(titles, cells, strict=True)]
    room = None if width is None else max(width - len(indent), 1)
    if room is None or _total(widths) <= room:
        return _lines(titles, cells, widths, to_right, indent)
    least_title = _distinct_width(titles)
    least = [
        min(natural, max(least_title, max(map(len, column), default=0) if numeric else _distinct_width(column)))
        for natural, column, numeric in zip(widths, cells, to_right, strict=True)
    ]
    number_width = len(str(len(rows)))
    blocks: list[list[int]] = [[]]
    in_one = _total(least) <= room
    for column, needed in enumerate(least):
        taken = [least[i] for i in blocks[-1]] + ([] if in_one else [number_width])
        if blocks[-1] and _total([*taken, needed]) > room:
            blocks.append([])
        blocks[-1].append(column)
    lines: list[str] = []
    for block in blocks:
        fitted, left = [widths[i] for i in block], room - (0 if in_one else number_width + len(_GAP))
        while _total(fitted) > left:
            spare = [(fitted[at] - least[i], at) for at, i in enumerate(block)]
            if max(spare)[0] <= 0:
                break
            fitted[max(spare)[1]] -= 1
        parts = [titles[i] for i in block], [cells[i] for i in block], fitted, [to_right[i] for i in block]
        if not in_one:
            numbers = [str(number) for number in range(1, len(rows) + 1)]
            parts = ["#", *parts[0]], [numbers, *parts[1]], [number_width, *fitted], [True, *parts[3]]
            lines += [""] * bool(lines)
        lines += _lines(*parts, indent)
    return lines


def show_columns(console: "Console", rows: Sequence[Sequence[Any]], headings: Sequence[str], **how: Any) -> None:
    """Print a table that fits a console; `how` is as of `columns_text`."""
    console.print(columns_text(console, rows, headings, **how), soft_wrap=True)


def columns_text(
    console: "Console",
    rows: Sequence[Sequence[Any]],
    headings: Sequence[str],
    *,
    right: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
    indent: str = "",
) -> "Text":
    """Return a table that fits a console; a word in `styles` has its style."""
    from rich.text import Text

    numbers = range(len(headings))
    lines = text_table(
        [dict(enumerate(row)) for row in rows],
        numbers,
        headings=headings,
        indent=indent,
        width=console.width,
        right=[number for number in numbers if headings[number] in right],
    )
    text = Text("\n".join(lines), no_wrap=True)
    for word, style in (styles or {}).items():
        text.highlight_words([word], style)
    return text


def cut_middle(text: str, width: int) -> str:
    """Return a text of at most `width` characters, without its middle if it is longer."""
    if len(text) <= width:
        return text
    kept = max(width - len(_CUT), 0)
    return (text[: (kept + 1) // 2] + _CUT + text[len(text) - kept // 2 :])[:width]


def cell_text(value: Any) -> str:
    """Return a value as one line that cannot steer a terminal."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return printable(value.hex() if isinstance(value, bytes) else str(value))


def _lines(
    titles: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool], indent: str
) -> list[str]:
    def line(values: Sequence[str]) -> str:
        cut = [cut_middle(value, width) for value, width in zip(values, widths, strict=True)]
        padded = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(cut, widths, right, strict=True)]
        return (indent + _GAP.join(padded)).rstrip()

    return [line(titles), indent + _GAP.join("-" * width for width in widths), *map(line, zip(*cells, strict=True))]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _distinct_width(texts: Sequence[str]) -> int:
    """Return how short texts may be cut so that those that differ still do."""
    different = set(texts)
    longest = max(map(len, different), default=0)
    for width in range(min(_SHORTEST, longest), longest):
        if len({cut_middle(text, width) for text in different}) == len(different):
            return width
    return longest


def _is_numeric(values: Sequence[Any]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known)


def folded(line: str, width: int | None) -> list[str]:
    """Return a line of words as lines of at most `width` (None: any), those behind the first set in; a command in it stays whole."""
    if width is None or len(line) <= width:
        return [line]
    said, command, rest = line.partition("kvcanary")
    if command:
        inside = " " * (len(line) - len(line.lstrip()) + 4)
        return [*folded(said.rstrip(), width), inside + command + rest] if len(said.strip()) > len("report") else [line]
    inside = " " * min(len(line) - len(line.lstrip()) + 4, width // 3)
    return textwrap.wrap(line, width, subsequent_indent=inside, break_long_words=False, break_on_hyphens=False)
