"""Errors that a user may meet, each message with what was expected, what came, and what to do; and what logs call others."""

from typing import Final

MAX_ERROR_TEXT: Final = 2000  # characters: some exceptions have a whole tensor in their text


class TraceError(Exception):
    """A trace, or a request about one, that cannot be served; `str()` is the whole message for the user."""


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
