"""What comes after a replay that found something: its incidents, in the report and its summary, and its page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # a clean replay needs none of it, and --help does not wait for it
    from ..replayer.report.summary import Summary

# What summary.json says of incidents; incidents.parquet has all.
MAX_IN_SUMMARY: Final = 100
_LISTED_IN_SUMMARY: Final = 20
_MAX_WHEN_INTERRUPTED: Final = 200_000  # violations and findings: who ends a replay does not wait for more
# Above this report.duckdb takes minutes: nobody should wait for that who only wants the verdict.
MAX_TOKENS_AT_ONCE: Final = 20_000_000


def finish(summary: Summary) -> str:
    """Find a replay's incidents, write them into its report and summary, and return what to say to the user.

    A replay without a report has none, nor has one that found nothing; what an earlier replay left there goes.
    """
    if summary.report is None:
        return ""
    from ..recorder.remote import as_path
    from ..replayer.report.report import write_summary
    from .errors import AnalysisError
    from .incidents.schema import INCIDENTS_NAME, MEMBERS_NAME

    report = Path(summary.report)
    kept = summary.violations - summary.violations_left_out
    too_many = summary.stopped.startswith("interrupted") and kept + summary.findings > _MAX_WHEN_INTERRUPTED
    try:
        if too_many or not (summary.violations or summary.findings):
            for name in (INCIDENTS_NAME, MEMBERS_NAME):
                (report / name).unlink(missing_ok=True)
            return f"no incidents yet: kvcanary incidents {shlex.quote(summary.report)} finds them" if too_many else ""
        from .incidents.finding import find_incidents, trace_files, write_incidents

        found = find_incidents(report, trace_files(as_path(summary.trace), summary.header.trace_id))
        write_incidents(report, found)
        summary.num_incidents = len(found.rows)
        summary.incidents = [_short(row) for row in found.rows[:MAX_IN_SUMMARY]]
        write_summary(summary, report)
    except (AnalysisError, OSError) as error:
        return f"the incidents are missing: {error}"
    return ""


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: row[name][:_LISTED_IN_SUMMARY] for name in ("requests", "request_ids", "slots")}


def add_page(summary: Summary, *, wanted: bool) -> str:
    """Write the page of a replay that found something, drop what was made of an earlier one, and return what to say to the user."""
    if summary.report is None:
        return ""
    from ..recorder.errors import first_line
    from ..replayer.report.report import EXPANDED_NAME, PAGE_NAME
    from .errors import AnalysisError, NoPlotLibraryError

    report = Path(summary.report)
    again = f"kvcanary page {shlex.quote(summary.report)}"
    try:
        for name in (PAGE_NAME, EXPANDED_NAME):
            (report / name).unlink(missing_ok=True)
        if not wanted or not (summary.violations or summary.findings):
            return ""
        if summary.tokens > MAX_TOKENS_AT_ONCE:
            return f"no {PAGE_NAME} yet: {summary.tokens:,} tokens take a while; {again} makes it"
        # loaded when there is a page to make: DuckDB takes its time
        from .page.build import build_page
        from .store.sources import find_sources

        [source] = find_sources([report])
        build_page(source)
    except NoPlotLibraryError as error:
        return f"no {PAGE_NAME}: {error}"
    except (AnalysisError, OSError) as error:
        return f"no {PAGE_NAME}: {first_line(error)}; {again} tries again"
    except KeyboardInterrupt:  # the verdict stands
        return f"no {PAGE_NAME}: interrupted; {again} makes it"
    return ""
