"""Errors that a user may meet; each message says what was expected, what came, and what to do."""


class TraceError(Exception):
    """A trace, or a request about one, that cannot be served; `str()` is the whole message for the user."""


class TraceExistsError(TraceError):
    """There is a trace of that name, which is not to be replaced."""


class UnreadableTraceError(TraceError):
    """The file cannot be read as a trace at all: foreign, empty, of a newer format, or without a usable header."""
