"""A comparison as a person reads it."""

import shlex

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...recorder.errors import printable
from .result import DIFFERENT, INCONCLUSIVE, Difference, DiffResult
from .settings import KINDS

_STYLES = {DIFFERENT: "bold red", INCONCLUSIVE: "bold yellow"}
MAX_SHOWN = 10


def show(console: Console, result: DiffResult) -> None:
    """Print a comparison; plain text where the console is no terminal."""
    for name, trace, header, walk in zip("AB", (result.a, result.b), result.headers, result.totals, strict=True):
        engine = " ".join(part for part in (header["engine"]["name"], header["engine"]["version"]) if part)
        facts = [engine, header["model"]["name"], f"{walk.forwards:,} forwards", f"{walk.tokens:,} tokens"]
        line = Text.assemble((f"{name}  {printable(trace)}", "bold"), "   ", printable("   ".join(facts)))
        console.print(line, soft_wrap=True)
    pairing, compared = result.pairing, result.compared
    parts = [f"{compared['tokens']:,} tokens", f"{compared['sampled']:,} sampled"]
    parts.append(f"KV bytes of {compared['kv']:,}" if "kv" in compared else "no KV bytes")
    aligned = (
        f"aligned by {pairing.by}: {pairing.pairs:,} requests of {pairing.a_requests:,} and {pairing.b_requests:,}"
    )
    console.print(Text(f"{aligned}   compared: {', '.join(parts)}", style="dim"), soft_wrap=True)
    for note in result.notes:
        console.print(Text(f"note  {printable(note)}", style="dim"), soft_wrap=True)
    console.print()
    console.print(_verdict(result), soft_wrap=True)
    if result.first is not None:
        console.print()
        console.print(Padding(_first(result.first), (0, 0, 0, 2), expand=False))
        console.print()
        console.print(Padding(_table(result), (0, 0, 0, 2), expand=False))
    words = result.timing.words()
    if words:
        console.print()
        console.print(Text("only in timing", style="dim"))
        for words_of in words:
            console.print(Text(f"  {words_of}"), soft_wrap=True)
    console.print()
    console.print(Text(_next(result), style="dim"), soft_wrap=True)


def _verdict(result: DiffResult) -> Text:
    text = Text(result.verdict.upper(), style=_STYLES.get(result.verdict, "bold green"))
    said = []
    if result.verdict == DIFFERENT:
        said.append(
            f"{result.num_different:,} of {max(result.pairing.a_requests, result.pairing.b_requests):,} requests"
        )
        counts = [
            f"{kind} {result.counts[kind]:,}" for kind in KINDS if kind in result.counts and kind in result.counted
        ]
        said.append(", ".join(counts))
    elif result.verdict != INCONCLUSIVE:
        said.append("no request differs" + ("" if result.timing.same else ", but for the timing below"))
    left = [f"{kind} {n:,}" for kind, n in result.counts.items() if kind not in result.counted and n]
    if left:
        said.append(f"not counted: {', '.join(left)}")
    text.append("   " + "   ".join(said), style="default not bold")
    if result.doubts:
        text.append("   " + printable("; ".join(result.doubts)), style="default not bold")
    return text


def _first(first: Difference) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    where = [f"forward {n:,} of {name}" for name, n in (("A", first.a_forward), ("B", first.b_forward)) if n >= 0]
    rows = [
        ("first difference", f"{first.kind}: {KINDS[first.kind]}"),
        ("request", _names(first)),
        ("what", first.words),
    ]
    if where:
        rows.append(("where", ", ".join(where)))
    for title, value in rows:
        grid.add_row(Text(title), Text(printable(value)))
    return grid


def _names(difference: Difference) -> str:
    names = [name for name in (difference.request, difference.partner) if name]
    if not names:
        return "none: a slot that no request of both traces wrote"
    return names[0] if len(set(names)) == 1 else f"{names[0]} in A, {names[1]} in B"


def _table(result: DiffResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title, justify in (("request", "left"), ("kind", "left"), ("position", "right"), ("forward A", "right")):
        table.add_column(title, justify="right" if justify == "right" else "left", no_wrap=title != "request")
    table.add_column("forward B", justify="right")
    table.add_column("what comes first", overflow="fold")
    for request in result.requests[:MAX_SHOWN]:
        first = request[0]
        later = f"   then {', '.join(d.kind for d in request[1:])}" if request[1:] else ""
        numbers = [f"{n:,}" if n >= 0 else "" for n in (first.position, first.a_forward, first.b_forward)]
        name = first.request or first.partner or "(no request)"
        table.add_row(*(Text(printable(t)) for t in (name[:24], first.kind, *numbers, first.words + later)))
    if result.num_different > MAX_SHOWN:
        table.add_row(Text(f"and {result.num_different - MAX_SHOWN:,} more"))
    return table


def _next(result: DiffResult) -> str:
    first = result.first
    if first is None:
        return "next   kvcanary-replay judges each trace by itself"
    trace = printable(shlex.quote(result.b))
    if first.kind in ("kv", "sampled") and "kv" in result.counts:
        return f"next   --kv-tolerance or --no-kv looks past rounding;   kvcanary-replay {trace}"
    return f"next   kvcanary-replay {trace}"
