"""`kvcanary expand`: a report's merged violations as one row a forward."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ...recorder.cli.program import GivenPath

if TYPE_CHECKING:
    import pyarrow as pa

    from ..store.sources import Source

EXIT_FAILED = 2
OUTPUT_NAME: Final = "violation_forwards.parquet"

_EPILOG = """\b
Examples:
  kvcanary expand trace.report
      writes trace.report/violation_forwards.parquet
  kvcanary expand trace.report -o rows.parquet
  kvcanary expand trace.report --trace /mnt/traces/trace.arrow
      where the trace is no longer where it was replayed
  kvcanary sql trace.report "from violation_forwards where forward = 18204"
      the same rows in SQL, in no order, without writing them all

\b
Exit codes: 0 written, 2 wrong usage, an unreadable report, or a report of another trace.
"""


@click.command("expand", epilog=_EPILOG)
@click.argument("report", metavar="REPORT", type=GivenPath())
@click.option(
    "-o",
    "--output",
    type=GivenPath(dir_okay=False),
    help=f"The Parquet file to write. [default: REPORT/{OUTPUT_NAME}]",
)
@click.option("--trace", type=GivenPath(), help="Where the report's trace is now, if it has moved.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def expand_command(report: Path, output: Path | None, trace: Path | None, as_json: bool) -> None:
    """Write a report's violations as one row a forward, as stepwise replay would have.

    What is wrong is found anew by every forward that reads it. A report of an interval replay (kvcanary-replay
    --executor interval) holds such rows once, with first_forward, last_forward and num_forwards. This writes them out
    again, row for row and in the order in which the launches found them, for tools that count rows. The trace is read
    once; of a report of a stepwise replay the rows are copied as they are.
    """
    from ...recorder.errors import TraceError, printable, printable_message
    from ...replayer.report.merged.expansion import ExpansionError
    from ..errors import AnalysisError
    from ..store.output import spare
    from ..store.sources import find_sources

    try:
        [source] = find_sources([report], trace=trace)
        folder = _with_trace(source, report)
        target = output or folder / OUTPUT_NAME
        spare(source.kept, target)
        expected = (source.summary or {}).get("violations")
        made = _write(folder, source.files, target, expected if isinstance(expected, int) else None)
    except (AnalysisError, ExpansionError, TraceError) as error:
        click.echo(f"Error: {printable_message(str(error))}", err=True)
        sys.exit(EXIT_FAILED)
    if as_json:
        click.echo(json.dumps({"report": str(report), "output": str(target), **made}))
    else:
        click.echo(printable(f"{made['rows']:,} rows of {made['merged_rows']:,} merged ones in {target}"))


def _with_trace(source: Source, named: Path) -> Path:
    """Return the report's folder; raise `AnalysisError` if it or its trace is not at hand."""
    from ..errors import AnalysisError

    if source.report is None:
        raise AnalysisError(f"{named}: a trace without a report; name the folder that kvcanary-replay wrote")
    if source.trace is None:
        raise AnalysisError(f"{source.problem}; name the place that it has moved to with --trace")
    return source.report


def _write(report: Path, traces: tuple[Path, ...], target: Path, total: int | None) -> dict[str, Any]:
    """Write the file; nobody sees half of it, and only its owner may read it."""
    import pyarrow.parquet as pq

    from ...replayer.report.merged.expansion import expand_tables, read_violations
    from ...replayer.report.violations import VIOLATION_SCHEMA
    from ..errors import AnalysisError
    from ..incidents.places import open_parquet, require_columns
    from ..store.output import private_output

    merged = rows = 0

    def counted(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        nonlocal merged
        for table in tables:
            merged += table.num_rows
            yield table

    path = report / "violations.parquet"
    if path.is_file():
        with open_parquet(path) as found:
            require_columns(path, found, VIOLATION_SCHEMA.names)
    try:
        with private_output(target) as file, pq.ParquetWriter(file, VIOLATION_SCHEMA, compression="zstd") as made:
            tables = expand_tables(counted(read_violations(path)), traces)
            for table in _shown(tables, total):
                rows += table.num_rows
                made.write_table(table)
    except OSError as error:
        raise AnalysisError(f"{target}: cannot be written ({error.strerror or error}); name another with -o") from None
    return {"rows": rows, "merged_rows": merged}


def _shown(tables: Iterator[pa.Table], total: int | None) -> Iterator[pa.Table]:
    """Show how far it has come, on a terminal."""
    if not sys.stderr.isatty():
        yield from tables
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("expand"), BarColumn(), MofNCompleteColumn(), TextColumn("rows")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("expand", total=total)
        for table in tables:
            yield table
            bar.advance(task, table.num_rows)
