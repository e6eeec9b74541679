"""What a replay finds, on its way into the files of a report directory: those that grow, and the summary at the end."""

import dataclasses
import json
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from ...kernels.constants import FailReason, LaunchTag
from ...recorder.files import ForeignFolderError, check_folder, read_small_file, replace_file
from ...recorder.state.forward import Forward
from ...recorder.state.requests import RequestTable
from ..run.derived import Derived
from ..run.divergence import DIVERGENCE_SCHEMA, ROWS_AT_ONCE, SwaDivergence
from ..run.planning import Sweep
from ..run.settings import ReplaySettings
from .findings import FINDING_SCHEMA, Finding, finding_table
from .injected import InjectedFaults
from .merged.merging import MergingSink
from .summary import NOBODY, Summary, add
from .violations import ROWS_PER_SLOT, VIOLATION_SCHEMA, LaunchViolations, RowLimit, TableSink, violation_table

SUMMARY_NAME: Final = "summary.json"
STORE_NAME: Final = "report.duckdb"
PAGE_NAME: Final = "report.html"
EXPANDED_NAME: Final = "violation_forwards.parquet"  # `kvcanary expand` writes it
# What a report holds, but for its page and its expanded rows; analysis/ makes some of it.
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
    known = name.removesuffix(".partial") in (*REPORT_FILES, PAGE_NAME, EXPANDED_NAME) or name.startswith(_OWN_PREFIX)
    return known or name.endswith(".arrow")  # a trace may lie beside its report's files


def write_summary(summary: Summary, report: Path) -> None:
    """Write a report's `summary.json`; raises `OSError`."""
    replace_file(report / SUMMARY_NAME, (json.dumps(summary.to_json(), indent=2) + "\n").encode())


class Results:
    """Takes what launches and checks find in one trace, in their order, into its summary and the files of `folder`, if there is one.

    `request_table` knows the names of requests, `request_ids` are those that forwards and events named. Nothing is left behind
    after `flush`; `close` writes the ends of the files.
    """

    def __init__(self, summary: Summary, settings: ReplaySettings, folder: Path | None) -> None:
        header = summary.header
        self.summary = summary
        self.request_table = RequestTable()
        self.request_ids: set[int] = set()
        path = folder / "violations.parquet" if folder else None
        self.merging = MergingSink(path, header) if path is not None and settings.merges_rows else None
        self._violations = TableSink(None if self.merging is not None else path, VIOLATION_SCHEMA)
        self._findings = TableSink(folder / "findings.parquet" if folder else None, FINDING_SCHEMA)
        path = folder / "swa_divergence.parquet" if folder and header.lut_lens else None
        self._divergence = TableSink(path, DIVERGENCE_SCHEMA)
        self.injected = InjectedFaults()
        summary.injected = self.injected.listed
        self._derived = Derived(header)
        self._launches: list[LaunchViolations] = []
        self._left_out: list[LaunchViolations] = []
        self._limit = RowLimit(header.groups, per_slot=None if settings.all_rows else ROWS_PER_SLOT)
        self._pending_rows = 0
        self._slots_hit = [np.zeros(group.num_slots, np.bool_) for group in header.groups]

    def close(self) -> None:
        """Write what is pending and the files' ends; every file is closed even where one cannot be written."""
        with ExitStack() as stack:
            for sink in (self._divergence, self._findings, self._violations, self.merging):
                if sink is not None:
                    stack.callback(sink.close)

    def begin(self, what: Forward | Sweep) -> None:
        """Say which forward or sweep is stepped next."""
        if self.merging is not None:
            self.merging.begin(what)

    def done(self) -> None:
        """Say that the forward or sweep is over."""
        if self.merging is not None:
            self.merging.done()

    def part(self) -> None:
        """Let no row go on over what comes now: an event that cannot be judged, a gap."""
        if self.merging is not None:
            self.merging.part()

    def violations(self, launch: LaunchViolations) -> None:
        """Take what one launch found, as far as it may be judged."""
        launch = self._derived.violations(launch)
        if not len(launch.rows):
            return
        self.injected.violations(launch)
        if self.merging is not None:
            launch = self.merging.with_turns(launch)
        self.summary.violations += len(launch.rows)
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
        findings, summary = self._derived.findings(findings), self.summary
        if not findings:
            return
        self.injected.findings(findings)
        self._findings.append(finding_table(findings))
        summary.first_finding = summary.first_finding or dataclasses.asdict(findings[0])
        summary.findings += len(findings)
        for finding in findings:
            add(summary.findings_by_kind, finding.kind)
            if finding.request_id != NOBODY:
                summary.requests_hit.setdefault(finding.request_id, finding.request)

    def divergence(self, figures: SwaDivergence, *, at_least: int = ROWS_AT_ONCE) -> None:
        """Take the divergence figures since the last time, where there are so many."""
        table = figures.take_table(at_least=at_least)
        if table is not None:
            self._divergence.append(table)

    def flush(self, figures: SwaDivergence) -> None:
        """Pass on all that is pending."""
        self.pass_on()
        self.divergence(figures, at_least=1)

    def pass_on(self) -> None:
        """Pass on and count the violations that are pending."""
        launches, left_out = self._launches, self._left_out
        if launches:
            table = violation_table(launches, self.request_table)  # Ctrl-C in here loses none: they are pending still
            if self.summary.first_violation is None:
                row = table.slice(0, 1).to_pylist()[0]
                self.summary.first_violation_forward = row["forward"]
                self.summary.first_violation = row | {"reasons": row["reasons"].split("+")}
        self._launches, self._left_out = [], []
        self._pending_rows = 0
        if launches:
            if self.merging is not None:
                table = self.merging.append(table, launches)
            else:
                self._violations.append(table)
            self._limit.kept(table)
        if launches or left_out:
            self._count([*launches, *left_out])
        self.summary.violations_left_out += sum(len(launch.rows) for launch in left_out)

    def _count(self, launches: Sequence[LaunchViolations]) -> None:
        """Add violations of launches, in bounded memory, to what the summary says of them; it has their number already."""
        summary = self.summary
        rows = np.concatenate([launch.rows for launch in launches])
        for reason in FailReason:
            if hits := int(np.count_nonzero(rows[:, 7] & reason.value)):
                add(summary.violations_by_reason, reason.name or "", hits)
        for tag, hits in enumerate(np.bincount(rows[:, 0], minlength=len(LaunchTag)).tolist()):
            if hits:
                add(summary.violations_by_launch, LaunchTag(tag).name, hits)
        forwards = np.unique([launch.forward for launch in launches])
        summary.forwards_hit += len(forwards) - int(forwards[0] == summary.last_violation_forward)
        summary.last_violation_forward = int(forwards[-1])
        every = np.concatenate([launch.request_ids for launch in launches])
        request_ids = every[np.sort(np.unique(every, return_index=True)[1])]
        names = self.request_table.name_column(request_ids).to_pylist()
        for request_id, name in zip(request_ids.tolist(), names, strict=True):
            if request_id != NOBODY:  # what a sweep finds is nobody's yet
                summary.requests_hit.setdefault(request_id, name)
        for launch in launches:
            hit, slots = self._slots_hit[launch.group], launch.rows[:, 1]
            new = np.unique(slots[~hit[slots]])
            hit[new] = True
            summary.slots_hit += len(new)
