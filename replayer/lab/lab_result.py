"""What a replay found in a trial's traces, and whether it was found in time."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from ...kernels.arrays import Int64Array
from ...recorder.trace.reader import TraceBatch, TraceReader
from ..run.replay import replay, replay_joined
from ..run.settings import ReplaySettings
from .fault import MARK_NOTE
from .trial import Trial, TrialRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """One thing that the replay reported.

    `by` names it; `event` of trace number `trace` proves it; `forward` is that forward, or the next one in that trace;
    `tick` counts the forwards of all engines before it.
    """

    by: str
    trace: int
    event: int
    forward: int
    tick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LabResult:
    """What the replay made of one trial.

    `first` is the first detection since the injection, `reasons` all names; `unfounded` is what was reported before it,
    or of something that is no fault.
    """

    verdict: str
    first: Detection | None
    reasons: tuple[str, ...]
    unfounded: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timeline:
    """For each event of a trace how many forwards came before it; `mark` is the fault's event, -1 where it is not."""

    forwards: Int64Array
    mark: int


def judge(trial: Trial, outcome: TrialRun) -> LabResult:
    """Replay a trial's traces, those of a pair together."""
    settings = ReplaySettings()
    with tempfile.TemporaryDirectory(prefix="kvcanary-lab-") as folder:
        reports = [Path(folder) / str(number) for number in range(len(outcome.traces))]
        for report in reports:
            report.mkdir()
        if len(outcome.traces) == 1:
            summaries = [replay(outcome.traces[0], settings=settings, report=reports[0])]
        else:
            summaries = replay_joined(outcome.traces, settings=settings, reports=reports)
        timelines = [_timeline(trace) for trace in outcome.traces]
        found = [
            detection
            for number, report in enumerate(reports)
            for detection in _detections(report, number, timelines[number], outcome.ticks[number])
        ]
    found.sort(key=lambda detection: (detection.tick, detection.trace, detection.event))
    founded: list[Detection] = []
    if trial.fault is not None and not trial.fault.benign:
        marks = [timeline.mark for timeline in timelines]
        founded = [detection for detection in found if 0 <= marks[detection.trace] < detection.event]
    unfounded = {detection.by for detection in found if detection not in founded}
    verdicts = {summary.verdict.value for summary in summaries}
    verdict = next(name for name in ("corrupt", "inconclusive", "clean") if name in verdicts)
    if not found and verdict != "clean" and (trial.fault is None or trial.fault.benign):
        unfounded.add(f"verdict {verdict}: {'; '.join(doubt for summary in summaries for doubt in summary.doubts)}")
    return LabResult(
        verdict=verdict,
        first=founded[0] if founded else None,
        reasons=tuple(sorted({detection.by for detection in founded})),
        unfounded=tuple(sorted(unfounded)),
    )


def _detections(report: Path, number: int, timeline: _Timeline, ticks: tuple[int, ...]) -> list[Detection]:
    """Return the first event of each kind of thing that a report holds."""
    violations = pq.read_table(report / "violations.parquet", columns=["event", "reasons", "launch"])
    findings = pq.read_table(report / "findings.parquet", columns=["event", "kind"])
    names = [
        f"{reasons} {launch}"
        for reasons, launch in zip(violations["reasons"].to_pylist(), violations["launch"].to_pylist(), strict=True)
    ]
    names += findings["kind"].to_pylist()
    found: dict[str, int] = {}
    for name, event in zip(names, violations["event"].to_pylist() + findings["event"].to_pylist(), strict=True):
        found[name] = min(event, found.get(name, event))
    return [
        Detection(
            by=name,
            trace=number,
            event=event,
            forward=int(timeline.forwards[event]),
            tick=_tick(int(timeline.forwards[event]), ticks),
        )
        for name, event in found.items()
    ]


def _tick(forward: int, ticks: tuple[int, ...]) -> int:
    if forward < len(ticks):
        return ticks[forward]
    return ticks[-1] + 1 if ticks else 0


def _timeline(trace: Path) -> _Timeline:
    kinds: list[str] = []
    notes: list[str] = []
    with TraceReader(trace) as reader:
        for batch in reader.stream():
            if isinstance(batch, TraceBatch):
                kinds += batch.strings("kind")
                notes += batch.strings("note")
    forwards = np.array([kind == "forward" for kind in kinds], np.int64)
    mark = next((i for i, (k, n) in enumerate(zip(kinds, notes, strict=True)) if k == "mark" and n == MARK_NOTE), -1)
    return _Timeline(forwards=np.cumsum(forwards) - forwards, mark=mark)
