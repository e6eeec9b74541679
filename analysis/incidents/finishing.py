"""What comes after a corrupt replay: its incidents go into the report, and into its summary."""

import shlex
from pathlib import Path
from typing import Any, Final

from ...recorder.errors import TraceError
from ...recorder.trace.files import split_segment_name
from ...recorder.trace.reader import TraceReader
from ...replayer.report.report import write_summary
from ...replayer.report.summary import Summary
from ..errors import AnalysisError
from .schema import INCIDENTS_NAME, MEMBERS_NAME

# What summary.json says of them; incidents.parquet has all.
MAX_IN_SUMMARY: Final = 100
_LISTED_IN_SUMMARY: Final = 20
_MAX_WHEN_INTERRUPTED: Final = 200_000  # violations and findings: who ends a replay does not wait for more


def add_incidents(summary: Summary) -> str:
    """Find the incidents of a replay that left a report, and write them there.

    A replay without a report has none, nor has one that found nothing; what an earlier replay left there goes.

    Returns:
        What to tell the user, "" for nothing.
    """
    if summary.report is None:
        return ""
    report = Path(summary.report)
    try:
        if not summary.violations and not summary.findings:
            for name in (INCIDENTS_NAME, MEMBERS_NAME):
                (report / name).unlink(missing_ok=True)
            return ""
        kept = summary.violations - summary.violations_left_out
        if summary.stopped.startswith("interrupted") and kept + summary.findings > _MAX_WHEN_INTERRUPTED:
            for name in (INCIDENTS_NAME, MEMBERS_NAME):
                (report / name).unlink(missing_ok=True)
            return f"no incidents yet: kvcanary incidents {shlex.quote(summary.report)} finds them"
        from .finding import find_incidents, write_incidents  # a clean replay needs none of it

        found = find_incidents(report, trace_files(Path(summary.trace), summary.header.trace_id))
        write_incidents(report, found)
        summary.num_incidents = len(found.rows)
        summary.incidents = in_summary(found.rows)
        write_summary(summary, report)
    except (AnalysisError, OSError) as error:
        return f"the incidents are missing: {error}"
    return ""


def in_summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows as summary.json has them: the first, with short lists."""
    short = []
    for row in rows[:MAX_IN_SUMMARY]:
        lists = {name: row[name][:_LISTED_IN_SUMMARY] for name in ("requests", "request_ids", "slots")}
        short.append({**row, **lists})
    return short


def trace_files(trace: Path, trace_id: str) -> list[Path]:
    """Return a trace's file, or, where it was recorded in segments, all that can be read there, in order; [] for none.

    Files that only have its name, with another id, are left out, and so are those of which nothing can be read.
    """
    if trace.is_file() and _is_of(trace, trace_id):
        return [trace]
    found = []
    if trace.parent.is_dir():
        for path in trace.parent.iterdir():
            split = split_segment_name(path)
            if split is not None and f"{split[0]}.arrow" == trace.name and _is_of(path, trace_id):
                found.append((split[1], path))
    return [path for _, path in sorted(found)]


def _is_of(path: Path, trace_id: str) -> bool:
    try:
        with TraceReader(path) as reader:
            return reader.header.trace_id == trace_id
    except TraceError:
        return False
