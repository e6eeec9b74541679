"""What a replay finds, on its way into report and summary: violations a table at a time, findings as they come."""

from typing import Final

from ...recorder.state.forward import Forward
from ...recorder.state.requests import RequestTable
from ..run.derived import Derived
from ..run.divergence import ROWS_AT_ONCE, SwaDivergence
from ..run.sweep import Sweep
from .findings import Finding, finding_table
from .report import ReportSinks
from .summary import Summary, Tally
from .violations import ROWS_PER_SLOT, LaunchViolations, RowLimit, violation_table

# Violations go on in tables of about this many rows: a table for each launch would cost more than the launch.
PENDING_ROWS: Final = 16_384


class ResultCollector:
    """Takes what launches and checks find in one trace, in their order; nothing is left behind after `flush`.

    Where rows that last are merged, whoever steps says which forward or sweep comes (`begin`), when it is over (`done`),
    and where no row may go on (`part`).
    """

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
            self._pass_on()

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
        self._pass_on()
        self.divergence(figures, at_least=1)

    def _pass_on(self) -> None:
        """Turn the pending launches into one table: for the report, and for the tally."""
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
