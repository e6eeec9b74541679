"""What a replay found, in one value: the verdict, what was checked, what was lost, the first violation spelt out."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...kernels.constants import FailReason, LaunchTag
from ...recorder.state.requests import RequestTable
from ...recorder.trace.header import TraceHeader
from ..run.coverage import Watched, coverage, no_figures, not_watched
from ..run.derived import Derived
from .findings import Finding
from .violations import LaunchViolations, violation_table

MAX_LISTED: Final = 100
NOBODY: Final = -1
EXIT_UNREADABLE: Final = 2


class Verdict(Enum):
    """What a replay found."""

    CLEAN = "clean"
    CORRUPT = "corrupt"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """0 clean, 1 corrupt, 125 inconclusive (`git bisect run` skips 125)."""
        return {Verdict.CLEAN: 0, Verdict.CORRUPT: 1, Verdict.INCONCLUSIVE: 125}[self]


def combined_exit_code(codes: Iterable[int]) -> int:
    """Fold the exit codes of several traces: corrupt beats unreadable beats inconclusive beats clean."""
    seen = set(codes)
    return next((code for code in (1, EXIT_UNREADABLE, 125) if code in seen), 0)


@dataclass(slots=True, kw_only=True)
class Summary:
    """A replay's result; `to_json` gives the layout of `summary.json`, described in docs/reference/replay.md.

    `figures` counts what was seen of each runner's forwards, see `coverage.FIGURES`; `whole_before_end` says that nothing is
    missing but, perhaps, what would come behind the last event; `being_recorded` that more is being written there.
    """

    trace: str
    header: TraceHeader
    settings: dict[str, Any]
    complete: bool = False
    segments: list[int] = field(default_factory=list)
    goes_on: bool = False
    cut_short: str = ""
    unknown_before: bool = False
    stopped: str = ""
    events: dict[str, int] = field(default_factory=dict)
    forwards: int = 0
    forwards_by_mode: dict[str, int] = field(default_factory=dict)
    forwards_watched: int = 0
    last_forward: int = -1
    requests: int = 0
    tokens: int = 0
    first_time_ns: int = 0
    last_time_ns: int = 0
    slot_counters: dict[str, int] = field(default_factory=dict)
    kernel_counters: dict[str, int] = field(default_factory=dict)
    verified: int = 0
    written: int = 0
    unknown_entries: int = 0
    entries_read: int = 0
    figures: npt.NDArray[np.int64] = field(init=False)
    swa_divergence: dict[str, Any] | None = None
    transfers_sent: int = 0
    transfers_received: int = 0
    transfers_unmatched: int = 0
    gaps: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    num_gaps: int = 0
    num_losses: int = 0
    lost_events: int = 0
    unjudged: dict[str, int] = field(default_factory=dict)
    whole_before_end: bool = True
    being_recorded: bool = False
    violations: int = 0
    violations_left_out: int = 0  # counted in all that follows, and no rows of the report
    violations_by_reason: dict[str, int] = field(default_factory=dict)
    violations_by_launch: dict[str, int] = field(default_factory=dict)
    first_violation: dict[str, Any] | None = None
    first_violation_forward: int = -1
    last_violation_forward: int = -1
    forwards_hit: int = 0
    slots_hit: int = 0
    requests_hit: dict[int, str] = field(default_factory=dict)
    findings: int = 0
    findings_by_kind: dict[str, int] = field(default_factory=dict)
    first_finding: dict[str, Any] | None = None
    # None until somebody has looked for them; rows as docs/reference/incidents.md describes them, at most 100
    num_incidents: int | None = None
    incidents: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    num_marks: int = 0
    seconds: float = 0.0
    report: str | None = None

    def __post_init__(self) -> None:
        """Begin the counts with nothing."""
        self.figures = no_figures(self.header)

    def take_events(self, counts: Mapping[str, int], times: npt.NDArray[np.int64]) -> None:
        """Count events by their kinds, `times` `[n] int64` being theirs."""
        for kind, count in counts.items():
            add(self.events, kind, count)
        self.first_time_ns = self.first_time_ns or next((int(t) for t in times if t), 0)
        self.last_time_ns = max(self.last_time_ns, int(times.max()))

    @property
    def coverage(self) -> list[Watched]:
        """How much was watched of what the verdict may be taken to speak for."""
        return coverage(
            self.header,
            self.figures,
            recorded=self.events.get("forward", 0),
            judged=self.forwards,
            entries_read=self.entries_read,
            unknown_entries=self.unknown_entries,
            settings=self.settings,
        )

    @property
    def cut(self) -> bool:
        """Whether nothing was found and all is known up to the last event, behind which the recording was cut."""
        if self.violations or self.findings or not self.whole_before_end:
            return False
        return bool(self._losses()) and not self._other_doubts() and not self._nothing_judged()

    @property
    def doubts(self) -> list[str]:
        """Why a replay without a violation would still not be a clean bill."""
        doubts = self._losses() + self._other_doubts()
        if not doubts and (nothing := self._nothing_judged()):
            doubts.append(nothing)
        return doubts

    def _losses(self) -> list[str]:
        doubts = []
        if self.being_recorded:
            doubts.append("the trace is being recorded")
        if self.num_gaps > self.being_recorded:
            doubts.append(f"{self.num_gaps - self.being_recorded} damaged or torn part(s) of the trace left out")
        if self.num_losses:
            count = f"{self.lost_events:,} event(s)" if self.lost_events else "an unknown number of events"
            doubts.append(f"{count} lost while recording")
        if not self.complete and not self.num_gaps and not self.stopped:
            doubts.append("the trace has no end: it was torn, or is still being written")
        return doubts

    def _other_doubts(self) -> list[str]:
        doubts = []
        if self.cut_short:
            doubts.append(self.cut_short)
        if self.transfers_unmatched:
            salted = " (hashed with one KVCANARY_TOKEN_SALT_FILE)" if self.header.tokens == "hashed" else ""
            doubts.append(
                f"{self.transfers_unmatched:,} transfer(s) received whose sender is in no trace given; replay them "
                f"together: kvcanary-replay prefill.arrow decode.arrow{salted}"
            )
        if self.unknown_before and self.unknown_entries:
            doubts.append(
                f"{self.unknown_entries:,} entries left out: what they stand on was lost, or came from another trace, "
                "before the first segment given"
            )
        if self.unjudged:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.unjudged.items()))
            doubts.append(f"events that this version cannot judge: {kinds}")
        if self.stopped:
            doubts.append(self.stopped)
        return doubts

    def _nothing_judged(self) -> str:
        """Say why nothing of some kind was checked at all, nothing where all was that there is."""
        if not self.verified and not self.written:
            what = "no forward" if not self.forwards else "no forward that reads or writes a slot"
            return f"the trace holds {what}, so nothing was checked"
        if self.entries_read and self.unknown_entries == self.entries_read:
            return f"nobody knows what any of the {self.entries_read:,} slots read must hold, so no read was checked"
        if Derived(self.header).nothing_left:
            return "every forward stands on columns that were derived, so nothing was checked"
        return ""

    @property
    def verdict(self) -> Verdict:
        """Corrupt if anything was found, inconclusive if anything is in doubt, else clean."""
        if self.violations or self.findings:
            return Verdict.CORRUPT
        return Verdict.INCONCLUSIVE if self.doubts else Verdict.CLEAN

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        names = [item.name for item in dataclasses.fields(self) if item.name not in ("header", "figures")]
        values = {name: getattr(self, name) for name in names}
        values["requests_hit"] = list(self.requests_hit.values())[:MAX_LISTED]
        rows, header = self.coverage, self.header
        return {
            "verdict": self.verdict.value,
            "exit_code": self.verdict.exit_code,
            "doubts": self.doubts,
            "cut_at_forward": self.last_forward if self.cut else None,
            "coverage": [row.to_json() for row in rows],
            "not_watched": not_watched(rows),
            "num_requests_hit": len(self.requests_hit),
            **{name: dataclasses.asdict(getattr(header, name)) for name in ("engine", "model", "ranks")},
            "trace_id": header.trace_id,
            **values,
        }


class Tally:
    """Adds violations and findings to a summary as they are found, in bounded memory."""

    def __init__(self, summary: Summary) -> None:
        self._summary = summary
        self._slots = [np.zeros(group.num_slots, dtype=np.bool_) for group in summary.header.groups]
        self._last_forward_hit = -1

    def violations(self, launches: Sequence[LaunchViolations], request_table: RequestTable) -> None:
        """Add the violations of launches, which `Summary.violations` counts already."""
        summary = self._summary
        if summary.first_violation is None:
            first = launches[0].take(np.arange(len(launches[0].rows)) == 0)
            row = violation_table([first], request_table).to_pylist()[0]
            summary.first_violation = row | {"reasons": row["reasons"].split("+")}
            summary.first_violation_forward = row["forward"]
        rows = np.concatenate([launch.rows for launch in launches])
        for reason in FailReason:
            if hits := int(np.count_nonzero(rows[:, 7] & reason.value)):
                add(summary.violations_by_reason, reason.name or "", hits)
        for tag, hits in enumerate(np.bincount(rows[:, 0], minlength=len(LaunchTag)).tolist()):
            if hits:
                add(summary.violations_by_launch, LaunchTag(tag).name, hits)
        forwards = np.unique([launch.forward for launch in launches])
        summary.forwards_hit += len(forwards) - int(forwards[0] == self._last_forward_hit)
        self._last_forward_hit = summary.last_violation_forward = int(forwards[-1])
        every = np.concatenate([launch.request_ids for launch in launches])
        request_ids = every[np.sort(np.unique(every, return_index=True)[1])]
        names = request_table.name_column(request_ids).to_pylist()
        for request_id, name in zip(request_ids.tolist(), names, strict=True):
            if request_id != NOBODY:  # what a sweep finds is nobody's yet
                summary.requests_hit.setdefault(request_id, name)
        for launch in launches:
            hit = self._slots[launch.group]
            slots = launch.rows[:, 1]
            new = np.unique(slots[~hit[slots]])
            hit[new] = True
            summary.slots_hit += len(new)

    def findings(self, findings: list[Finding]) -> None:
        """Count findings."""
        summary = self._summary
        if findings and summary.first_finding is None:
            summary.first_finding = dataclasses.asdict(findings[0])
        summary.findings += len(findings)
        for finding in findings:
            add(summary.findings_by_kind, finding.kind)
            if finding.request_id != NOBODY:
                summary.requests_hit.setdefault(finding.request_id, finding.request)


def add(counts: dict[str, int], key: str, count: int = 1) -> None:
    """Count something under a name."""
    counts[key] = counts.get(key, 0) + count
