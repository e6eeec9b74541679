"""`kvcanary expand`: a report's merged violations as one row a forward."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...recorder.cli.program import GivenPath
from ..errors import AnalysisError
from . import errors_end, report_argument, say, trace_option

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa


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
@report_argument
@click.option(
    "-o",
    "--output",
    type=GivenPath(dir_okay=False),
    help="The Parquet file to write. [default: REPORT/violation_forwards.parquet]",
)
@trace_option
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def expand_command(report: Path, output: Path | None, trace: Path | None, as_json: bool) -> None:
    """Write a report's violations as one row a forward, as stepwise replay would have.

    What is wrong is found anew by every forward that reads it. A report of an interval replay (kvcanary-replay
    --executor interval) holds such rows once, with first_forward, last_forward and num_forwards. This writes them out
    again, row for row and in the order in which the launches found them, for tools that count rows. The trace is read
    once; of a report of a stepwise replay the rows are copied as they are.
    """
    from ...recorder.errors import TraceError
    from ...replayer.report.report import EXPANDED_NAME
    from ..store.output import spare
    from ..store.sources import find_sources

    with errors_end(TraceError):
        [source] = find_sources([report], trace=trace)
        if source.report is None:
            raise AnalysisError(f"{report}: a trace without a report; name the folder that kvcanary-replay wrote")
        if source.trace is None:
            raise AnalysisError(f"{source.problem}; name the place that it has moved to with --trace")
        target = output or source.report / EXPANDED_NAME
        spare(source.kept, target)
        expected = (source.summary or {}).get("violations")
        made = _write(source.report, source.files, target, expected if isinstance(expected, int) else None)
    if as_json:
        click.echo(json.dumps({"report": str(report), "output": str(target), **made}))
    else:
        say(f"{made['rows']:,} rows of {made['merged_rows']:,} merged ones in {target}")


def _write(report: Path, traces: tuple[Path, ...], target: Path, total: int | None) -> dict[str, Any]:
    """Write the file; nobody sees half of it, and only its owner may read it."""
    import pyarrow.parquet as pq

    from ...replayer.report.violations import VIOLATION_SCHEMA
    from ..store.expansion import expand_tables, read_violations
    from ..store.output import private_output

    made = {"rows": 0, "merged_rows": 0}

    def counted(tables: Iterable[pa.Table], name: str) -> Iterator[pa.Table]:
        for table in tables:
            made[name] += table.num_rows
            yield table

    merged = counted(read_violations(report / "violations.parquet"), "merged_rows")
    try:
        with (
            private_output(target) as file,
            pq.ParquetWriter(file, VIOLATION_SCHEMA, compression="zstd") as writer,
            closing(expand_tables(merged, traces)) as tables,
        ):
            for table in _shown(counted(tables, "rows"), total):
                writer.write_table(table)
    except OSError as error:
        raise AnalysisError(f"{target}: cannot be written ({error.strerror or error}); name another with -o") from None
    return made


def _shown(tables: Iterator[pa.Table], total: int | None) -> Iterator[pa.Table]:
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
