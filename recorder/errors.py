"""What is said to people: errors, each with what was expected, what came, and what to do; and text that may hold anything,
since names come from paths and clients, on its way to a terminal, a log, or into JSON.
"""

import json
from typing import Any, Final

MAX_ERROR_TEXT: Final = 2000  # characters: some exceptions have a whole tensor in their text


class TraceError(Exception):
    """A trace, or a request about one, that cannot be served; `str()` is the whole message for the user."""


class NoTracesError(TraceError):
    """A folder holds no trace."""


class TraceExistsError(TraceError):
    """There is a trace of that name, which is not to be replaced."""


class UnreadableTraceError(TraceError):
    """The file cannot be read as a trace at all: foreign, empty, of a newer format, or without a usable header."""


def error_text(error: BaseException) -> str:
    """Return an exception's type and what it says; the type alone if it cannot say it, as of a device that failed."""
    kind = type(error).__name__
    try:
        said = str(error)
    except Exception:  # noqa: BLE001  # asking an exception for its text may raise; the first one matters more
        return kind
    return f"{kind}: {said}"[:MAX_ERROR_TEXT]


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, its type if it says nothing."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def printable(text: str) -> str:
    """Return `text` with whatever could steer a terminal, or could not be encoded, as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text
    )


def printable_message(text: str) -> str:
    """Return a message of several lines, such as DuckDB's, as `printable`; lines behind the first are set in, and so
    never look like lines of a command's own.
    """
    return "\n  ".join(printable(line) for line in text.split("\n"))


def json_text(value: Any, **options: Any) -> str:
    """Return a value as JSON in ASCII; what no UTF-8 text may hold, half a surrogate pair, becomes a question mark."""
    return json.dumps(whole_text(value) if "\\ud" in json.dumps(value, **options) else value, **options)


def whole_text(value: Any) -> Any:
    """Return parsed JSON, or what can be made JSON of, with question marks for halves of surrogate pairs."""
    return json.loads(json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace"))
