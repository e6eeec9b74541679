"""`kvcanary fleet`: all recordings of a fleet."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from contextlib import ExitStack, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

import click

from ...recorder.cli.program import CommandError, GivenPath, console_for
from ...replayer.cli.incident_blocks import count_of
from ...replayer.cli.options import check_names, device_names
from . import errors_end, say, say_error
from .page import fleet_page_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..fleet.committing import Fleet, Row
    from ..fleet.tasks import Task
    from ..fleet.workers import Workers

_MAX_LISTED = 20

_EPILOG = """\b
Examples:
  kvcanary fleet replay /traces -o /fleet
      all recordings in /traces and the folders below it, on all cores of this machine
  kvcanary fleet replay s3://bucket/traces -o s3://bucket/fleet --address auto
      on the Ray cluster that this machine is part of; pip install 'kvcanary[ray]' on each
  kvcanary sql s3://bucket/fleet/table "from kinds_by_version"
  kvcanary fleet page s3://bucket/fleet/table -o fleet.html

Run it again: only what is new or has grown is replayed, and what failed.

\b
Exit codes over all recordings, also those replayed before:
    0  clean
    1  violations or findings
    2  wrong usage, or a recording that cannot be read
  125  inconclusive, or interrupted
docs/guide/fleet.md describes what it writes.
"""


@click.group("fleet", epilog=_EPILOG)
def fleet_command() -> None:
    """Work on the recordings of many servers, here or in an object store."""


fleet_command.add_command(fleet_page_command)


@fleet_command.command(
    "replay",
    epilog=_EPILOG,
    short_help="Replay all that lies below a folder or URL.",
    context_settings={"show_default": True},
)
@click.argument("traces", nargs=-1, required=True, metavar="FOLDER|URL...", type=GivenPath(url=True))
@click.option(
    "-o", "--out", required=True, type=GivenPath(url=True, file_okay=False),
    help="Where results go, a folder or a URL: table/ for kvcanary sql, reports/ of what is not clean, results/.",
)  # fmt: skip
@click.option(
    "--address",
    help="A Ray cluster: auto for the one that this machine is part of, host:port, or local for one of this machine alone. "
    "[default: processes of this machine, without Ray]",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="How many at a time on this machine. [default: its cores]"
)
@click.option(
    "--device", default="cpu", metavar="cpu|cuda",
    callback=lambda _context, parameter, value: device_names(value, parameter)[0],
    help="Where pools are rebuilt and stepped; with --address each task gets a GPU.",
)  # fmt: skip
@click.option(
    "--devices", metavar="NAMES", callback=lambda _context, _parameter, value: device_names(value),
    help="Joined by commas, cuda:0,cuda:1 gives each process of this machine one of them in turn.",
)  # fmt: skip
@click.option(
    "--kv-hash", type=click.Choice(["auto", "none", "partial", "all"]), default="auto",
    help="Which KV bytes are hashed, as for kvcanary-replay.",
)  # fmt: skip
@click.option(
    "--checks", default="all", metavar="NAMES", callback=lambda _context, _parameter, value: check_names(value),
    help="History checks: all, none, or names joined by commas; -name leaves one out of all.",
)  # fmt: skip
@click.option(
    "--node", default="", help="Where it was recorded, for the table. [default: the name of the trace's folder]"
)
@click.option("--all-reports", is_flag=True, help="Keep the reports of clean recordings too.")
@click.option("--json", "as_json", is_flag=True, help="Print a row for each recording as JSON.")
def replay_command(
    traces: tuple[Path, ...],
    out: Path,
    address: str | None,
    jobs: int | None,
    device: str,
    devices: tuple[str, ...],
    as_json: bool,
    **how: Any,
) -> None:
    """Replay all recordings in these folders and all below them, and put their verdicts into one table.

    Recordings are tasks of their own, with the ranks and the other side that lie in the same folder; a long one in segments is
    replayed in several places. A task that a process or machine took with it is done by another. Each result is committed once.
    """
    from ...replayer.executors.incremental.compiled_pass import compile_pass
    from ...replayer.run.settings import ReplaySettings
    from ...replayer.workers.jobs import usable_cores
    from ..fleet.committing import Fleet
    from ..fleet.running import recalled
    from ..fleet.tasks import make_tasks, traces_below
    from ..fleet.workers import Processes, RayCluster

    gpu = next((name for name in devices if name != "cpu"), device)
    if devices and (address or device != "cpu"):
        raise click.UsageError("--devices excludes --device and --address")
    if jobs and address not in (None, "local"):
        raise click.UsageError("--jobs is of this machine; a cluster has as many workers as cores")
    settings = ReplaySettings(device=gpu, kv_hash=how["kv_hash"], checks=how["checks"])
    fleet = Fleet(out=out.absolute(), settings=settings, node=how["node"], all_reports=how["all_reports"])
    began = time.monotonic()
    with redirect_stdout(sys.stderr), ExitStack() as resources:  # Ray prints what befalls its workers
        try:
            with errors_end():
                fleet.prepare()
                workers: Workers = (
                    RayCluster(address, jobs=jobs, gpu=gpu != "cpu")
                    if address
                    else Processes(jobs or len(devices) or usable_cores(), devices)
                )
                resources.callback(workers.close)
                paths = [path for top in traces for path in traces_below(top.absolute())]
                tasks, notes = make_tasks(paths, settings, workers=workers.size)
                rows, left = recalled(tasks, fleet)
            already = len(rows)
            for note in notes:
                say_error(note, kind="note: ")
            if isinstance(workers, Processes) and gpu == "cpu":
                compile_pass(max((task.num_bytes for task in left), default=0))
            ready = time.monotonic()
            undone = _replay(left, rows, fleet, workers, quiet=as_json)
            work = _work(workers, rows[already:], ready - began, time.monotonic() - ready)
        except OSError as error:
            raise CommandError(f"{error.filename or out}: {error.strerror or error}") from None
    sys.exit(_told(rows, out, already=already, undone=undone, work=work, as_json=as_json))


def _replay(tasks: Sequence[Task], rows: list[Row], fleet: Fleet, workers: Workers, *, quiet: bool) -> int:
    """Replay tasks, with progress on a terminal, and add to `rows`; return how many recordings are left after Ctrl-C."""
    from ...replayer.cli.printer import progress_shown
    from ...replayer.run.settings import Progress
    from ..fleet.committing import is_final
    from ..fleet.running import results

    err = console_for(sys.stderr)
    undone, done = sum(len(task.recordings) for task in tasks), 0
    whole = sum(task.num_bytes for task in tasks)
    counts: Counter[str] = Counter()
    seen = False
    try:
        with progress_shown(err, "fleet replay") if err.is_terminal and not quiet else nullcontext() as show:
            for task, found in results(tasks, fleet, workers):
                if not seen and all(map(is_final, found)):
                    seen = True
                    if not fleet.place(task.key).exists():
                        why = "not seen by all machines; name a folder that they share, or a URL"
                        say_error(f"{fleet.out}: {why}", kind="note: ")
                rows += found
                undone -= len(found)
                done += task.num_bytes
                for row in found:
                    counts.update({name: row.get(name, 0) for name in ("forwards", "tokens", "violations")})
                if show is not None:
                    show(Progress(done, whole, counts["forwards"], counts["tokens"], counts["violations"]))
    except KeyboardInterrupt:
        say_error(f"{count_of(undone, 'recording')} not replayed; run the same command again", kind="interrupted: ")
    return undone


def _work(workers: Workers, rows: Sequence[Row], start: float, seconds: float) -> dict[str, Any]:
    """Return where the time went, in seconds: until the first task was given, and since; `busy` and `replay` over all workers.

    Busy are processes of this machine while they have a task: they start, replay, and commit what came of it.
    """
    from ..fleet.workers import Processes

    found = {"start": start, "tasks": seconds, "replay": sum(row.get("seconds", 0) for row in rows)}
    work: dict[str, Any] = {"workers": workers.size}
    if isinstance(workers, Processes):
        found["busy"] = workers.busy_seconds
        work |= {"most_at_once": workers.most_at_once, "memory_held_back": workers.held_back}
    return work | {f"{name}_seconds": round(one, 3) for name, one in found.items()}


def _told(rows: list[Row], out: Path, *, already: int, undone: int, work: dict[str, Any], as_json: bool) -> int:
    """Print what there is to say of all, and return the exit code."""
    from ...recorder.text_tables import show_columns
    from ...replayer.cli.printer import OVERALL
    from ...replayer.report.summary import combined_exit_code

    counts = Counter(row["exit_code"] for row in rows)
    code = combined_exit_code([*counts, *([125] if undone else [])])
    rows.sort(key=lambda row: row["trace"])
    errors = [row for row in rows if "error" in row]
    bad = [row for row in rows if row["exit_code"] and "error" not in row]
    if as_json:
        told = {
            "verdict": OVERALL[code],
            "exit_code": code,
            "out": str(out),
            "already": already,
            "undone": undone,
            "work": work,
        }
        click.echo(json.dumps({**told, "recordings": rows}, indent=2))
    else:
        columns = ("forwards", "violations", "findings")
        shown = [
            (row["trace"], *(f"{row[name]:,}" for name in columns), OVERALL[row["exit_code"]].upper())
            for row in bad[:_MAX_LISTED]
        ]  # fmt: skip
        if shown:
            show_columns(console_for(sys.stdout), shown, ("recording", *columns, "verdict"), right=columns)
        tally = ", ".join(f"{counts[one]:,} {word}" for one, word in OVERALL.items() if counts[one])
        say(
            f"{OVERALL[code].upper()}   {count_of(len(rows), 'recording')}: {tally or 'none'}; {already:,} of them replayed before"
        )
        say(f"next    {shlex.join(['kvcanary', 'sql', str(out / 'table'), 'from kinds_by_version'])}")
    if work.get("memory_held_back") and work["most_at_once"] < work["workers"]:
        least = f"at most {work['most_at_once']} of {work['workers']} workers were at work at once"
        say_error(f"{least}: the machine has not memory for more of these recordings at a time", kind="note: ")
    for row in errors[:_MAX_LISTED]:
        say_error(row["error"] if row["trace"] in row["error"] else f"{row['trace']}: {row['error']}")
    left = 0 if as_json else sum(max(0, len(those) - _MAX_LISTED) for those in (bad, errors))
    if left:
        say_error(f"{left:,} more; --json names all", kind="note: ")
    return code
