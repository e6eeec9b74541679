"""`kvcanary diff`: two traces of one workload, compared."""

from __future__ import annotations

import json
import math
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ...recorder.cli.program import EXIT_FAILED, CommandError, GivenPath, console_for
from ...recorder.errors import printable
from ...recorder.text_tables import show_columns
from ..diff.settings import ALIGNMENTS, BYTE_KINDS, CONTENT_KINDS, KINDS, KV_DTYPES, DiffSettings, NotComparableError
from ..errors import AnalysisError
from . import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.text import Text

    from ..diff.compare import Progress
    from ..diff.result import Difference, DiffResult

EXIT_NOT_COMPARABLE: Final = 125
MAX_SHOWN: Final = 10
_COMPARED: Final = {  # beside tokens, by its name in the JSON
    "layers": "pieces of all layers",
    "states": "recurrent states",
    "windows": "reads of windows",
    "identities": "requests' identities",
}

_EPILOG = """\b
Examples:
  kvcanary diff v0.5.16.arrow v0.5.23.arrow
      two engine versions: does any request differ, and where first?
  kvcanary diff --kv-tolerance 0.01 page1.arrow page16.arrow
      KV bytes as values: a difference of up to 1 % is rounding
  kvcanary diff --no-kv --align prompt a.arrow b.arrow
      tokens, positions, block tables and samples only; requests by their prompts
  kvcanary diff --only table,kv_changed good.arrow bad.arrow
      what corruption looks like, and nothing else
  kvcanary diff prefill.arrow decode.arrow
      what one side sent against what the other received
  kvcanary diff --json a.arrow b.arrow | jq .first

\b
Kinds of difference:
  missing, input, identity, position, table, window, state, values, sampled, kv, layer, kv_changed, layer_changed, length
      count by default
  hit, schedule
      timing: shown, and count with --only or --strict

\b
Exit codes: 0 same (but for timing), 1 different, 2 wrong usage or an unreadable trace,
125 not comparable (other models, vocabularies, token hashing, no request in common), or inconclusive: torn or lossy.
docs/guide/diff.md says what each kind means.
"""


