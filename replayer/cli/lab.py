"""`kvcanary lab`: put a known fault into a running engine, and see what the replay makes of it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...recorder.cli.program import GivenPath, console_for, fail
from ...recorder.errors import printable

if TYPE_CHECKING:
    from ..lab.claims import Claim
    from ..lab.trial import Trial, TrialRun

EXIT_CLAIM_FAILED = 1
WIDE = 120
MAX_SEEDS = 100_000  # what is planned is held in memory

_EPILOG = """\b
Examples:
  kvcanary lab list
      every fault, what it does and where it was seen
  kvcanary lab run --fault stale_swa_mapping --seed 3 -o trace.arrow
      one trace with one fault in it, and its ground truth as a mark event
  kvcanary lab matrix --seeds 20
      every fault, twenty seeds each, and 200 clean runs: what is detected, how soon, by what
  kvcanary lab matrix --seeds 200 --jobs 2 -o matrix.parquet --markdown docs/results/fault-matrix.md
      the long run; stop it with Ctrl-C, and the same command goes on
"""


@click.group("lab", epilog=_EPILOG)
def lab_command() -> None:
    """Break a simulated engine as real engines broke, and see whether the replay notices.

    A fault acts on the running engine's state or replaces one of its decisions; it never edits the trace. What it did,
    and which forward first read something wrong, is known without asking the replay.
    """


@lab_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the faults and configurations as JSON.")
def list_command(as_json: bool) -> None:
    """List the faults and the engine configurations."""
    from ..lab.configurations import CONFIGURATIONS
    from ..lab.faults import FAULTS

    if as_json:
        names = ("name", "family", "reference", "benign", "configs", "summary")
        faults = [{name: getattr(fault, name) for name in names} for fault in FAULTS.values()]
        configs = [{"name": c.name, "summary": c.summary} for c in CONFIGURATIONS.values()]
        click.echo(json.dumps({"faults": faults, "configurations": configs}, indent=2))
        return
    from rich.table import Column, Table

    out = console_for(sys.stdout)
    table = Table(Column("fault", no_wrap=True), "seen in", "what happens", box=None, pad_edge=False)
    for fault in FAULTS.values():
        table.add_row(fault.name, fault.reference, fault.summary)
    out.print(table)
    out.print()
    table = Table(Column("configuration", no_wrap=True), "engine", "faults", box=None, pad_edge=False)
    for config in CONFIGURATIONS.values():
        table.add_row(config.name, config.summary, str(sum(config.name in f.configs for f in FAULTS.values())))
    out.print(table)


@lab_command.command("run", short_help="Record one trace with one fault in it.")
@click.option("--fault", "fault_name", required=True, metavar="NAME", help="See kvcanary lab list; clean for none.")
@click.option("--config", metavar="NAME", help="Engine configuration. [default: the fault's first]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of engine, workload and fault.")
@click.option("-o", "--output", required=True, type=GivenPath(), help="Trace to write.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the ground truth as JSON.")
def run_command(fault_name: str, config: str | None, seed: int, output: Path, force: bool, as_json: bool) -> None:
    """Record one trace with one fault in it, and say what was done and which forward first had something wrong.

    The trace carries the ground truth too, as a mark event "fault injected".
    """
    from ...recorder.errors import TraceError
    from ..lab.trial import run_trial

    trial = _trial(fault_name, config, seed)
    try:
        outcome = run_trial(trial, output, overwrite=force)
    except TraceError as error:
        fail(str(error))
    except OSError as error:  # the folder of a pair
        fail(f"{output}: cannot be written: {error.strerror or error}")
    if as_json:
        known: dict[str, object] = {
            "fault": fault_name,
            "config": trial.config,
            "seed": seed,
            "forwards": outcome.forwards,
        }
        known |= {"traces": [str(trace) for trace in outcome.traces], "injected": outcome.label or None}
        known["effect"] = asdict(outcome.effect) if outcome.effect is not None else None
        click.echo(json.dumps({**known, "broke_down": outcome.broke_down}, indent=2))
        return
    for line in _story(trial, outcome):
        click.echo(printable(line))


def _trial(fault_name: str, config: str | None, seed: int) -> Trial:
    from ..lab.configurations import CONFIGURATIONS
    from ..lab.faults import FAULTS
    from ..lab.matrix import CLEAN
    from ..lab.trial import Trial

    if fault_name != CLEAN and fault_name not in FAULTS:
        raise click.BadParameter(f"no fault {fault_name!r}; see kvcanary lab list", param_hint="--fault")
    fault = FAULTS.get(fault_name)
    known = fault.configs if fault is not None else tuple(CONFIGURATIONS)
    if config is not None and config not in known:
        raise click.BadParameter(
            f"{fault_name} takes {', '.join(known)}, not {config!r}: what it breaks exists there only",
            param_hint="--config",
        )
    return Trial(fault=fault, config=config or known[0], seed=seed)


def _story(trial: Trial, outcome: TrialRun) -> list[str]:
    names = " ".join(str(trace) for trace in outcome.traces)
    lines = [f"wrote   {names}   {outcome.forwards:,} forwards   configuration {trial.config}, seed {trial.seed}"]
    label, effect = outcome.label, outcome.effect
    if label:
        known = {k: v for k, v in label.items() if k not in ("fault", "forward") and v not in ("", -1)}
        where = "   ".join(f"{key.replace('_', ' ')} {value}" for key, value in known.items())
        lines.append(f"broke   {label['fault']} before forward {outcome.injected_forward:,}   {where}".rstrip())
    elif trial.fault is not None:
        lines.append(f"broke   nothing: {trial.fault.name} found no occasion; try another --seed")
    if effect is not None:
        what = f"wrong {effect.kind} in forward {effect.forward:,}"
        what += f" of the {effect.side} side" if effect.side else ""
        what += f"   request {effect.request}" if effect.request else ""
        what += f"   position {effect.position:,}" if effect.position >= 0 else ""
        what += f"   slot {effect.slot:,} of group {effect.group}" if effect.slot >= 0 else ""
        lines.append(f"effect  {what}")
    elif label:
        lines.append("effect  none: no forward read anything wrong")
    if outcome.broke_down:
        lines.append(f"then    the engine gave up: {outcome.broke_down}")
    return [*lines, f"next    kvcanary-replay {names}"]


@lab_command.command("matrix", short_help="Try every fault, and clean runs: what is detected.")
@click.option("--faults", default="all", show_default=True, metavar="NAMES", help="Names joined by commas, or none.")
@click.option("--configs", default="all", show_default=True, metavar="NAMES", help="Names joined by commas.")
@click.option("--seeds", type=click.IntRange(0, MAX_SEEDS), default=20, show_default=True, help="Trials of each fault.")
@click.option("--clean-seeds", type=click.IntRange(0, 10 * MAX_SEEDS), help="Clean runs. [default: ten times --seeds]")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes. [default: one a core]")
@click.option(
    *("-o", "--output"),
    type=GivenPath(dir_okay=False),
    default=Path("matrix.parquet"),
    show_default=True,
    help="Rows, one a trial; a file of the same build is gone on with.",
)
@click.option("--force", is_flag=True, help="Start anew where the output is of another build.")
@click.option("--markdown", type=GivenPath(dir_okay=False), help="Write the table there too.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def matrix_command(
    faults: str,
    configs: str,
    seeds: int,
    clean_seeds: int | None,
    jobs: int | None,
    output: Path,
    force: bool,
    markdown: Path | None,
    as_json: bool,
) -> None:
    """Try every fault on every configuration that has its mechanism, and clean runs beside; print what was detected.

    A fault's seeds are taken in turns over its configurations. Exit code 1 if an effect went undetected or was detected
    later than in the first forward that reads it, or if anything was reported without a fault.
    """
    from concurrent.futures.process import BrokenProcessPool

    from ..lab.claims import make_claims, matrix_markdown
    from ..lab.configurations import CONFIGURATIONS
    from ..lab.faults import FAULTS
    from ..lab.matrix import ResultsError, plan_trials

    clean_seeds = 10 * seeds if clean_seeds is None else clean_seeds
    planned = plan_trials(
        faults=_names(faults, list(FAULTS), "--faults"),
        configs=_names(configs, list(CONFIGURATIONS), "--configs"),
        seeds=seeds,
        clean_seeds=clean_seeds,
    )
    if markdown is not None and not markdown.absolute().parent.is_dir():  # known before hours of trials
        raise click.BadParameter(f"there is no folder {markdown.parent}", param_hint="--markdown")
    if not planned:
        raise click.UsageError("nothing to try: none of the faults goes with any of the configurations, or no seeds")
    kept = f"{output} keeps what is done, the same command goes on"
    try:
        rows = _run_shown(planned, output, jobs=jobs or len(os.sched_getaffinity(0)), force=force)
    except ResultsError as error:
        fail(str(error))
    except KeyboardInterrupt:
        click.echo(printable(f"stopped; {kept}"), err=True)
        raise
    except BrokenProcessPool:
        fail(f"a worker was killed, perhaps for want of memory; {kept}, with fewer --jobs")
    claims = make_claims(rows)
    holds = all(claim.holds for claim in claims)
    if as_json:
        known = {"seeds": seeds, "clean_seeds": clean_seeds, "holds": holds}
        click.echo(json.dumps({**known, "claims": [claim.to_json() for claim in claims]}, indent=2))
    else:
        _show(claims, output)
    if markdown is not None:
        command = f"kvcanary lab matrix --seeds {seeds} --clean-seeds {clean_seeds}"
        chosen = {"--faults": faults, "--configs": configs}
        command += "".join(f" {name} {given}" for name, given in chosen.items() if given != "all")
        command += f" --markdown {markdown}"
        text = matrix_markdown(claims, command=command, seeds=seeds, clean_seeds=clean_seeds)
        markdown.write_text(text, encoding="utf-8")
    if not holds:
        sys.exit(EXIT_CLAIM_FAILED)


def _names(text: str, known: list[str], option: str) -> list[str]:
    if text in ("all", "none"):
        return known if text == "all" else []
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"no {', '.join(map(repr, unknown))}; there are {', '.join(known)}", param_hint=option)
    return names


def _run_shown(planned: list[tuple[str, str, int]], output: Path, *, jobs: int, force: bool) -> list[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..lab.matrix import run_matrix

    err = console_for(sys.stderr)
    columns = (TextColumn("matrix"), BarColumn(), MofNCompleteColumn(), TextColumn("trials"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=len(planned))

        def show(done: int, total: int, row: Any) -> None:
            bar.update(task, completed=done, total=total, description=row.fault if row is not None else "")

        return run_matrix(planned, output, jobs=jobs, force=force, on_progress=show)


def _show(claims: list[Claim], output: Path) -> None:
    from ...recorder.text_tables import show_columns
    from ..lab.claims import HEADINGS, cells
    from .incident_blocks import count_of

    out = console_for(sys.stdout)
    # A narrow terminal does without the names of what saw each fault; they are in the output file.
    shown = len(HEADINGS) if out.width >= WIDE else len(HEADINGS) - 1
    rows = [cells(claim)[:shown] for claim in claims]
    failed = {f"{claim.fault} ": "red" for claim in claims if not claim.holds}
    show_columns(out, rows, HEADINGS[:shown], right=HEADINGS[1:-1], styles=failed)
    failures = [text for claim in claims for text in claim.failures]
    more = [f"and {len(failures) - 20:,} more, in {output}"] if len(failures) > 20 else []
    for text in failures[:20] + more:
        out.print(text, style="red", markup=False)
    verdict = f"{len(failures):,} trials contradict the claims" if failures else "every claim holds"
    verdict = "1 trial contradicts a claim" if len(failures) == 1 else verdict
    out.print(f"{verdict}   {count_of(sum(claim.runs for claim in claims), 'trial')}   {output}", markup=False)
