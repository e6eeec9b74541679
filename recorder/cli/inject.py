"""`kvcanary inject`: run an engine with the recorder on, and damage it once, on purpose."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..process.injection import FAULTS, MARK_NOTE, Injection
from .program import GivenPath, fail
from .record import record_run, with_settings

if TYPE_CHECKING:
    from ..process.recorded_files import RecordedTrace

EXIT_NOT_INJECTED: Final = 125
_SWEEP_EVERY: Final = "4"

_EPILOG = (
    """\b
Faults:
"""
    + "\n".join(f"  {name:16} {what}" for name, what in FAULTS.items())
    + """

\b
Examples:
  kvcanary inject --fault kv_used --at 40 -o traces -- vllm serve MODEL --load-format dummy ...
  kvcanary inject --fault next_token_swap -o traces --json run.json -- python my_test.py
  kvcanary-replay traces/*.arrow
      says whether what was injected was found, in which forward and by what

The exit code is the engine's; 125 if it ended with 0 and the fault never happened: no forward from --at on had a place
for it; 2 for wrong usage, or if the engine could not be started.
"""
)


@click.command("inject", epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True)
@click.option("--fault", type=click.Choice(list(FAULTS)), required=True, help="What is damaged; see below.")
@click.option(
    "--at",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    metavar="N",
    help="Number of the forward; the first from there on that has a place for the fault gets it.",
)
@click.option(
    "--request", default="", metavar="NAME", help="The engine's name of the request to be hit. [default: any]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the place: request, position, slot.")
@click.option(
    "--damage-outputs",
    is_flag=True,
    help="Agree that answers will be wrong; not needed where COMMAND says dummy weights.",
)
@click.option("-o", "--output", type=GivenPath(), help="Folder for the traces. [default: KVCANARY_TRACE's]")
@click.option("--config", type=GivenPath(), help="TOML file of settings; options go before it.")
@click.option("--json", "json_path", type=GivenPath(), help="Also write what was recorded and injected to this file.")
@with_settings
def inject_command(
    command: tuple[str, ...],
    fault: str,
    at: int,
    request: str,
    seed: int,
    damage_outputs: bool,
    output: Path | None,
    config: Path | None,
    json_path: Path | None,
    **options: str | None,
) -> None:
    """Run COMMAND, an engine, record it, and put one fault into it: a test of whoever should notice. IT DAMAGES OUTPUTS.

    The fault acts on the engine's own tables, KV bytes or sampled tokens, in the process that runs the model, once; what
    was done stands in the trace as a mark. SGLang, vLLM and transformers on the CPU. Never in front of users: without
    --damage-outputs an engine is refused whose command does not say that its weights are dummies.
    """
    words = [word.replace("_", "-") for word in command]
    dummies = "--load-format=dummy" in words or ("--load-format", "dummy") in itertools.pairwise(words)
    if not damage_outputs and not dummies:
        fail(
            "kvcanary inject damages what the engine answers, and this command does not say --load-format dummy; "
            "if nobody relies on its answers, give --damage-outputs"
        )
    if fault == "next_token_swap" and not options.get("oracle"):
        options["oracle"] = "hash"
    if fault == "kv_unused_cache" and not options.get("sweep_every"):
        options["sweep_every"] = _SWEEP_EVERY
    injection = Injection(fault=fault, at=at, request=request, seed=seed)
    record_run(command, output, config, json_path, options, inject=injection.to_json(), behind=_injected)


def _injected(say: Callable[[str], None], found: "list[RecordedTrace]", code: int) -> tuple[int, dict[str, Any]]:
    """Say what was injected, by the marks in the traces; return the exit code, and the same for the JSON."""
    from ..errors import TraceError
    from ..trace.batch import TraceGap
    from ..trace.reader import TraceReader

    done = []
    for trace in found:
        try:
            with TraceReader(trace.path) as reader:
                for batch in reader.stream():
                    if isinstance(batch, TraceGap):
                        continue
                    views = [batch.event(row) for row, kind in enumerate(batch.kinds) if kind == "mark"]
                    labels = [
                        json.loads(str(view.scalar("labels"))) for view in views if view.scalar("note") == MARK_NOTE
                    ]
                    done += [{"trace": str(trace.path), **one} for one in labels]
        except (TraceError, OSError, ValueError) as error:  # the marks before it count
            say(f"injected  unknown behind here: {error}")
    for fault in done:
        place = ", ".join(
            f"{name} {fault[name]}" for name in ("request", "slot", "position") if fault.get(name, "") != ""
        )
        say(f"injected  {fault['fault']} in forward {fault['forward']}{f': {place}' if place else ''}")
    if not done:
        say(
            "injected  nothing: no forward from --at on had a place for the fault; its log says more, if it began at all"
        )
    return code or (0 if done else EXIT_NOT_INJECTED), {"injected": done}
