"""`kvcanary-replay`: judge recorded traces."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from ...recorder.cli.program import GivenPath, JsonErrors, console_for
from .options import check_names, device_names, executor_for, list_checks, model_folder, oracle_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from ..report.summary import Summary
    from ..run.settings import Progress
    from ..workers.group_replay import GroupResult, GroupTask
    from ..workers.jobs import Job, ReplayPlan


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
  kvcanary-replay --jobs 4 traces/*.arrow
      four at once, each in a process of its own; one recording in segments is shared out among all four
  kvcanary-replay --devices cuda:0,cuda:1 traces/*.arrow
      on two GPUs of this machine
  kvcanary-replay --model ~/models/Qwen3-8B trace.arrow
      also compares K and V of the first layer with those that the checkpoint gives
  kvcanary-replay /traces/
      all that a server recorded: segments joined, a verdict for each rank and one over all
"""


class AddPage(Protocol):
    """Makes the page of a replay, once its verdict is on the screen; returns what to say to the user."""

    def __call__(self, summary: Summary, /, *, wanted: bool) -> str:
        """Make the page if it is wanted."""


def make_replay_command(
    *, finish: Callable[[Summary], str] | None = None, add_page: AddPage | None = None
) -> click.Command:
    """Return the command; what later layers do with each replay is given to it, and returns what to say to the user.

    `finish` is called with each summary once its verdict stands, and may change it and its report; it is a function of a
    module, so that a worker finds it. `add_page` takes its time, and comes after the verdict was shown.
    """
    run = update_wrapper(partial(_replay, finish=finish, add_page=add_page), _replay)
    return click.command("replay", cls=JsonErrors, epilog=_EPILOG, context_settings={"show_default": True})(run)


@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=GivenPath(url=True))
@click.option(
    "--report",
    type=GivenPath(file_okay=False),
    help="Report directory. [default: TRACE.report beside the trace, trace.report for trace.arrow and its segments; "
    "with several recordings, one folder each inside DIR]",
)
@click.option("--no-report", is_flag=True, help="Write no report; print the verdict only.")
@click.option(
    "--kv-hash",
    type=click.Choice(["auto", "none", "partial", "all"]),
    default="auto",
    help="Which KV bytes of a slot are hashed: all that were captured (auto), none, its first 16 (partial, as the "
    "published canary), or every byte of the slot, refused where the trace holds fewer (all).",
)
@click.option(
    "--checks",
    default="all",
    metavar="NAMES",
    callback=lambda _context, _parameter, value: check_names(value),
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
    help="cpu: compiled loops. reference: the same loops uncompiled, some hundred times slower; the definition.",
)
@click.option(
    "--executor",
    type=click.Choice(["interval", "stepwise"]),
    default="interval",
    help="interval: look at a prefix position again only after something changed that it depends on. stepwise: look at "
    "every one in every forward, as the canary does; finds the same, many times slower on long contexts.",
)
@click.option(
    "--device",
    default="cpu",
    metavar="cpu|cuda[:N]",
    callback=lambda _context, parameter, value: device_names(value, parameter)[0],
    help="Where the pools are rebuilt and stepped: the CPU, or a GPU, which needs PyTorch with CUDA and steps forwards "
    "(--executor stepwise).",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Replay with N processes: several recordings at once, and the segments of one side by side where there are fewer "
    "recordings than N. [default: on the CPU as many as pay, up to the cores there are]",
)
@click.option(
    "--devices",
    metavar="NAMES",
    callback=lambda _context, _parameter, value: device_names(value),
    help="Where several recordings are replayed, joined by commas: cuda:0,cuda:1 gives each GPU a process of its own, "
    "which takes one recording after another; cpu may stand among them.",
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
    "--all-rows",
    is_flag=True,
    help="Keep every violation. [default: the first 1,000 rows of a slot for each launch, 10 million in all; all are counted]",
)
@click.option(
    "--oracle",
    default="",
    metavar="MODULE:NAME",
    callback=lambda _context, _parameter, value: oracle_name(value),
    help="Your own oracle, which sampled: imported and compared with. The hash oracle needs no naming.",
)
@click.option(
    "--model",
    default="",
    metavar="FOLDER",
    callback=lambda _context, _parameter, value: model_folder(value),
    help="The checkpoint that ran (Hugging Face, safetensors): what the first layer wrote is compared with what it gives. "
    "Needs kvcanary[model].",
)
@click.option(
    "--fail-fast",
    is_flag=True,
    help="Stop after the first forward, or event between forwards, with a violation or finding.",
)
def _replay(
    traces: tuple[Path, ...],
    report: Path | None,
    no_report: bool,
    jobs: int | None,
    devices: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    page: bool | None,
    *,
    finish: Callable[[Summary], str] | None,
    add_page: AddPage | None,
    **how: Any,
) -> None:
    """Replay recorded traces and say which KV slots went wrong, since when, and for whom.

    A TRACE is a file, or a folder with the traces of a server in it: segments of one recording are joined, prefill and
    decode sides replayed together, tensor-parallel ranks compared with one another.

    Rebuilds the block tables and KV pools from each TRACE, runs the canary's plan, write and verify kernels over
    every recorded forward, and writes every violation to a report directory.
    """
    from rich.console import Console

    from ...recorder.cli.program import loaded
    from ...recorder.trace.recordings import group_recordings
    from ..run.settings import ReplaySettings
    from ..workers.group_replay import GroupTask
    from ..workers.jobs import Job, plan_jobs
    from ..workers.server import start_server
    from .printer import ResultPrinter
    from .report_places import report_folders, reports_held

    if how["model"]:
        jobs = jobs or 1  # each process would load the model
    if report and no_report:
        raise click.UsageError("--report and --no-report exclude one another")
    if devices and how["device"] != "cpu":
        raise click.UsageError("--device and --devices exclude one another")
    how["executor"] = executor_for(next((name for name in devices if name != "cpu"), how["device"]), how["executor"])
    settings = ReplaySettings(**how)
    if (jobs or len(devices)) > 1:
        start_server(finish)  # loads while the traces are looked through
    out, err = console_for(sys.stdout), Console(stderr=True, emoji=False, highlight=False)
    folders = any(trace.is_dir() for trace in traces)
    wanted = not (quiet or as_json) if page is None else page
    shown = partial(add_page, wanted=wanted) if add_page is not None else None
    printer = ResultPrinter(out, err, as_json=as_json, quiet=quiet, folders=folders, shown=shown)

    paths, unread = _expand(traces)
    for name, message in unread:
        printer.fail(name, message, (name,))
    recordings, notes = group_recordings(paths)
    for note in notes:
        printer.say(note, "dim")
    reports = report_folders(recordings, report, no_report)
    plan = plan_jobs([Job(recording=r, report=target) for r, target in zip(recordings, reports, strict=True)])
    task = GroupTask(settings=settings, explicit=report is not None, all_there=folders, finish=finish)
    loaded()
    left = sum(map(len, plan.groups))
    interrupted = False
    with reports_held([job for group in plan.groups for job in group], settings, explicit=report is not None):
        for group, result in _results(plan, task, jobs, devices, err, quiet=as_json or quiet):
            printer.take(group, result)
            left -= len(group)
            interrupted |= result.interrupted
    if interrupted and left:
        printer.say(f"interrupted: {left} more not replayed")
    sys.exit(printer.end(plan, several=len(traces) > 1))


