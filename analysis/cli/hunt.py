"""`kvcanary hunt`: generated requests for a real engine, recorded and judged, until something is wrong."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...recorder.cli.program import CommandError, GivenPath, console_for
from ...recorder.errors import TraceError
from . import errors_end, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..hunt.hunt import Hunt, HuntResult

PATIENCE_S = 120.0

_EPILOG = """\b
Examples:
  kvcanary hunt --minutes 30 -o hunted -- vllm serve MODEL --port 8000 --num-gpu-blocks-override 200
  kvcanary hunt --seed 7 --jitter 50 -- python -m sglang.launch_server --model-path MODEL --max-total-tokens 4000
      a small pool has requests preempted and cached prefixes evicted, which is where bugs are
  kvcanary hunt --script -- python examples/hunt_transformers.py
      a program that does the workload that KVCANARY_WORKLOAD names, and ends; four rounds are a run of it
  kvcanary hunt --script --adapters a,b -- python examples/hunt_vllm.py MODEL '{"adapters": {"a": "/loras/a", "b": "/loras/b"}}'
      requests under adapters; a server lists its own
  kvcanary hunt --workload hunted/workload.jsonl -- vllm serve ...
      the same requests again
  kvcanary shrink hunted/workload.jsonl --run 'vllm serve ...'
      the fewest and shortest requests that still bring it

\b
Exit codes: 1 an incident was found, 0 none was, 125 nothing was recorded, or what was cannot be judged, 2 wrong usage or
the engine could not be started. docs/guide/hunt.md says more.
"""


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say how its engine is run."""
    patience = click.FloatRange(min=1)
    for option in (
        click.option(
            "--patience",
            type=patience,
            default=PATIENCE_S,
            metavar="S",
            show_default=True,
            help="How long an engine may do nothing with requests.",
        ),
        click.option(
            "--url",
            default="",
            show_default="127.0.0.1 and the command's --port",
            help="Where the server listens.",
        ),
        click.option(
            "--script", is_flag=True, help="COMMAND is no server: it does the workload that KVCANARY_WORKLOAD names."
        ),
    ):
        command = option(command)
    return command


def _longest(_context: click.Context, _parameter: click.Parameter, value: int) -> int:
    if value == 1:
        raise click.BadParameter("is 1, expected 2 or more: a token of the prompt and one of the answer")
    return value


def _ingredients(_context: click.Context, _parameter: click.Parameter, value: str) -> frozenset[str]:
    from ..hunt.workload import INGREDIENTS

    named = frozenset(filter(None, value.split(",")))
    if unknown := sorted(named - INGREDIENTS.keys()):
        raise click.BadParameter(f"{', '.join(unknown)}: expected of {', '.join(INGREDIENTS)}")
    return named


