"""How far a replay has come, on a terminal."""

from typing import Self

import rich.progress
from rich.console import Console

from ..run.settings import Progress


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
