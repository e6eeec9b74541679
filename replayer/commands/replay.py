"""`kvcanary-replay`: judge recorded traces."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from ..settings import Progress, ReplaySettings
    from ..summary import Summary

_EPILOG = """\b
Exit codes, fit for git bisect run and CI:
    0  clean
    1  violations or findings
    2  wrong usage, or a trace that cannot be read
  125  inconclusive: torn, lossy, stopped early, or nothing to judge

\b
Examples:
  kvcanary-replay trace.arrow
  kvcanary-replay --json trace.arrow | jq .first_violation
  kvcanary-replay --fail-fast --quiet golden/*.arrow
  kvcanary-replay --kv-hash none --report /tmp/report trace.arrow
  kvcanary-replay --checks -slot_leaked,-seq_len_backwards trace.arrow
      all checks but two
  kvcanary-replay prefill.arrow decode.arrow
      two engines of one deployment: what the one sent is compared with what the other received
"""


@click.command("replay", epilog=_EPILOG)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path(path_type=Path))
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    help="Report directory. [default: TRACE.report beside the trace, trace.report for trace.arrow; with several "
    "traces, one folder each inside DIR]",
)
@click.option("--no-report", is_flag=True, help="Write no report; print the verdict only.")
@click.option(
    "--kv-hash",
    type=click.Choice(["auto", "none", "partial", "all"]),
    default="auto",
    show_default=True,
    help="Which KV bytes of a slot are hashed: none, its first 16 (partial), or all that were captured. "
    "auto: partial where the trace holds bytes.",
)
@click.option(
    "--checks",
    default="all",
    show_default=True,
    metavar="NAMES",
    help="History checks beside the canary's: all, none, or names joined by commas; -name leaves one out of all.",
)
@click.option(
    "--list-checks",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, value: _list_checks(context) if value else None,
    help="List the history checks, and exit.",
)
@click.option(
    "--backend",
    type=click.Choice(["cpu", "reference"]),
    default="cpu",
    show_default=True,
    help="cpu: compiled loops. reference: the same loops uncompiled, some hundred times slower; the definition.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu"]),
    default="cpu",
    show_default=True,
    expose_value=False,
    help="Where the pools are rebuilt. This version replays on the CPU.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON: one object, or a list for several.")
@click.option("--quiet", "-q", is_flag=True, help="Print one line a trace.")
@click.option(
    "--max-violations",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop after the forward that reaches N violations.",
)
@click.option(
    "--fail-fast",
    is_flag=True,
    help="Stop after the first forward, or event between forwards, with a violation or finding.",
)
def replay_command(
    traces: tuple[Path, ...],
    report: Path | None,
    no_report: bool,
    kv_hash: str,
    checks: str,
    backend: str,
    as_json: bool,
    quiet: bool,
    max_violations: int | None,
    fail_fast: bool,
) -> None:
    """Replay recorded traces and say which KV slots went wrong, since when, and for whom.

    Rebuilds the block tables and KV pools from each TRACE, runs the canary's plan, write and verify kernels over
    every recorded forward, and writes every violation to a report directory.
    """
    from rich.console import Console

    from ...recorder.commands.text import printable
    from ...recorder.errors import TraceError
    from ..settings import ReplaySettings
    from ..verdict import EXIT_UNREADABLE, combined_exit_code

    if report and no_report:
        raise click.UsageError("--report and --no-report exclude one another")
    settings = ReplaySettings(
        kv_hash=kv_hash,
        checks=_check_names(checks),
        backend=backend,
        max_violations=max_violations,
        fail_fast=fail_fast,
    )
    # A pipe has no width of its own; lines must not be cut at 80 columns there.
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    err = Console(stderr=True, highlight=False)
    codes: list[int] = []
    summaries: list[dict[str, object]] = []
    targets = _report_folders(traces, report, no_report)
    for group in _together(list(zip(traces, targets, strict=True))):
        names = ", ".join(str(trace) for trace, _ in group)
        try:
            done = _replay(group, settings, explicit=report is not None, err=err, quiet=as_json or quiet)
        except TraceError as error:
            codes.append(EXIT_UNREADABLE)
            summaries.append({"trace": names, "error": str(error), "exit_code": EXIT_UNREADABLE})
            message = str(error) if any(str(trace) in str(error) for trace, _ in group) else f"{names}: {error}"
            err.print(printable(message), style="red", markup=False, soft_wrap=True)
            continue
        for summary in done:
            codes.append(summary.verdict.exit_code)
            summaries.append(summary.to_json())
            if quiet and not as_json:
                click.echo(_one_line(summary))
            elif not as_json:
                from ..screen import show

                if len(codes) > 1:
                    out.rule(style="dim")
                show(out, summary)
        if any(summary.stopped.startswith("interrupted") for summary in done):
            break
    if as_json:
        import json

        click.echo(json.dumps(summaries if len(traces) > 1 else summaries[0], indent=2))
    sys.exit(combined_exit_code(codes))


def _list_checks(context: click.Context) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..checks import CHECK_NAMES
    from ..findings import FINDING_KINDS

    table = Table.grid(padding=(0, 2))
    for name in CHECK_NAMES:
        table.add_row(name, FINDING_KINDS[name])
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)
    context.exit()


def _check_names(text: str) -> tuple[str, ...]:
    from ..checks import CHECK_NAMES

    if text in ("all", "none"):
        return CHECK_NAMES if text == "all" else ()
    asked = [name.strip() for name in text.split(",")]
    unknown = [name for name in asked if name.removeprefix("-") not in CHECK_NAMES]
    if unknown:
        raise click.UsageError(
            f"--checks: no check {unknown[0].removeprefix('-')!r}; there are {', '.join(CHECK_NAMES)}, all, none"
        )
    left_out = {name[1:] for name in asked if name.startswith("-")}
    chosen = {name for name in asked if not name.startswith("-")} or set(CHECK_NAMES)
    return tuple(name for name in CHECK_NAMES if name in chosen - left_out)


def _report_folders(traces: tuple[Path, ...], report: Path | None, no_report: bool) -> list[Path | None]:
    """Return each trace's report directory; refuse two traces that would share one."""
    if no_report:
        return [None] * len(traces)
    if report and len(traces) == 1:
        return [report]
    folders = [(report or trace.parent) / f"{trace.stem}.report" for trace in traces]
    shared = next((folder for folder in folders if folders.count(folder) > 1), None)
    if shared:
        raise click.UsageError(f"two traces would write to {shared}; replay them apart, or name another --report each")
    return list(folders)


def _together(jobs: list[tuple[Path, Path | None]]) -> list[list[tuple[Path, Path | None]]]:
    """Return what is replayed together: prefill and decode traces as one, at the place of the first, others alone."""
    from ...recorder.errors import TraceError
    from ...recorder.reader import TraceReader

    pair: list[tuple[Path, Path | None]] = []
    groups = []
    for job in jobs:
        try:
            with TraceReader(job[0]) as reader:
                role = reader.header.role
        except TraceError:
            role = ""  # said when its turn comes
        if not role:
            groups.append([job])
            continue
        if not pair:
            groups.append(pair)
        pair.append(job)
    return groups


def _replay(
    jobs: list[tuple[Path, Path | None]], settings: ReplaySettings, *, explicit: bool, err: Console, quiet: bool
) -> list[Summary]:
    from ...recorder.errors import TraceError
    from ...recorder.reader import TraceReader
    from ..replay import replay_joined
    from ..settings import resolve_kv_hash

    folders = []
    for trace, target in jobs:
        with TraceReader(trace) as reader:  # a trace that cannot be judged leaves no empty report behind
            resolve_kv_hash(settings.kv_hash, reader.header)
        folders.append(_make_folder(trace, target, explicit=explicit, err=err))
    traces = [trace for trace, _ in jobs]
    try:
        if quiet or not err.is_terminal:
            return replay_joined(traces, settings=settings, reports=folders)
        with _ProgressBar(err) as bar:
            return replay_joined(traces, settings=settings, reports=folders, on_progress=bar.update)
    except OSError as error:
        raise TraceError(
            f"{', '.join(map(str, traces))}: the report in {', '.join(map(str, folders))} cannot be written "
            f"({error.strerror or error}); make room, name another folder with --report DIR, or use --no-report"
        ) from None


def _make_folder(trace: Path, target: Path | None, *, explicit: bool, err: Console) -> Path | None:
    """Make the report directory; a default one that cannot be made beside the trace goes to the working directory."""
    from ...recorder.errors import TraceError

    if target is None:
        return None
    candidates = [target] if explicit else [target, Path.cwd() / target.name]
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            failure = error
            continue
        if folder != target:
            err.print(f"{target} cannot be written; the report goes to {folder}", markup=False, soft_wrap=True)
        return folder
    raise TraceError(
        f"{trace}: the report directory {candidates[-1]} cannot be written ({failure.strerror}); name another with "
        "--report DIR, or use --no-report"
    )


class _ProgressBar:
    """A progress bar on the terminal: forwards, rate, time left."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("replay"),
            BarColumn(),
            TextColumn("{task.fields[forwards]:,} forwards"),
            TextColumn("{task.fields[rate]:,.0f}/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[red]{task.fields[violations]}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("replay", total=None, forwards=0, rate=0.0, violations="")

    def update(self, progress: Progress) -> None:
        elapsed = self._progress.tasks[0].elapsed or 0.0
        self._progress.update(
            self._task,
            total=progress.bytes_total,
            completed=progress.bytes_read,
            forwards=progress.forwards,
            rate=progress.forwards / elapsed if elapsed else 0.0,
            violations=f"{progress.violations:,} violations" if progress.violations else "",
        )

    def __enter__(self) -> _ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _one_line(summary: Summary) -> str:
    from ...recorder.commands.text import printable

    line = f"{summary.verdict.value.upper():12s} {summary.trace}   {summary.forwards:,} forwards"
    first, finding = summary.first_violation, summary.first_finding
    if first:
        whose = f"request {first['request']}, " if first["request"] else ""
        line += (
            f"   {summary.violations:,} violations, first in forward {first['forward']:,}: {whose}slot "
            f"{first['slot']:,}, {'+'.join(first['reasons'])}"
        )
    if finding:
        line += f"   {summary.findings:,} findings, first in forward {finding['forward']:,}: {finding['kind']}"
    if summary.doubts:
        line += f"   ({'; '.join(summary.doubts)})"
    return printable(line)
