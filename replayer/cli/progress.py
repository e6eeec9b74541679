"""What a terminal shows while a replay works: how far it has come, and above that what the library notes."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import rich.progress
from rich.console import Console
from rich.markup import escape

from ..run.settings import Progress

_log = logging.getLogger("kvcanary")


@contextlib.contextmanager
def progress_shown(console: Console, title: str) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar on the terminal: `title`, forwards, rate, time left; gives what is told how far the replay is."""
    text = rich.progress.TextColumn
    with rich.progress.Progress(
        text(title),
        rich.progress.BarColumn(),
        text("{task.fields[forwards]:,} forwards"),
        text("{task.fields[rate]:,.0f}/s"),
        rich.progress.TimeElapsedColumn(),
        text("left"),
        rich.progress.TimeRemainingColumn(),
        text("[red]{task.fields[violations]}"),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("replay", total=None, forwards=0, rate=0.0, violations="")

        def show(progress: Progress) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(
                task,
                total=progress.bytes_total,
                completed=progress.bytes_read,
                forwards=progress.forwards,
                rate=progress.forwards / elapsed if elapsed else 0.0,
                violations=f"{progress.violations:,} violations" if progress.violations else "",
            )

        yield show


@contextlib.contextmanager
def notices_shown(console: Console) -> Iterator[None]:
    """Print what is noted inside on `console`."""
    handler, before = logging.Handler(logging.INFO), _log.level
    handler.emit = lambda record: console.print(f"[dim]{escape(record.getMessage())}[/dim]")  # type: ignore[method-assign]
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.setLevel(before)
        _log.removeHandler(handler)
