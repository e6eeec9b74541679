"""`kvcanary-replay`: judge recorded traces."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .check_names import check_names, list_checks

if TYPE_CHECKING:
    from rich.console import Console

    from ...recorder.recordings import Recording
    from ..jobs import Job, Plan
    from ..settings import ReplaySettings
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
  kvcanary-replay /traces/
      all that a server recorded: segments joined, a verdict for each rank and one over all
"""


@click.command("replay", epilog=_EPILOG)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path(path_type=Path))
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    help="Report directory. [default: TRACE.report beside the trace, trace.report for trace.arrow and its segments; "
    "with several recordings, one folder each inside DIR]",
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
    callback=lambda context, _, value: list_checks(context) if value else None,
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
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the summary as JSON: one object, a list for several, for a folder an object with all of them.",
)
@click.option(
    "--page/--no-page",
    default=None,
    expose_value=False,
    callback=lambda context, _, value: context.meta.update({"kvcanary.page": value}),
    help="Write report.html too where something was found. [default: unless --json or --quiet]",
)
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

    A TRACE is a file, or a folder with the traces of a server in it: segments of one recording are joined, prefill and
    decode sides replayed together, tensor-parallel ranks compared with one another.

    Rebuilds the block tables and KV pools from each TRACE, runs the canary's plan, write and verify kernels over
    every recorded forward, and writes every violation to a report directory.
    """
    from rich.console import Console

    from ...recorder.commands.text import printable
    from ...recorder.errors import TraceError
    from ...recorder.recordings import group_recordings
    from ..jobs import Job, plan_jobs
    from ..screen import one_line, show
    from ..settings import ReplaySettings
    from ..verdict import EXIT_UNREADABLE, combined_exit_code

    if report and no_report:
        raise click.UsageError("--report and --no-report exclude one another")
    settings = ReplaySettings(
        kv_hash=kv_hash,
        checks=check_names(checks),
        backend=backend,
        max_violations=max_violations,
        fail_fast=fail_fast,
    )
    # A pipe has no width of its own; lines must not be cut at 80 columns there.
    out = Console(emoji=False, highlight=False, width=None if sys.stdout.isatty() else 160)
    err = Console(stderr=True, emoji=False, highlight=False)
    folders = any(trace.is_dir() for trace in traces)
    codes: list[int] = []
    summaries: list[dict[str, object]] = []
    finished: list[Summary] = []
    failed: list[str] = []

    def fail(name: str, error: str, among: tuple[str, ...]) -> None:
        codes.append(EXIT_UNREADABLE)
        summaries.append({"trace": name, "error": error, "exit_code": EXIT_UNREADABLE})
        failed.append(error if any(one in error for one in among) else f"{name}: {error}")
        err.print(printable(failed[-1]), style="red", markup=False, soft_wrap=True)

    paths, unread = _expand(traces)
    for name, message in unread:
        fail(name, message, (name,))
    recordings, notes = group_recordings(paths)
    for note in notes:
        err.print(printable(note), style="dim", markup=False, soft_wrap=True)
    reports = _report_folders(recordings, report, no_report)
    plan = plan_jobs([Job(recording=r, report=target) for r, target in zip(recordings, reports, strict=True)])
    for number, group in enumerate(plan.groups):
        try:
            done = _replay(
                group, settings, explicit=report is not None, err=err, quiet=as_json or quiet, all_there=folders
            )
        except TraceError as error:
            fail(
                ", ".join(job.recording.name for job in group),
                str(error),
                tuple(str(path) for job in group for path in job.recording.paths),
            )
            continue
        for summary in done:
            _finish(summary, err)
            codes.append(summary.verdict.exit_code)
            summaries.append(summary.to_json())
            finished.append(summary)
            if quiet and not as_json:
                click.echo(one_line(summary))
            elif not as_json and not (folders and summary.verdict.exit_code == 0):
                if len(codes) > 1:
                    out.rule(style="dim")
                show(out, summary)
        if any(summary.stopped.startswith("interrupted") for summary in done):
            left = sum(map(len, plan.groups[number + 1 :]))
            if left:
                err.print(f"interrupted: {left} more not replayed", markup=False, soft_wrap=True)
            break
    if as_json:
        _print_json(summaries, codes, plan, several=len(traces) > 1, folders=folders)
    elif folders and not quiet:
        from ..folder_screen import show_table

        if len(finished) > 1 or failed or all(summary.verdict.exit_code == 0 for summary in finished):
            if any(summary.verdict.exit_code for summary in finished):
                out.rule(style="dim")
            show_table(out, finished, failed, codes)
    sys.exit(combined_exit_code(codes))


def _finish(summary: Summary, err: Console) -> None:
    """Let those who come after a replay have it: `cli` names them, since they stand above this layer."""
    from ...recorder.commands.text import printable

    for finish in click.get_current_context().obj or ():
        note = finish(summary)
        if note:
            err.print(printable(note), style="yellow", markup=False, soft_wrap=True)


def _print_json(
    summaries: list[dict[str, object]], codes: list[int], plan: Plan, *, several: bool, folders: bool
) -> None:
    import json

    from ..folder_screen import overall, ranks_json

    found: object = summaries if several else summaries[0] if summaries else {}
    if folders:
        word, code = overall(codes)
        found = {"verdict": word, "exit_code": code, "recordings": summaries, "ranks": ranks_json(plan.ranks)}
    click.echo(json.dumps(found, indent=2))


def _expand(traces: tuple[Path, ...]) -> tuple[list[Path], list[tuple[str, str]]]:
    """Return the files given and those of the folders given, and what cannot be read of them."""
    from ...recorder.errors import TraceError
    from ...recorder.recordings import traces_in

    paths: list[Path] = []
    unread: list[tuple[str, str]] = []
    for trace in traces:
        if not trace.is_dir():
            paths.append(trace)
            continue
        try:
            paths += traces_in(trace)
        except TraceError as error:
            unread.append((str(trace), str(error)))
    return paths, unread


def _report_folders(recordings: list[Recording], report: Path | None, no_report: bool) -> list[Path | None]:
    """Return each recording's report directory; refuse two that would share one."""
    if no_report:
        return [None] * len(recordings)
    if report and len(recordings) == 1:
        return [report]
    named = [Path(recording.name) for recording in recordings]
    folders = [(report or trace.parent) / f"{trace.stem}.report" for trace in named]
    shared = next((folder for folder in folders if folders.count(folder) > 1), None)
    if shared:
        raise click.UsageError(f"two traces would write to {shared}; replay them apart, or name another --report each")
    return list(folders)


