"""What a replay found in a trial's traces, and whether it was found in time."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from ...recorder.trace.reader import TraceBatch, TraceReader
from ..run.replay import replay_joined
from ..run.settings import ReplaySettings
from .fault import MARK_NOTE
from .trial import Trial, TrialRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """One thing that the replay reported first at `event` of trace number `trace`."""

    tick: int  # forwards of all engines before it
    trace: int
    event: int
    by: str  # a violation's reasons and launch, or a finding's kind
    forward: int  # the event's, or the next one in that trace
    founded: bool  # it is behind the fault's mark


@dataclass(frozen=True, slots=True, kw_only=True)
class LabResult:
    """What the replay made of one trial."""

    first: Detection | None  # since the injection
    reasons: tuple[str, ...]  # everything reported since then, by name
    unfounded: tuple[str, ...]  # what was reported before it, or of something that is no fault


def judge(trial: Trial, outcome: TrialRun) -> LabResult:
    """Replay a trial's traces, those of a pair together."""
    harmless = trial.fault is None or trial.fault.benign
    with tempfile.TemporaryDirectory(prefix="kvcanary-lab-") as folder:
        reports = [Path(folder) / str(number) for number in range(len(outcome.traces))]
        for report in reports:
            report.mkdir()
        summaries = replay_joined(outcome.traces, settings=ReplaySettings(), reports=reports)
        found = [
            detection
            for number, report in enumerate(reports)
            for detection in _detections(report, outcome, number, harmless=harmless)
        ]
    found.sort(key=lambda detection: (detection.tick, detection.trace, detection.event))
    founded = [detection for detection in found if detection.founded]
    unfounded = {detection.by for detection in found if not detection.founded}
    verdicts = [summary.verdict.value for summary in summaries]
    verdict = next(name for name in ("corrupt", "inconclusive", "clean") if name in verdicts)
    if not found and verdict != "clean" and harmless:
        unfounded.add(f"verdict {verdict}: {'; '.join(doubt for summary in summaries for doubt in summary.doubts)}")
    return LabResult(
        first=founded[0] if founded else None,
        reasons=tuple(sorted({detection.by for detection in founded})),
        unfounded=tuple(sorted(unfounded)),
    )


def _detections(report: Path, outcome: TrialRun, number: int, *, harmless: bool) -> Iterator[Detection]:
    """Yield the first event of each kind of thing that the report on a trace holds."""
    violations = pq.read_table(report / "violations.parquet", columns=["event", "reasons", "launch"])
    findings = pq.read_table(report / "findings.parquet", columns=["event", "kind"])
    named = [(f"{row['reasons']} {row['launch']}", row["event"]) for row in violations.to_pylist()]
    named += [(row["kind"], row["event"]) for row in findings.to_pylist()]
    kinds: list[str] = []
    notes: list[str] = []
    with TraceReader(outcome.traces[number]) as reader:
        for batch in reader.stream():
            if isinstance(batch, TraceBatch):
                kinds += batch.strings("kind")
                notes += batch.strings("note")
    is_forward = np.array([kind == "forward" for kind in kinds], np.int64)
    forwards = np.cumsum(is_forward) - is_forward  # before each event
    marks = (i for i, one in enumerate(zip(kinds, notes, strict=True)) if one == ("mark", MARK_NOTE))
    mark, ticks = next(marks, len(kinds)), outcome.ticks[number]
    firsts: dict[str, int] = {}
    for name, event in named:
        firsts[name] = min(event, firsts.get(name, event))
    for name, event in firsts.items():
        forward = int(forwards[event])
        tick = ticks[forward] if forward < len(ticks) else ticks[-1] + 1 if ticks else 0
        founded = not harmless and mark < event
        yield Detection(tick=tick, trace=number, event=event, by=name, forward=forward, founded=founded)
