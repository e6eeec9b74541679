"""The incidents of a report for whoever asks for them: found anew where its trace is at hand, else as they were found with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...recorder.errors import TraceError
from ...recorder.trace.reader import TraceReader
from ..errors import AnalysisError
from ..incidents.finding import Incidents, find_incidents, member_tables, read_incidents, trace_files, write_incidents
from ..incidents.places import open_parquet
from ..incidents.schema import MEMBERS_NAME
from .sources import Source, find_sources


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportIncidents:
    """A report's incidents as rows of `INCIDENT_SCHEMA`, the report with its trace, and what a user should know of them."""

    rows: list[dict[str, Any]]
    source: Source
    summary: dict[str, Any]
    notes: tuple[str, ...]
    unwritten: Incidents | None

    def members(self, report: Path) -> pa.Table:
        """Return which rows of the report belong to which incident, as in `MEMBER_SCHEMA`; raise `AnalysisError`."""
        if self.unwritten is not None:
            return pa.concat_tables(member_tables(report, self.unwritten))
        with open_parquet(report / MEMBERS_NAME) as file:
            return file.read()


def incidents_of(report: Path, trace: Path | None) -> ReportIncidents:
    """Return a report's incidents, and write them into it if it may be written; `trace` is where its trace is now, if it has
    moved. Raises `AnalysisError`.
    """
    [source] = find_sources([report], trace=trace)
    summary = source.summary or {}  # a report has one
    traces, why = list(source.files), source.problem
    if source.segments:  # all that lie there, also those before the report's: they show how it came to that
        whole = source.segments[0].with_name(Path(summary["trace"]).name)
        traces, why = trace_files(whole, str(summary.get("trace_id"))), ""
    torn = _torn_since(summary, traces)
    rows, notes, unwritten = None if traces and not torn else read_incidents(report), [], None
    then = "so the kinds are less certain" if rows is None else "so what was found before is shown"
    if rows is None:
        found = find_incidents(report, traces)
        rows = found.rows
        try:
            write_incidents(report, found)
        except AnalysisError as error:  # a report that may only be read is shown all the same
            unwritten = found
            notes.append(str(error))
    if why or torn:
        why = torn or f"{why}: the trace is not at hand"
        notes.append(f"{why}, {then} (--trace says where it is now)")
    return ReportIncidents(rows=rows, source=source, summary=summary, notes=tuple(notes), unwritten=unwritten)


def _torn_since(summary: dict[str, Any], traces: list[Path]) -> str:
    """Say which file of a trace that was whole when it was replayed has lost its end since; "" for none."""
    if summary.get("complete") is not True:
        return ""
    for path in traces:
        try:
            with TraceReader(path) as reader:
                whole = reader.complete
        except TraceError:
            whole = False
        if not whole:
            return f"{path}: torn, and was whole when it was replayed"
    return ""