def _replay(
    jobs: list[Job], settings: ReplaySettings, *, explicit: bool, err: Console, quiet: bool, all_there: bool
) -> list[Summary]:
    from ...recorder.errors import TraceError
    from ..progress_bar import ProgressBar
    from ..replay import replay_joined
    from ..segment_stream import SegmentStream
    from ..settings import resolve_kv_hash

    folders = []
    for job in jobs:
        # A trace that cannot be judged leaves no empty report behind.
        resolve_kv_hash(settings.kv_hash, SegmentStream(job.recording.paths).header)
        folders.append(_make_folder(Path(job.recording.name), job.report, explicit=explicit, err=err))
    traces = [job.recording.paths for job in jobs]
    schedules = [job.schedule for job in jobs]
    try:
        if quiet or not err.is_terminal:
            return replay_joined(traces, settings=settings, reports=folders, schedules=schedules, all_there=all_there)
        with ProgressBar(err) as bar:
            return replay_joined(
                traces,
                settings=settings,
                reports=folders,
                on_progress=bar.update,
                schedules=schedules,
                all_there=all_there,
            )
    except OSError as error:
        raise TraceError(
            f"{', '.join(job.recording.name for job in jobs)}: the report in {', '.join(map(str, folders))} cannot be "
            f"written ({error.strerror or error}); make room, name another folder with --report DIR, or use --no-report"
        ) from None


def _make_folder(trace: Path, target: Path | None, *, explicit: bool, err: Console) -> Path | None:
    """Make the report directory; a default one that cannot be made beside the trace goes to the working directory."""
    from ...recorder.errors import TraceError

    if target is None:
        return None
    candidates = [target] if explicit else [target, Path.cwd() / target.name]
    for folder in candidates:
        try:
            # Its files hold tokens and names of requests, as the trace does.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
