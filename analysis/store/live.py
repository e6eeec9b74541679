"""The library over traces and reports where they lie: nothing is imported, every query reads the files."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...recorder.files import is_regular
from ...recorder.trace.schema import trace_schema
from ...replayer.report.findings import ADDED_COLUMNS, FINDING_SCHEMA
from ...replayer.report.violations import VIOLATION_SCHEMA
from ..errors import AnalysisError
from ..incidents.finding import incidents_fit
from ..incidents.schema import INCIDENT_SCHEMA, MEMBER_SCHEMA
from .header_tables import HEADER_SCHEMAS, coverage_rows, header_rows, summary_rows
from .sources import Source
from .trace_scan import plain_path, scan_trace

# DuckDB takes a trace, whose number of rows it does not know, for a few rows, and would join as of by trying all pairs.
NO_LOOP_JOIN = "set asof_loop_join_threshold = 0"

_REPORT_FILES = {"violations": VIOLATION_SCHEMA, "findings": FINDING_SCHEMA}
# What reports did not have from the beginning, and sql/base/violations.sql has without them.
_ADDED = ADDED_COLUMNS | {"first_forward", "last_forward", "num_forwards"}
_INCIDENT_FILES = {"incidents": INCIDENT_SCHEMA, "incident_members": MEMBER_SCHEMA}


def quoted(text: str) -> str:
    """Return text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def make_raw_relations(connection: Any, sources: Sequence[Source], resources: ExitStack) -> list[str]:
    """Give a connection `raw_events`, `raw_violations`, `raw_findings` and the header's tables, of all sources.

    Returns:
        The files that DuckDB itself goes on reading.

    Raises:
        AnalysisError: a trace or a report cannot be read.
    """
    plain = {s.report: plain_path(s.report, resources) for s in sources if s.report is not None}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in HEADER_SCHEMAS}
    events: list[str] = []
    for number, source in enumerate(sources):
        if source.trace is None:
            found = summary_rows(source.name, source.summary or {})
        else:
            scan = scan_trace(source.files, resources)
            connection.register(f"raw_events_{number}", scan.events)
            events.append(f"select {quoted(source.name)} as trace, * from raw_events_{number}")
            found = header_rows(source.name, source.trace, scan.header, complete=scan.complete, gaps=scan.gaps)
        found["_coverage"] = coverage_rows(source.name, source.summary or {})
        for name, new in found.items():
            rows[name] += new
    connection.register("_no_events", trace_schema().empty_table())
    events.append("select ''::varchar as trace, * from _no_events")
    _view(connection, "raw_events", events)
    for name, schema in HEADER_SCHEMAS.items():
        connection.register(name, pa.Table.from_pylist(rows[name], schema=schema))
    for name, schema in _REPORT_FILES.items():
        connection.register(f"_no_{name}", schema.empty_table())
        parts = [
            f"select {quoted(s.name)} as trace, * from {_parquet(plain[s.report], name)}" for s in sources if s.report
        ]
        for source in sources:
            if source.report:
                relation = _parquet(plain[source.report], name)
                _check_columns(connection, source.report / f"{name}.parquet", relation, name)
        parts.append(f"select ''::varchar as trace, *, 0::bigint as file_row_number from _no_{name}")
        _view(connection, f"_all_{name}", parts)
        connection.execute(
            f'create temp view raw_{name} as select * exclude ("group", file_row_number), "group" as pool_group, '
            f"file_row_number as number from _all_{name}"
        )
    with_incidents = [s for s in sources if s.report is not None and incidents_fit(s.report)]
    for name, schema in _INCIDENT_FILES.items():
        connection.register(f"_no_{name}", schema.empty_table())
        parts = [
            f"select {quoted(s.name)} as trace, * from {_file(plain[s.report], name)}"
            for s in with_incidents
            if s.report
        ]
        parts.append(f"select ''::varchar as trace, * from _no_{name}")
        _view(connection, f"raw_{name}", parts)
    names = (*_REPORT_FILES, *_INCIDENT_FILES)
    return [str(folder / f"{name}.parquet") for folder in plain.values() for name in names]


def _view(connection: Any, name: str, parts: list[str]) -> None:
    connection.execute(f"create temp view {name} as " + "\nunion all by name\n".join(parts))


def _parquet(report: Path, name: str) -> str:
    path = report / f"{name}.parquet"
    if not is_regular(path):
        raise AnalysisError(f"{path}: missing, or no regular file; the report is incomplete, so replay the trace again")
    return f"read_parquet({quoted(str(path))}, file_row_number = true)"


def _check_columns(connection: Any, path: Path, relation: str, name: str) -> None:
    """Refuse a report's file that lacks a column, or has text where numbers belong: numbers stand in later queries."""
    expected, found = (
        dict(connection.execute(f"select column_name, column_type from (describe from {of})").fetchall())
        for of in (f"_no_{name}", relation)
    )
    missing = sorted(expected.keys() - found.keys() - _ADDED)
    if missing:
        raise AnalysisError(
            f"{path}: expected the columns of a report, {', '.join(missing)} missing; replay the trace again"
        )
    wrong = [column for column, kind in expected.items() if "INT" in kind and "INT" not in found.get(column, "INT")]
    if wrong:
        raise AnalysisError(
            f"{path}: expected numbers in {', '.join(wrong)}, came {found[wrong[0]]}; replay the trace again"
        )


def _file(report: Path, name: str) -> str:
    return f"read_parquet({quoted(str(report / f'{name}.parquet'))})"