@click.command("diff", epilog=_EPILOG)
@click.argument("a", metavar="A", type=GivenPath(url=True))
@click.argument("b", metavar="B", type=GivenPath(url=True))
@click.option(
    "--align",
    type=click.Choice(ALIGNMENTS),
    default="auto",
    show_default=True,
    help="Requests by id (name, or room between a prefill and a decode side), or by prompt. auto: by id where ids mean "
    "the same prompts.",
)
@click.option("--only", metavar="KINDS", help="Only these kinds count, joined by commas.")
@click.option("--ignore", metavar="KINDS", help="These kinds do not count.")
@click.option("--strict", is_flag=True, help="Timing counts too.")
@click.option("--no-kv", is_flag=True, help="Compare no KV bytes.")
@click.option(
    "--kv-tolerance",
    type=click.FloatRange(min=0),
    metavar="X",
    help="KV values a, b are equal where |a - b| <= X (1 + |b|). [default: byte by byte]",
)
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), help="What the KV bytes are. [default: the header's dtype]")
@click.option("--requests", metavar="NAMES", help="Only these requests, names or ids joined by commas.")
@click.option("--any-model", is_flag=True, help="Compare although the headers name different models.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", "-q", is_flag=True, help="Print one line.")
def diff_command(a: Path, b: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Compare two traces of the same workload: A, taken for right, and B.

    Requests are aligned by id or prompt, positions by request, slots by what they hold: another allocation order,
    other chunks and other batches are no difference. Says for each request, and overall, where the traces part first.
    """
    from ..diff.compare import diff_traces

    settings = _settings(options)
    try:
        with _progress(quiet or as_json) as on_progress:
            result = diff_traces(a, b, settings=settings, on_progress=on_progress)
    except AnalysisError as error:
        comparable = not isinstance(error, NotComparableError)
        code = EXIT_FAILED if comparable else EXIT_NOT_COMPARABLE
        verdict = "unreadable" if comparable else "not comparable"
        raise CommandError(
            str(error) if comparable else f"not comparable: {error}", code, verdict=verdict, exit_code=code
        ) from None
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    elif quiet:
        first = result.first
        line = f"{result.verdict.upper()}   {a}   {b}   {result.num_different:,} requests differ"
        if first is not None:
            line += f"   first {first.request or first.partner}: {first.words}"
        say(line + (f"   ({'; '.join(result.doubts)})" if result.doubts else ""))
    else:
        _show(console_for(sys.stdout), result)
    sys.exit(result.exit_code)


def _settings(asked: dict[str, Any]) -> DiffSettings:
    no_kv, tolerance, requests = asked["no_kv"], asked["kv_tolerance"], asked["requests"]
    if no_kv and tolerance is not None:
        raise click.UsageError("--no-kv and --kv-tolerance exclude one another")
    if tolerance is not None and not math.isfinite(tolerance):
        raise click.UsageError(f"--kv-tolerance is {tolerance}, expected a number; --no-kv leaves KV bytes out")
    kinds = _kinds(asked["only"], asked["ignore"], asked["strict"])
    names = tuple(name.strip() for name in (requests or "").split(",") if name.strip())
    if requests is not None and not names:
        raise click.UsageError("--requests names none; expected names or ids joined by commas")
    if no_kv and not kinds - BYTE_KINDS:
        raise click.UsageError("nothing is left to compare: --only names KV bytes, --no-kv leaves them out")
    same = {name: asked[name] for name in ("align", "kv_tolerance", "any_model")}
    kv = not no_kv and bool(kinds & BYTE_KINDS)
    return DiffSettings(kinds=kinds, kv=kv, kv_dtype=asked["kv_dtype"] or "", requests=names, **same)


def _kinds(only: str | None, ignore: str | None, strict: bool) -> frozenset[str]:
    if only and (ignore or strict):
        raise click.UsageError("--only goes without --ignore and --strict")
    chosen = set(KINDS if strict else CONTENT_KINDS)
    for option, text in (("--only", only), ("--ignore", ignore)):
        names = {name.strip() for name in text.split(",")} if text is not None else set()
        unknown = sorted(names - set(KINDS))
        if unknown:
            raise click.UsageError(f"{option}: no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
        if option == "--only" and names:
            chosen = names
        elif option == "--ignore":
            chosen -= names
    if not chosen:
        raise click.UsageError("nothing is left to compare: --ignore names every kind")
    return frozenset(chosen)


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    from rich.console import Console

    console: Console = Console(stderr=True, emoji=False, highlight=False)
    if quiet or not console.is_terminal:
        yield lambda *_: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading A")

        def update(what: str, done: int, total: int) -> None:
            described = "joining" if what == "joining" else f"reading {what}"
            bar.update(task, description=described, completed=done, total=total or None)

        yield update


def _show(console: Console, result: DiffResult) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from ...replayer.cli.incident_blocks import grid

    for name, trace, header, walk in zip("AB", (result.a, result.b), result.headers, result.totals, strict=True):
        engine = " ".join(part for part in (header["engine"]["name"], header["engine"]["version"]) if part)
        facts = [engine, header["model"]["name"], f"{walk.forwards:,} forwards", f"{walk.tokens:,} tokens"]
        head = Text.assemble((f"{name}  {printable(trace)}", "bold"), "   ", printable("   ".join(facts)))
        console.print(head, soft_wrap=not console.is_terminal)
    pairing, compared = result.pairing, result.compared
    line = f"aligned by {pairing.by}: {pairing.pairs:,} requests of {pairing.a_requests:,} and {pairing.b_requests:,}"
    line += f"   compared: {compared['tokens']:,} tokens, {compared['sampled']:,} sampled, "
    line += f"KV bytes of {compared['kv']:,}" if "kv" in compared else "no KV bytes"
    line += "".join(f", {compared[name]:,} {said}" for name, said in _COMPARED.items() if name in compared)
    console.print(Text(line, style="dim"), soft_wrap=not console.is_terminal)
    for note in result.notes:
        console.print(Text(f"note  {printable(note)}", style="dim"), soft_wrap=not console.is_terminal)
    console.print()
    console.print(_verdict(result), soft_wrap=not console.is_terminal)
    if result.first is not None:
        console.print()
        console.print(Padding(grid(_first(result.first, result.hint)), (0, 0, 0, 2), expand=False))
        console.print()
        _show_requests(console, result)
    if words := result.timing.words():
        console.print()
        console.print(Text("only in timing", style="dim"))
        for line in words:
            console.print(Text(f"  {line}"), soft_wrap=not console.is_terminal)
    console.print()
    console.print(Text(_next(result), style="dim"), soft_wrap=True)


def _verdict(result: DiffResult) -> Text:
    from rich.text import Text

    from ..diff.result import DIFFERENT, INCONCLUSIVE

    styles = {DIFFERENT: "bold red", INCONCLUSIVE: "bold yellow"}
    text = Text(result.verdict.upper(), style=styles.get(result.verdict, "bold green"))
    said = []
    if result.verdict == DIFFERENT:
        requests = max(result.pairing.a_requests, result.pairing.b_requests)
        counted = [kind for kind in KINDS if kind in result.counts and kind in result.counted]
        said.append(f"{result.num_different:,} of {requests:,} requests")
        said.append(", ".join(f"{kind} {result.counts[kind]:,}" for kind in counted))
    elif result.verdict != INCONCLUSIVE:
        said.append("no request differs" + ("" if result.timing.same else ", but for the timing below"))
    left = [f"{kind} {n:,}" for kind, n in result.counts.items() if kind not in result.counted and n]
    if left:
        said.append(f"not counted: {', '.join(left)}")
    doubts = [printable("; ".join(result.doubts))] if result.doubts else []
    return text.append("   " + "   ".join([*(said or [""]), *doubts]), style="default not bold")


def _first(first: Difference, hint: str) -> list[tuple[str, str]]:
    where = [f"forward {n:,} of {name}" for name, n in (("A", first.a_forward), ("B", first.b_forward)) if n >= 0]
    return [
        ("first difference", f"{first.kind}: {KINDS[first.kind]}"),
        ("request", _names(first)),
        ("what", first.words),
        ("where", ", ".join(where)),
        *([("hint", hint)] if hint else []),
    ]


def _names(difference: Difference) -> str:
    names = [name for name in (difference.request, difference.partner) if name]
    if not names:
        return "none: a slot that no request of both traces wrote"
    return names[0] if len(set(names)) == 1 else f"{names[0]} in A, {names[1]} in B"


def _show_requests(console: Console, result: DiffResult) -> None:
    rows = []
    for request in result.requests[:MAX_SHOWN]:
        first = request[0]
        later = f"   then {', '.join(d.kind for d in request[1:])}" if request[1:] else ""
        numbers = [f"{n:,}" if n >= 0 else "" for n in (first.position, first.a_forward, first.b_forward)]
        rows.append((first.request or first.partner or "(no request)", first.kind, *numbers, first.words + later))
    places = ("position", "forward A", "forward B")
    show_columns(console, rows, ("request", "kind", *places, "what comes first"), right=places, indent="  ")
    if result.num_different > MAX_SHOWN:
        console.print(f"  and {result.num_different - MAX_SHOWN:,} more")


def _next(result: DiffResult) -> str:
    first = result.first
    if first is None:
        return "next   kvcanary-replay judges each trace by itself"
    trace = printable(shlex.quote(result.b))
    if first.kind in ("kv", "layer", "state", "sampled") and "kv" in result.counts:
        return f"next   --kv-tolerance or --no-kv looks past rounding;   kvcanary-replay {trace}"
    return f"next   kvcanary-replay {trace}"
