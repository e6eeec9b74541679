"""What a replay finds, on its way into the files of a report directory: those that grow, and the summary at the end."""

import json
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from ...recorder.files import ForeignFolderError, check_folder, read_small_file, replace_file
from ...recorder.state.forward import Forward
from ...recorder.state.requests import RequestTable
from ...recorder.trace.header import TraceHeader
from ..run.derived import Derived
from ..run.divergence import DIVERGENCE_SCHEMA, ROWS_AT_ONCE, SwaDivergence
from ..run.planning import Sweep
from .findings import FINDING_SCHEMA, Finding, finding_table
from .merged.merging import MergingSink
from .summary import Summary, Tally
from .violations import ROWS_PER_SLOT, VIOLATION_SCHEMA, LaunchViolations, RowLimit, TableSink, violation_table

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

# Violations go on in tables of about this many rows: a table for each launch would cost more than the launch.
PENDING_ROWS: Final = 16_384


def check_report_folder(report: Path) -> None:
    """Raise `ForeignFolderError` if a folder is neither empty nor a report of ours, `OSError` if it cannot be read."""
    check_folder(report, _is_ours)
    try:
        summary = json.loads(read_small_file(report / SUMMARY_NAME))
    except (OSError, ValueError, RecursionError):  # not there, too large, or damaged
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
    replace_file(report / SUMMARY_NAME, (json.dumps(summary.to_json(), indent=2) + "\n").encode())


class ReportSinks:
    """Violations, findings, and divergence figures; `merging` takes the violations if `merge`, the header, is given."""

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


class ResultCollector:
    """Takes what launches and checks find in one trace, in their order; nothing is left behind after `flush`."""

    def __init__(self, summary: Summary, sinks: ReportSinks, request_table: RequestTable, *, all_rows: bool) -> None:
        self._summary = summary
        self._sinks = sinks
        self._request_table = request_table
        self._tally = Tally(summary)
        self._derived = Derived(summary.header)
        self._launches: list[LaunchViolations] = []
        self._left_out: list[LaunchViolations] = []
        self._limit = RowLimit(summary.header.groups, per_slot=None if all_rows else ROWS_PER_SLOT)
        self._pending_rows = 0

    def begin(self, what: Forward | Sweep) -> None:
        """Say which forward or sweep is stepped next."""
        if self._sinks.merging is not None:
            self._sinks.merging.begin(what)

    def done(self) -> None:
        """Say that the forward or sweep is over."""
        if self._sinks.merging is not None:
            self._sinks.merging.done()

    def part(self) -> None:
        """Let no row go on over what comes now: an event that cannot be judged, a gap."""
        if self._sinks.merging is not None:
            self._sinks.merging.part()

    def violations(self, launch: LaunchViolations) -> None:
        """Take what one launch found, as far as it may be judged."""
        launch = self._derived.violations(launch)
        if not len(launch.rows):
            return
        if self._sinks.merging is not None:
            launch = self._sinks.merging.with_turns(launch)
        self._summary.violations += len(launch.rows)
        self._pending_rows += len(launch.rows)
        wanted = self._limit.wanted(launch)
        if wanted is None:
            self._launches.append(launch)
        else:
            self._left_out.append(launch.take(~wanted))
            if wanted.any():
                self._launches.append(launch.take(wanted))
        if self._pending_rows >= PENDING_ROWS:
            self.pass_on()

    def findings(self, findings: list[Finding]) -> None:
        """Take findings, if there are any that may be judged."""
        findings = self._derived.findings(findings)
        if findings:
            self._sinks.findings.append(finding_table(findings))
            self._tally.findings(findings)

    def divergence(self, figures: SwaDivergence, *, at_least: int = ROWS_AT_ONCE) -> None:
        """Take the divergence figures since the last time, where there are so many."""
        table = figures.take_table(at_least=at_least)
        if table is not None:
            self._sinks.divergence.append(table)

    def flush(self, figures: SwaDivergence) -> None:
        """Pass on all that is pending."""
        self.pass_on()
        self.divergence(figures, at_least=1)

    def pass_on(self) -> None:
        """Pass on and count the violations that are pending."""
        launches, left_out = self._launches, self._left_out
        if launches:
            table = violation_table(launches, self._request_table)  # Ctrl-C in here loses none: they are pending still
        self._launches, self._left_out = [], []
        self._pending_rows = 0
        if launches:
            if self._sinks.merging is not None:
                table = self._sinks.merging.append(table, launches)
            else:
                self._sinks.violations.append(table)
            self._limit.kept(table)
        if launches or left_out:
            self._tally.violations([*launches, *left_out], self._request_table)
        self._summary.violations_left_out += sum(len(launch.rows) for launch in left_out)