replay_command = make_replay_command()


def _results(
    plan: ReplayPlan, task: GroupTask, jobs: int | None, devices: tuple[str, ...], err: Console, *, quiet: bool
) -> Iterator[tuple[list[Job], GroupResult]]:
    """Yield what comes of each group, here or in worker processes, with progress on a terminal."""
    from ..workers.group_replay import joined_results
    from ..workers.jobs import shared_out
    from ..workers.pool import replay_in_workers
    from .printer import notices_shown, progress_shown

    plan, workers = shared_out(plan, task.settings, jobs=jobs or len(devices) or None)
    shown = err.is_terminal and not quiet
    update: Callable[[Progress], None] | None = None

    def on_progress(progress: Progress) -> None:
        if update is not None:
            update(progress)

    with nullcontext() if quiet else notices_shown(err):
        if workers < 2:
            if devices:
                task = replace(task, settings=replace(task.settings, device=devices[0]))
            title, results = "replay", _results_here(plan, task, on_progress)
        else:
            found = replay_in_workers(plan, task, on_progress, jobs=workers, devices=devices)
            title, results = f"replay, {workers} at once", joined_results(found, task)
        while True:
            # Between two results the bar makes way for what is printed.
            with progress_shown(err, title) if shown else nullcontext() as update:
                result = next(results, None)
            if result is None:
                return
            yield result


def _results_here(
    plan: ReplayPlan, task: GroupTask, on_progress: Callable[[Progress], None]
) -> Iterator[tuple[list[Job], GroupResult]]:
    from ...kernels.dispatch import prepare
    from ...kernels.replay_pass.state import STATE_LOOPS
    from ..workers.group_replay import replay_group

    if plan.groups:
        prepare(*STATE_LOOPS, backend=task.settings.backend)
    for number, group in enumerate(plan.groups):
        if number:
            gc.collect()  # the last one's pools hang in a circle, and two do not fit everywhere
        result = replay_group(group, task, on_progress)
        yield group, result
        if result.interrupted:
            return


def _expand(traces: tuple[Path, ...]) -> tuple[list[Path], list[tuple[str, str]]]:
    """Return the files given and those of the folders given, and what cannot be read of them."""
    from ...recorder.errors import TraceError
    from ...recorder.trace.recordings import traces_in

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
