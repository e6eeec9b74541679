"""SQL over traces and reports: the store, its views and macros, and the questions of triage.

`open_report("trace.report")` and `open_traces("trace.arrow")` give a `SqlSession`; see docs/reference/sql.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .finishing import finish
    from .store.session import SqlSession, open_report, open_traces
    from .store.store import build_store

__all__ = ["SqlSession", "build_store", "finish", "open_report", "open_traces"]


_MODULES = {"finish": "finishing", "build_store": "store.store"}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the commands' --help must not wait for DuckDB.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES.get(name, 'store.session')}", __package__), name)
