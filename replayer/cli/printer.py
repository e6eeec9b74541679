"""What is printed while a replay works, of each recording and of all together: for a person, or for a script."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click
import rich.progress
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ...recorder.cli.program import error_facts
from ...recorder.errors import printable
from ...recorder.text_tables import show_columns
from ..report.summary import EXIT_UNREADABLE, Verdict, combined_exit_code
from ..run.coverage import RANKS, not_watched
from .screen import VERDICT_STYLES, one_line, segment_names, show, show_next, up_to

if TYPE_CHECKING:
    from ..report.summary import Summary
    from ..run.settings import Progress
    from ..workers.group_replay import GroupResult
    from ..workers.jobs import Job, ReplayPlan

_log = logging.getLogger("kvcanary")


@dataclass(slots=True)
class ResultPrinter:
    """Prints results as they come: on screens, in a line each, or as JSON at the end."""

    _out: Console  # where results go
    _err: Console  # where messages go
    _: KW_ONLY
    as_json: bool
    quiet: bool
    folders: bool  # a folder was named, so that a table of all ends the output
    shown: Callable[[Summary], str] | None  # told each summary on the screen; returns what to say to the user
    _codes: list[int] = field(default_factory=list, init=False)
    _summaries: list[dict[str, object]] = field(default_factory=list, init=False)
    _finished: list[Summary] = field(default_factory=list, init=False)
    _failed: list[str] = field(default_factory=list, init=False)

    def say(self, line: str, style: str = "") -> None:
        """Print a message to standard error."""
        self._err.print(printable(line), style=style or None, markup=False, soft_wrap=not self._err.is_terminal)

    def fail(self, name: str, error: str, among: Sequence[str]) -> None:
        """Take what cannot be judged; `among` are the names of which the error may speak already."""
        self._codes.append(EXIT_UNREADABLE)
        self._summaries.append({"trace": name, **error_facts(error), "exit_code": EXIT_UNREADABLE})
        self._failed.append(error if any(one in error for one in among) else f"{name}: {error}")
        self.say(self._failed[-1], "red")

    def take(self, group: Sequence[Job], result: GroupResult) -> None:
        """Take what came of a group, and show it."""
        for note in result.notes:
            self.say(note, "yellow")
        if result.error:
            names = [job.recording.name for job in group]
            files = [str(path) for job in group for path in job.recording.paths]
            self.fail(", ".join(names), result.error, names + files)
        for summary in result.summaries:
            self._codes.append(summary.verdict.exit_code)
            self._summaries.append(summary.to_json())
            self._finished.append(summary)
            on_screen = not (self.as_json or self.quiet) and not (self.folders and not summary.verdict.exit_code)
            if self.quiet and not self.as_json:
                click.echo(one_line(summary))
            elif on_screen:
                if len(self._codes) > 1:
                    self._out.rule(style="dim")
                show(self._out, summary)
            self._out.file.flush()
            self._finish(summary, on_screen)
            if on_screen:
                show_next(self._out, summary)

    def end(self, plan: ReplayPlan, *, several: bool) -> int:
        """Print what there is to say of all, and return the exit code."""
        code = combined_exit_code(self._codes)
        if self.as_json:
            found: object = self._summaries if several else self._summaries[0] if self._summaries else {}
            if self.folders:
                found = {"verdict": OVERALL[code], "exit_code": code, "recordings": self._summaries}
                found["ranks"] = ranks_json(plan.ranks)
            click.echo(json.dumps(found, indent=2))
        elif self.folders and not self.quiet:
            done = self._finished
            if len(done) > 1 or self._failed or all(summary.verdict.exit_code == 0 for summary in done):
                if any(summary.verdict.exit_code for summary in done):
                    self._out.rule(style="dim")
                show_table(self._out, done, self._failed, self._codes)
        return code

    def _finish(self, summary: Summary, on_screen: bool) -> None:
        if self.shown is None:
            return
        with self._err.status("writing the report") if on_screen else contextlib.nullcontext():
            note = self.shown(summary)
        if note:
            self.say(note, "yellow")


OVERALL: Final = {0: "clean", 1: "corrupt", 2: "unreadable", 125: "inconclusive"}


def show_table(console: Console, done: Sequence[Summary], failed: Sequence[str], codes: Sequence[int]) -> None:
    """Print a line for each recording, what could not be read, and the verdict over all."""
    counted = ("forwards", "violations", "findings")
    rows = [
        (
            *(summary.trace, rank_name(summary), segment_names(summary.segments)),
            *(f"{getattr(summary, name):,}" for name in counted),
            summary.verdict.name,
        )
        for summary in done
    ]
    styles = {verdict.name: style for verdict, style in VERDICT_STYLES.items()}
    show_columns(console, rows, ("recording", "rank", "segments", *counted, "verdict"), right=counted, styles=styles)
    for summary in done:
        if summary.verdict is not Verdict.CLEAN and summary.doubts:
            why = f"clean {up_to(summary)}" if summary.cut else "; ".join(summary.doubts)
            console.print(Text(printable(f"{summary.trace}: {why}"), style="dim"), soft_wrap=not console.is_terminal)
    # What one recording says of the others' ranks is so only where they are not here.
    by_recording = [[row for row in summary.coverage if row.what != RANKS or not ranks_there(done)] for summary in done]
    for text in dict.fromkeys("; ".join(not_watched(rows)) for rows in by_recording):
        console.print(Text(printable(f"not watched  {text}"), style="dim"))
    for line in failed:
        console.print(Text(printable(line), style="red"), soft_wrap=not console.is_terminal)
    word = OVERALL[combined_exit_code(codes)]
    style = VERDICT_STYLES.get(next((v for v in Verdict if v.value == word), Verdict.INCONCLUSIVE), "bold")
    console.print()
    count = "1 recording" if len(codes) == 1 else f"{len(codes)} recordings"
    console.print(Text.assemble((word.upper(), style), f"   over {count}"))


def ranks_there(done: Sequence[Summary]) -> bool:
    """Say whether the recordings are of all ranks of their servers."""
    found: dict[tuple[str, ...], set[tuple[int, int, int]]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    for summary in done:
        header, ranks = summary.header, summary.header.ranks
        server = (header.run_id, header.engine.name, header.model.name, header.role)
        found.setdefault(server, set()).add((ranks.tp_rank, ranks.pp_rank, ranks.dp_rank))
        sizes[server] = max(1, ranks.tp_size) * max(1, ranks.pp_size) * max(1, ranks.dp_size)
    return all(len(found[server]) >= size for server, size in sizes.items())


def rank_name(summary: Summary) -> str:
    """Return where in the parallel layout a recording's process stood, with its role."""
    ranks = summary.header.ranks
    places = {name: (getattr(ranks, f"{name}_rank"), getattr(ranks, f"{name}_size")) for name in ("tp", "pp", "dp")}
    parts = [f"{name} {rank}/{size}" for name, (rank, size) in places.items() if size > 1]
    return " ".join([*([summary.header.role] if summary.header.role else []), *parts])


def ranks_json(groups: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return what was compared across the ranks of each engine, as plain JSON values; of jobs, rank by rank."""

    def compared(job: Any) -> dict[str, Any]:
        found = {"forwards_compared": job.schedule.compared, "forwards_differing": job.schedule.differing}
        return {"recording": job.recording.name, **found, "unrelated": job.schedule.unrelated}

    return [
        {"recording": first.recording.name, "compared": [compared(job) for job in others if job.schedule is not None]}
        for first, *others in groups
    ]


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
