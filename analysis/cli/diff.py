"""`kvcanary diff`: two traces of one workload, compared."""

from __future__ import annotations

import json
import math
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...recorder.cli.program import GivenPath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from ..diff.compare import Progress
    from ..diff.settings import DiffSettings

EXIT_FAILED = 2
EXIT_NOT_COMPARABLE = 125
ALIGNMENTS = ("auto", "id", "prompt")
DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")

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
  missing, input, position, table, sampled, kv, kv_changed, length    count by default
  hit, schedule                                                       timing: shown, and count with --only or --strict

\b
Exit codes: 0 same (but for timing), 1 different, 2 wrong usage or an unreadable trace,
125 not comparable (other models, vocabularies, token hashing, no request in common), or inconclusive: torn or lossy.
docs/guide/diff.md says what each kind means.
"""


@click.command("diff", epilog=_EPILOG)
@click.argument("a", metavar="A", type=GivenPath())
@click.argument("b", metavar="B", type=GivenPath())
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
@click.option("--kv-dtype", type=click.Choice(DTYPES), help="What the KV bytes are. [default: the header's dtype]")
@click.option("--requests", metavar="NAMES", help="Only these requests, names or ids joined by commas.")
@click.option("--any-model", is_flag=True, help="Compare although the headers name different models.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", "-q", is_flag=True, help="Print one line.")
def diff_command(a: Path, b: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Compare two traces of the same workload: A, taken for right, and B.

    Requests are aligned by id or prompt, positions by request, slots by what they hold: another allocation order,
    other chunks and other batches are no difference. Says for each request, and overall, where the traces part first.
    """
    from ...recorder.errors import printable, printable_message
    from ..diff.compare import diff_traces
    from ..diff.settings import NotComparableError
    from ..errors import AnalysisError

    settings = _settings(**options)
    try:
        with _progress(quiet or as_json) as on_progress:
            result = diff_traces(a, b, settings=settings, on_progress=on_progress)
    except AnalysisError as error:
        comparable = not isinstance(error, NotComparableError)
        code = EXIT_FAILED if comparable else EXIT_NOT_COMPARABLE
        if as_json:
            verdict = "unreadable" if comparable else "not comparable"
            click.echo(json.dumps({"verdict": verdict, "exit_code": code, "error": str(error)}, indent=2))
        else:
            click.echo(printable_message(f"{'Error' if comparable else 'not comparable'}: {error}"), err=True)
        sys.exit(code)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    elif quiet:
        first = result.first
        line = f"{result.verdict.upper()}   {a}   {b}   {result.num_different:,} requests differ"
        if first is not None:
            line += f"   first {first.request or first.partner}: {first.words}"
        click.echo(printable(line + (f"   ({'; '.join(result.doubts)})" if result.doubts else "")))
    else:
        from rich.console import Console

        from ..diff.screen import show

        show(Console(emoji=False, highlight=False, width=None if sys.stdout.isatty() else 160), result)
    sys.exit(result.exit_code)


def _settings(
    *,
    align: str,
    only: str | None,
    ignore: str | None,
    strict: bool,
    no_kv: bool,
    kv_tolerance: float | None,
    kv_dtype: str | None,
    requests: str | None,
    any_model: bool,
) -> DiffSettings:
    from ..diff.settings import DiffSettings

    if no_kv and kv_tolerance is not None:
        raise click.UsageError("--no-kv and --kv-tolerance exclude one another")
    if kv_tolerance is not None and not math.isfinite(kv_tolerance):
        raise click.UsageError(f"--kv-tolerance is {kv_tolerance}, expected a number; --no-kv leaves KV bytes out")
    kinds = _kinds(only, ignore, strict)
    names = tuple(name.strip() for name in (requests or "").split(",") if name.strip())
    if requests is not None and not names:
        raise click.UsageError("--requests names none; expected names or ids joined by commas")
    if no_kv and not kinds - {"kv", "kv_changed"}:
        raise click.UsageError("nothing is left to compare: --only names KV bytes, --no-kv leaves them out")
    return DiffSettings(
        align=align,
        kinds=kinds,
        kv=not no_kv and bool(kinds & {"kv", "kv_changed"}),
        kv_tolerance=kv_tolerance,
        kv_dtype=kv_dtype or "",
        requests=names,
        any_model=any_model,
    )


def _kinds(only: str | None, ignore: str | None, strict: bool) -> frozenset[str]:
    from ..diff.settings import CONTENT_KINDS, KINDS

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