def _fields(_context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    read = []
    for text in value:
        try:
            read.append(json.loads(text))
        except ValueError as error:
            raise click.BadParameter(f"{text} is no JSON: {error}") from None
        if not isinstance(read[-1], dict):
            raise click.BadParameter(f'{text}: expected an object, such as {{"logprobs": 2}}')
    return tuple(read)


@click.command("hunt", epilog=_EPILOG, context_settings={"allow_interspersed_args": False, "show_default": True})
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...", type=click.UNPROCESSED)
@click.option(
    "-o", "--output", type=GivenPath(file_okay=False), default="hunt", help="A new folder for all that comes of it."
)
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=10.0, help="How long, once the engine is ready."
)
@click.option("--seed", type=int, default=1, help="Of the requests.")
@click.option("--workload", type=GivenPath(exists=True, dir_okay=False), help="Do the requests of this file, once.")
@click.option(
    "--jitter",
    "jitter_ms",
    type=click.IntRange(min=0),
    default=0,
    metavar="MS",
    help="Stop single processes of the engine for up to MS, at times.",
)
@click.option(
    "--longest",
    type=click.IntRange(min=0),
    default=0,
    show_default="the server's, or 256",
    callback=_longest,
    help="Most tokens of a prompt and its answer.",
)
@click.option(
    "--vocabulary", type=click.IntRange(min=8), default=500, metavar="N", help="Tokens asked are from 3 to N - 1."
)
@click.option(
    "--without",
    default="",
    show_default=False,
    metavar="NAMES",
    callback=_ingredients,
    help="Leave out of what is asked: long, abort, flush ...",
)
@click.option(
    "--adapters",
    default="",
    show_default="those that the server lists",
    metavar="NAMES",
    callback=lambda _context, _parameter, value: tuple(filter(None, value.split(","))),
    help="Adapters that requests may name: first,second.",
)
@click.option(
    "--fields",
    multiple=True,
    metavar="JSON",
    callback=_fields,
    help="What some requests get beside the rest, as the engine names it; may be given several times.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=4, metavar="N", help="Of requests, in each run of a --script."
)
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print what came of it as JSON.")
def hunt_command(
    command: tuple[str, ...],
    output: Path,
    minutes: float,
    workload: Path | None,
    patience: float,
    url: str,
    script: bool,
    as_json: bool,
    rounds: int,
    **asked: Any,
) -> None:
    """Run COMMAND, an engine, with the recorder on, ask it generated requests, and stop at the first incident.

    COMMAND is a server of vLLM or SGLang. Arrivals, lengths, shared beginnings, clients that leave, flushes, salts and adapters
    come from the seed, and from which paths through the engine were not reached yet. What is asked is in a file beside the
    traces, with which it can be asked again.
    """
    from ...kernels.dispatch import prepare
    from ...kernels.replay_pass.state import STATE_LOOPS
    from ..hunt.hunt import Hunt
    from ..hunt.run import Plan
    from ..hunt.workload import read_workload

    if output.exists() and any(output.iterdir()):
        raise CommandError(f"{output}: is not empty; name a new folder with -o")
    prepare(*STATE_LOOPS, backend="cpu")
    plan = Plan(command=command, script=script, url=url, patience_s=patience, rounds=rounds)
    console = console_for(sys.stderr)
    with errors_end(TraceError), console.status("") as status:

        def told(hunt: Hunt) -> None:
            aim = f" for {hunt.aim}" if hunt.aim else ""
            reached = sum(map(bool, hunt.coverage.reached.values()))
            status.update(f"round {hunt.rounds}: {hunt.state}{aim}; {reached} paths through the engine reached")

        steps = read_workload(workload) if workload else []
        hunt = Hunt(plan, output, workload=steps, told=told, **asked)
        result = hunt.run(minutes * 60)
    if as_json:
        click.echo(json.dumps(asdict(result), indent=2))
    else:
        engine = " --script" * script + (f" --url {shlex.quote(url)}" if url else "")
        _show(result, command, engine + (f" --patience {patience:g}" if patience != PATIENCE_S else ""))
    sys.exit(result.exit_code)


def _show(result: HuntResult, command: tuple[str, ...], engine: str) -> None:
    from ..hunt.coverage import PATHS
    from ..hunt.hunt import INTERRUPTED

    asked = ", ".join(f"{count:,} {what}" for what, count in sorted(result.requests.items()))
    say(
        f"hunted    {result.engine or 'nothing'}   seed {result.seed}, {result.rounds:,} rounds, {result.seconds:.0f} s"
    )
    say(f"asked     {asked or 'nothing'}; {result.forwards:,} forwards")
    for path, count in result.reached.items():
        if count:
            say(f"reached   {path:13}{count:>9,}  {PATHS[path]}")
    say(f"not yet   {', '.join(path for path, count in result.reached.items() if not count) or 'all were reached'}")
    for doubt in result.doubts:
        say(f"note      {doubt}")
    if result.exit_code == 125:
        say("verdict   INCONCLUSIVE")
    if result.exit_code == 0:
        say(f"verdict   nothing found{' before that' if INTERRUPTED in result.doubts else ''}")
    if result.exit_code != 1:
        return
    row: dict[str, Any] = result.incident or {"title": "damage without an incident", "kind": "unknown", "sentence": ""}
    say(f"FOUND     {row['title']}   {row['kind']}")
    say(f"          {row['sentence']}")
    if result.shrunk_trace:
        say(f"trace     {result.trace}, of it {result.shrunk_trace} for an issue")
    word = shlex.join(command)
    say(f"again     kvcanary hunt --workload {shlex.quote(result.workload)}{engine} -o again -- {word}")
    say(f"next      kvcanary shrink {shlex.quote(result.workload)}{engine} --run {shlex.quote(word)}")
