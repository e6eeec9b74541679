"""What comes after a corrupt replay: its page."""

import shlex
from pathlib import Path
from typing import Final

from ...replayer.report.report import PAGE_NAME
from ...replayer.report.summary import Summary
from ..errors import AnalysisError
from .plots import NoPlotLibraryError

# Above this report.duckdb takes minutes: nobody should wait for that who only wants the verdict.
MAX_TOKENS_AT_ONCE: Final = 20_000_000


def add_page(summary: Summary, *, wanted: bool) -> str:
    """Write the page of a replay that left a report and found something; an earlier replay's page goes in any case.

    Returns:
        What to tell the user, "" for nothing.
    """
    if summary.report is None:
        return ""
    report = Path(summary.report)
    again = f"kvcanary page {shlex.quote(summary.report)}"
    try:
        (report / PAGE_NAME).unlink(missing_ok=True)
        if not wanted or not (summary.violations or summary.findings):
            return ""
        if summary.tokens > MAX_TOKENS_AT_ONCE:
            return f"no {PAGE_NAME} yet: {summary.tokens:,} tokens take a while; {again} makes it"
        # loaded when there is a page to make: DuckDB takes its time
        from ..store.sources import find_sources
        from .build import build_page

        [source] = find_sources([report])
        build_page(source)
    except NoPlotLibraryError as error:
        return f"no {PAGE_NAME}: {error}"
    except (AnalysisError, OSError) as error:
        first = (str(error).splitlines() or [""])[0]  # of DuckDB's several
        return f"no {PAGE_NAME}: {first}; {again} tries again"
    except KeyboardInterrupt:  # the verdict stands
        return f"no {PAGE_NAME}: interrupted; {again} makes it"
    return ""
