"""`kvcanary rerun`: compute a request again, and say whether the cache or the compute is at fault."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from ...recorder.cli.program import GivenPath, JsonErrors, console_for, fail
from ...recorder.errors import TraceError, printable
from .options import model_folder

if TYPE_CHECKING:
    from ..model.rerun import Rerun

_EPILOG = """\b
Exit codes:
    0  every byte, and every log-probability, that was recorded is what the model gives
    1  something differs
    2  wrong usage, or a trace or checkpoint that cannot be read
  125  nothing could be compared

\b
Examples:
  kvcanary rerun trace.arrow --request chatcmpl-77ab --model ~/models/Qwen3-8B
  kvcanary rerun --json trace.arrow --request 1843 --model ~/models/Qwen3-8B | jq .fault
"""


@click.command("rerun", cls=JsonErrors, epilog=_EPILOG)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=GivenPath())
@click.option(
    "--request", required=True, metavar="ID", help="The request: the engine's name of it, or its number in the trace."
)
@click.option(
    "--model",
    required=True,
    metavar="FOLDER",
    callback=lambda _context, _parameter, value: model_folder(value),
    help="The checkpoint that ran (Hugging Face, safetensors). Needs kvcanary[model].",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def rerun_command(traces: tuple[Path, ...], request: str, model: str, as_json: bool) -> None:
    """Compute a request again from its tokens, and compare K and V of every layer that was recorded.

    TRACE is a recording: one file, or its segments in order. Says in which forward, layer and position the engine first had
    something else than the model gives, and whether the cache, the compute or the input is at fault. Log-probabilities that the
    engine computed of sampled tokens are compared, too.
    """
    from ..model.rerun import rerun

    err = Console(stderr=True, emoji=False, highlight=False)
    try:
        with err.status("reading the trace, then computing"):
            found = rerun(traces, request, Path(model))
    except TraceError as error:
        fail(str(error))
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        _show(found)
    sys.exit(125 if not found.compared and not found.logprobs else int(found.fault != "agrees"))


def _show(found: Rerun) -> None:
    out = console_for(sys.stdout)

    def say(text: str, style: str = "") -> None:
        out.print(printable(text), style=style, markup=False, highlight=False)

    say(f"request   {found.request}   {found.tokens:,} tokens   {found.forwards:,} forwards")
    layers = ", ".join(f"{layer}: {count:,}" for layer, count in sorted(found.layers.items()))
    say(f"compared  {found.compared:,} pieces of slots   by layer {layers or 'none'}")
    for reason in found.not_compared:
        say(f"not       {reason}", "dim")
    if found.logprobs:
        differ = f"{found.logprobs_differing:,} differ" if found.logprobs_differing else "all agree"
        say(
            f"sampled   {found.logprobs:,} log-probabilities: {differ}, within {found.logprob_tolerance:.4f} (half of them, or less)"
        )
    if found.fault == "agrees":
        some = found.compared or found.logprobs
        say("AGREES    with the model" if some else "NOTHING   could be compared", "bold")
        return
    if (token := found.first_logprob) is not None:
        what = f"forward {token.forward:,}, position {token.position:,}, token {token.token}"
        off = f"{token.recorded:.4f}, and the model gives {token.computed:.4f} (within {token.tolerance:.4f})"
        if found.first is None:
            say(f"{found.fault.upper():9} {token.words}", "bold red")
        say(f"token     {what}: its log-probability is {off}")
    first = found.first
    if first is None:
        return
    say(f"{found.fault.upper():9} {first.words}", "bold red")
    place = f"forward {first.forward:,}, layer {first.layer}, position {first.position:,}, {first.half} in slot {first.slot:,}"
    off = (
        f"off by {first.off:.1%} of the largest value"
        if math.isfinite(first.off)
        else "NaN or infinity, there or in the checkpoint"
    )
    say(f"first     {place}: {off}")
    if found.warm is not None:
        same = "as many" if found.warm == found.differing else f"{found.warm:,}"
        say(f"warm      {same} differ if it is computed in the chunks in which it came, prefixes in theirs")
    say(f"spread    {found.differing:,} of {found.compared:,} pieces differ")
