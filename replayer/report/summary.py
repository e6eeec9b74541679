"""What a replay found, in one value: the verdict, what was checked, what was lost, the first violation spelt out."""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.schema import IDENTITY_KINDS
from ..run.coverage import (
    COMPARED,
    WRITTEN,
    Watched,
    count_forwards,
    count_identities,
    coverage,
    model_coverage,
    no_figures,
    no_samples,
    not_watched,
)
from ..run.derived import Derived

MAX_LISTED: Final = 100
_COUNTED: Final = ("figures", "samples", "told", "kv_recorded", "kv_filled")  # for coverage and doubts alone
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

    `figures` counts what was seen of each runner's forwards, see `coverage.FIGURES`, `samples` is of `count_samples`, `told` of `count_identities`; `whole_before_end` says that nothing is
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
    figures: Int64Array = field(init=False)
    samples: Int64Array = field(init=False)
    told: Int64Array = field(init=False)
    kv_recorded: int = 0  # bytes of K and V that forwards left in their slots, as recorded
    kv_filled: int = 0  # 0 if all of these are
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
    oracle: dict[str, int] = field(default_factory=dict)
    model_bytes: dict[str, int] = field(
        default_factory=dict
    )  # --model: how many values of tokens were compared, and why others not
    injected: list[dict[str, Any]] = field(default_factory=list)
    num_injected: int = 0  # past the first 100 they are counted alone
    seconds: float = 0.0
    report: str | None = None

    def __post_init__(self) -> None:
        """Begin the counts with nothing."""
        self.figures = no_figures(self.header)
        self.samples = no_samples(self.header)
        self.told = np.zeros(1 + len(IDENTITY_KINDS), np.int64)

    def count(self, batch: TraceBatch, end: int, judged: Int64Array) -> None:
        """Count the first `end` events of a batch; the forwards in rows `judged` `[n] int64`, ascending, were judged."""
        for kind, count in Counter(batch.kinds[:end]).items():
            add(self.events, kind, count)
        times = batch.scalar_ints("time_ns")[:end]
        self.first_time_ns = self.first_time_ns or next((int(t) for t in times if t), 0)
        self.last_time_ns = max(self.last_time_ns, int(times.max(initial=0)))
        count_identities(self.told, batch, end)
        if not len(judged):
            return
        modes = batch.strings("mode")
        for mode, count in Counter(modes[row] for row in judged.tolist()).items():
            add(self.forwards_by_mode, mode, count)
        self.forwards += len(judged)
        self.last_forward = int(batch.scalar_ints("forward")[judged[-1]])
        self.forwards_watched += int(np.count_nonzero(batch.scalar_ints("kv_watched")[judged]))
        self.tokens += int(np.diff(batch.offsets("input_ids"))[judged].sum())
        count_forwards(self.figures, batch, judged, self.header)
        recorded = batch.values("kv_bytes")
        self.kv_recorded += len(recorded)
        self.kv_filled += not self.kv_filled and bool(recorded.any())

    @property
    def coverage(self) -> list[Watched]:
        """How much was watched of what the verdict may be taken to speak for."""
        rows = coverage(
            self.header,
            self.figures,
            self.samples,
            self.told,
            recorded=self.events.get("forward", 0),
            judged=self.forwards,
            entries_read=self.entries_read,
            unknown_entries=self.unknown_entries,
            settings=self.settings,
        )
        return rows + model_coverage(self.model_bytes)

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
        if self.num_losses and self.header.shrunk is not None:
            places = f"{self.num_losses:,} place(s)"
            doubts.append(f"events left out by kvcanary shrink, or lost while recording, at {places}")
        elif self.num_losses:
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
                f"{self.transfers_unmatched:,} transfer(s) received that no trace given sent, or on a device, where nobody has "
                "read what landed; the former are judged when both sides are replayed together: "
                f"kvcanary-replay prefill.arrow decode.arrow{salted}, if the sending engine records what it sends"
            )
        if self.unknown_before and self.unknown_entries:
            doubts.append(
                f"{self.unknown_entries:,} entries left out: what they stand on was lost, or came from another trace, "
                "before the first segment given"
            )
        if self.unjudged:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.unjudged.items()))
            doubts.append(f"events that this version cannot judge: {kinds}")
        if self.model_bytes and not self.model_bytes.get(COMPARED):
            why = "; ".join(reason for reason in self.model_bytes if reason not in (COMPARED, WRITTEN))
            doubts.append(f"nothing was compared with the model: {why}")
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
        if self.kv_recorded and not self.kv_filled and self.settings["kv_hash"] != "none":
            return (
                "every byte of K and V that was recorded is 0: the recorder looked at other memory than the engine writes; give it "
                "the engine's own pool, and no copy of it"
            )
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
        names = [item.name for item in dataclasses.fields(self) if item.name not in ("header", *_COUNTED)]
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
            "sampling": None if header.sampling is None else dataclasses.asdict(header.sampling),
            **values,
        }


def add(counts: dict[str, int], key: str, count: int = 1) -> None:
    """Count something under a name."""
    counts[key] = counts.get(key, 0) + count
