"""The files of a report directory: those that grow during a replay, and the summary at its end."""

import json
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from ...recorder.files import ForeignFolderError, check_folder, read_small_file, replace_file
from ...recorder.trace.header import TraceHeader
from ..run.divergence import DIVERGENCE_SCHEMA
from .findings import FINDING_SCHEMA
from .merged.merging import MergingSink
from .summary import Summary
from .violations import VIOLATION_SCHEMA, TableSink

SUMMARY_NAME: Final = "summary.json"
STORE_NAME: Final = "report.duckdb"
PAGE_NAME: Final = "report.html"
# What a report holds, but for its page; analysis/ makes some of it.
REPORT_FILES: Final = (
    *(SUMMARY_NAME, "violations.parquet", "findings.parquet", "incidents.parquet", "incident_members.parquet"),
    *("swa_divergence.parquet", STORE_NAME),
)
STRETCH_PREFIX: Final = ".stretch-"  # folders of a report while its recording's stretches are replayed
_OWN_PREFIX: Final = ".kvcanary-"  # what is being made beside its place


def check_report_folder(report: Path) -> None:
    """Check that a folder may be written to: it is empty, or a report of ours.

    Raises `ForeignFolderError` if it is somebody else's, a link, or holds what no replay wrote; `OSError` if it cannot be read.
    """
    check_folder(report, _is_ours)
    try:
        summary = json.loads(read_small_file(report / SUMMARY_NAME))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError):  # too large, or damaged
        return
    if not isinstance(summary, dict) or not {"trace", "trace_id", "verdict"} <= summary.keys():
        raise ForeignFolderError(f"its {SUMMARY_NAME} is not kvcanary's")


def _is_ours(name: str, mode: int) -> bool:
    if stat.S_ISDIR(mode):
        return name.startswith((STRETCH_PREFIX, _OWN_PREFIX))
    if not stat.S_ISREG(mode):
        return False
    known = name.removesuffix(".partial") in (*REPORT_FILES, PAGE_NAME) or name.startswith(_OWN_PREFIX)
    return known or name.endswith(".arrow")  # a trace may lie beside its report's files


def write_summary(summary: Summary, report: Path) -> None:
    """Write a report's `summary.json`; raises `OSError`."""
    replace_file(report / SUMMARY_NAME, summary.to_json_text().encode())


class ReportSinks:
    """Violations, findings, and for traces with a full-to-SWA table the divergence figures.

    `merging` takes the violations in place of `violations` where `merge`, the trace's header, is given and a folder.
    """

    def __init__(self, folder: Path | None, *, sliding: bool, merge: TraceHeader | None = None) -> None:
        path = folder / "violations.parquet" if folder else None
        self.merging = MergingSink(path, merge) if path is not None and merge is not None else None
        self.violations = TableSink(None if self.merging is not None else path, VIOLATION_SCHEMA)
        self.findings = TableSink(folder / "findings.parquet" if folder else None, FINDING_SCHEMA)
        path = folder / "swa_divergence.parquet" if folder and sliding else None
        self.divergence = TableSink(path, DIVERGENCE_SCHEMA)

    def close(self) -> None:
        """Write what is pending and the files' ends; every file is closed even where one cannot be written."""
        with ExitStack() as stack:
            for sink in (self.divergence, self.findings, self.violations, self.merging):
                if sink is not None:
                    stack.callback(sink.close)
