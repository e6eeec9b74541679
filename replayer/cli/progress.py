"""What a terminal shows while a replay works: how far it has come, and above that what the library notes."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Self

import rich.progress
from rich.console import Console
from rich.markup import escape

from ..run.settings import Progress

_log = logging.getLogger("kvcanary")


class ProgressBar:
    """A progress bar on the terminal: `title`, forwards, rate, time left."""

    def __init__(self, console: Console, title: str) -> None:
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn(title),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[forwards]:,} forwards"),
            rich.progress.TextColumn("{task.fields[rate]:,.0f}/s"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("left"),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("[red]{task.fields[violations]}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("replay", total=None, forwards=0, rate=0.0, violations="")

    def update(self, progress: Progress) -> None:
        """Show how far the replay has come."""
        elapsed = self._progress.tasks[0].elapsed or 0.0
        self._progress.update(
            self._task,
            total=progress.bytes_total,
            completed=progress.bytes_read,
            forwards=progress.forwards,
            rate=progress.forwards / elapsed if elapsed else 0.0,
            violations=f"{progress.violations:,} violations" if progress.violations else "",
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


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
