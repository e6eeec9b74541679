"""What the library notes while a command works, shown to the user: a line each on stderr, above a progress bar."""

import contextlib
import logging
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

_log = logging.getLogger("kvcanary")


class _Shown(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(f"[dim]{escape(record.getMessage())}[/dim]")


@contextlib.contextmanager
def notices_shown(console: Console) -> Iterator[None]:
    """Print what is noted inside on `console`."""
    handler, before = _Shown(console), _log.level
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.setLevel(before)
        _log.removeHandler(handler)
