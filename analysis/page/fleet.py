"""The page of a fleet: what its table of reports says, day by day, node by node, and where each recording's own page is."""

import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from ...recorder.remote import RemotePath, as_path
from ...replayer.report.report import PAGE_NAME
from ..errors import AnalysisError
from ..store.output import private_output
from ..store.report_rows import is_table
from ..store.reports_table import ReportsTable, open_table
from .ask import Ask
from .build import page_document, plot_library

SCRIPTS: Final = ("dom.js", "fleet_state.js", "sql.js", "rows.js", "plots.js", "theme.js", "fleet.js")
MAX_ROWS: Final = 400  # of a table of the page
MAX_CELLS: Final = 3000  # of the map of nodes

_LATEST: Final = f"order by began desc nulls last, report_id limit {MAX_ROWS}"
_QUERIES: Final = {
    "by_day": "from kinds_by_day",
    "days": "select day, sum(reports)::bigint as reports, sum(clean)::bigint as clean, sum(corrupt)::bigint as corrupt, "
    "sum(inconclusive)::bigint as inconclusive from judged group by day order by day",
    "nodes": f"from nodes_by_version order by corrupt desc, node, engine, version limit {MAX_CELLS}",
    "ranks": f"from kinds_by_node limit {MAX_ROWS}",
    "recorded": f"from recorded order by day desc, fleet limit {MAX_ROWS}",
    "requests_hit": f"from requests_hit order by day desc, engine, version, model limit {MAX_ROWS}",
    "recordings_hit": f"from recordings_hit order by day desc, engine, version, model limit {MAX_ROWS}",
    "new_kinds": f"from new_kinds limit {MAX_ROWS}",
    "kinds": f"from kinds_by_version order by first_seen desc, kind limit {MAX_ROWS}",
}
_NUMBERS: Final = {
    "recordings": "select count(*) from reports",
    "corrupt": "select count(*) from reports where verdict = 'corrupt'",
    "inconclusive": "select count(*) from reports where verdict = 'inconclusive'",
    "incidents": "select coalesce(sum(num_incidents), 0)::bigint from reports",
    "nodes": "select count(distinct node) from reports",
    "new kinds": "select count(distinct kind) from new_kinds",
    "lost events": "select coalesce(sum(lost_events), 0)::bigint from reports",
}
_RECORDINGS: Final = (
    "select day, node, tp_rank as rank, engine, version, model, verdict, requests, num_requests_hit as hit, num_incidents as incidents, "
    "incidents[1].kind as first_kind, trace, report from _reports "
)


def build_fleet_page(table: Path, target: Path) -> tuple[Path, tuple[str, ...]]:
    """Write the page of a table of reports, for this user only; return its path, and which of the table's files were left out.

    Raises `AnalysisError`, without vl-convert `NoPlotLibraryError`, `OSError` for a store that cannot be asked.
    """
    if not is_table(table):
        raise AnalysisError(f"{table}: no table of reports; make one with kvcanary collect")
    if not target.parent.is_dir():
        raise AnalysisError(f"{target.parent}: no such folder; make it, or name another place with -o")
    library = plot_library()
    with open_table(table) as session:
        page = page_document(_content(session, table, target), library, scripts=SCRIPTS, html="fleet.html")
        problems = session.problems
    try:
        with private_output(target) as file:
            file.write(page.encode())
    except OSError as error:
        raise AnalysisError(f"{target}: cannot be written ({error.strerror or error}); name another with -o") from None
    return target, problems


def _content(session: ReportsTable, table: Path, target: Path) -> dict[str, Any]:
    from ... import __version__

    ask = Ask(session)
    recordings = ask.table(f"{_RECORDINGS} where verdict <> 'clean' {_LATEST}")
    at = recordings["columns"].index("report")
    return {
        "report": str(table),  # what SQL is asked of
        "version": __version__,
        "limits": {"rows": MAX_ROWS, "cells": MAX_CELLS},
        "numbers": {name: ask.number(sql) for name, sql in _NUMBERS.items()},
        "tables": {name: ask.table(sql) for name, sql in _QUERIES.items()},
        "recordings": recordings,
        "links": [_link(report, target) for report in recordings["data"][at]],
        "problems": [problem[:400] for problem in session.problems[:20]],
        "queries": ask.queries,
    }


def _link(report: str | None, target: Path) -> str | None:
    """Return the way from the fleet's page to a recording's own, None if it is not on this machine."""
    path = as_path(report) if report else None
    if path is None or isinstance(path, RemotePath) or not os.path.isfile(path / PAGE_NAME):  # noqa: PTH113  # False too for what we may not see
        return None
    return "./" + quote(os.path.relpath(path / PAGE_NAME, target.absolute().parent))
