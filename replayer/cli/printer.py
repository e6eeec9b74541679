"""What is printed of each recording that was replayed, and of all together: for a person, or for a script."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console

from ...recorder.errors import printable
from ..run.verdict import EXIT_UNREADABLE, combined_exit_code
from .folder_screen import overall, ranks_json, show_table
from .screen import one_line, show, show_next

if TYPE_CHECKING:
    from ..report.summary import Summary
    from ..workers.group_replay import GroupResult
    from ..workers.jobs import Job, ReplayPlan


class ResultPrinter:
    """Prints results as they come: on screens, in a line each, or as JSON at the end.

    Args:
        out, err: where results and messages go.
        as_json, quiet: how results are printed.
        folders: whether a folder was named, so that a table of all ends the output.
        shown: called with each summary once its verdict is on the screen; returns what to say to the user.
    """

    def __init__(
        self,
        out: Console,
        err: Console,
        *,
        as_json: bool,
        quiet: bool,
        folders: bool,
        shown: Callable[[Summary], str] | None = None,
    ) -> None:
        self._out = out
        self._err = err
        self._as_json = as_json
        self._quiet = quiet
        self._folders = folders
        self._shown = shown
        self._codes: list[int] = []
        self._summaries: list[dict[str, object]] = []
        self._finished: list[Summary] = []
        self._failed: list[str] = []

    def say(self, line: str, style: str = "") -> None:
        """Print a message to standard error."""
        self._err.print(printable(line), style=style or None, markup=False, soft_wrap=True)

    def fail(self, name: str, error: str, among: Sequence[str]) -> None:
        """Take what cannot be judged; `among` are the names of which the error may speak already."""
        self._codes.append(EXIT_UNREADABLE)
        self._summaries.append({"trace": name, "error": error, "exit_code": EXIT_UNREADABLE})
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
            on_screen = not (self._as_json or self._quiet) and not (self._folders and not summary.verdict.exit_code)
            if self._quiet and not self._as_json:
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
        if self._as_json:
            found: object = self._summaries if several else self._summaries[0] if self._summaries else {}
            if self._folders:
                word, code = overall(self._codes)
                found = {"verdict": word, "exit_code": code, "recordings": self._summaries}
                found["ranks"] = ranks_json(plan.ranks)
            click.echo(json.dumps(found, indent=2))
        elif self._folders and not self._quiet:
            done = self._finished
            if len(done) > 1 or self._failed or all(summary.verdict.exit_code == 0 for summary in done):
                if any(summary.verdict.exit_code for summary in done):
                    self._out.rule(style="dim")
                show_table(self._out, done, self._failed, self._codes)
        return combined_exit_code(self._codes)

    def _finish(self, summary: Summary, on_screen: bool) -> None:
        if self._shown is None:
            return
        with self._err.status("writing the report") if on_screen else contextlib.nullcontext():
            note = self._shown(summary)
        if note:
            self.say(note, "yellow")
