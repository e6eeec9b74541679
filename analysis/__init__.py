"""SQL over traces and reports: the store, its views and macros, and the questions of triage.

`open_report("trace.report")` and `open_traces("trace.arrow")` give a `Session`; see docs/reference/sql.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .store.session import Session, open_report, open_traces
    from .store.store import build_store

__all__ = ["Session", "build_store", "open_report", "open_traces"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the commands' --help must not wait for DuckDB.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .store import session, store

    return getattr(store if name == "build_store" else session, name)
