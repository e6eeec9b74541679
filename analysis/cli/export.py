"""`kvcanary export`: a trace in the format of another tool."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...recorder.cli.program import GivenPath
from . import errors_end, say

_EPILOG = """\b
Examples:
  kvcanary export trace.report --perfetto trace.pftrace
      open it at https://ui.perfetto.dev, which reads it in the browser and sends it nowhere
  kvcanary export /traces/ --perfetto all.pftrace
      a process for each trace

\b
Exit codes: 0 written, 2 wrong usage, an unreadable trace, or perfetto's package is missing.
"""


@click.command("export", epilog=_EPILOG)
@click.argument("sources", nargs=-1, required=True, metavar="TRACE_OR_REPORT...", type=GivenPath(url=True))
@click.option(
    "--perfetto", type=GivenPath(dir_okay=False), metavar="FILE", required=True, help="Write a Perfetto trace."
)
@click.option("--json", "as_json", is_flag=True, help="Print path, packets and size as JSON.")
def export_command(sources: tuple[Path, ...], perfetto: Path, as_json: bool) -> None:
    """Write traces for Perfetto's UI: forwards, requests, slots held and evicted, damage and incidents on a time line.

    A trace goes with the report beside it. Requests that an incident hit have tracks of their own. Nobody records when a forward
    ends, so it is shown up to the next one.
    """
    from ..perfetto import export_perfetto
    from ..store.output import spare
    from ..store.sources import find_sources, named_in

    with errors_end():
        found = find_sources([source for path in sources for source in named_in(path)])
        spare([path for source in found for path in source.kept], perfetto)
        packets = export_perfetto(found, perfetto)
    size = perfetto.stat().st_size
    if as_json:
        click.echo(json.dumps({"perfetto": str(perfetto), "packets": packets, "bytes": size}))
    else:
        say(f"wrote   {perfetto}   {packets:,} packets, {size / 1e6:.1f} MB   open it at https://ui.perfetto.dev")
