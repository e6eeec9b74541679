"""Errors of the analysis commands; each message says what was expected, what came, and what to do."""


class AnalysisError(Exception):
    """A request that cannot be served; `str()` is the whole message for the user."""


class SqlError(AnalysisError):
    """A statement that DuckDB refused; `str()` is DuckDB's own message."""


class NoPlotLibraryError(AnalysisError):
    """vl-convert is not installed."""
