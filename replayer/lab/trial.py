"""One trial: one engine or pair, one seed, at most one fault; its traces, what is true of them, and what a replay found."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from ...recorder.engines.simulated.engine import SimulatedEngine
from ...recorder.engines.simulated.pd_pair import PdPair
from ...recorder.errors import TraceError
from ...recorder.process.injection import MARK_NOTE
from ...recorder.trace.reader import TraceBatch, TraceReader
from ..run.replay import replay_joined
from ..run.settings import ReplaySettings
from .configurations import CONFIGURATIONS
from .effect import Clock, Effect, Probe
from .fault import Bench, Fault

# A broken engine may turn in circles; a whole one is through long before.
MAX_STEPS: Final = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is to be run; `seed` is of engine, workload and fault. `fault` is None for a clean run."""

    fault: Fault | None
    config: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """What happened in the engine, or in both engines of a pair."""

    traces: tuple[Path, ...]
    ticks: tuple[tuple[int, ...], ...]  # of each trace, for each of its forwards, how many of all engines began before
    forwards: int  # of all engines
    injected_forward: int  # -1 if the fault never happened
    label: dict[str, object]  # what its mark says
    effect: Effect | None  # None if no forward had anything wrong
    broke_down: str  # how the engine itself gave up on its damaged books, if it did


def run_trial(trial: Trial, target: Path, *, overwrite: bool = False) -> TrialRun:
    """Run one trial and record its trace, or of a pair both in the folder `target`; raise `TraceError` if it cannot be written."""
    configuration, fault, clock = CONFIGURATIONS[trial.config], trial.fault, Clock()
    config, workload = configuration.engine_config(trial.seed), configuration.requests(trial.seed)
    pair: PdPair | None = None
    bench: Bench | None = None
    with ExitStack() as stack:
        if configuration.pair is not None:
            pair = PdPair(config, workload, target, settings=configuration.pair, overwrite=overwrite)
            engines: list[SimulatedEngine] = [pair.prefill, pair.decode]
            step: Callable[[], bool] = stack.enter_context(pair).step
        else:
            engine = SimulatedEngine(config, workload, target, overwrite=overwrite)
            engines, step = [engine], stack.enter_context(engine).step
        probes = [Probe(engine, clock) for engine in engines]
        if fault is not None:
            random = np.random.default_rng([trial.seed, *fault.name.encode()])
            begin = int(random.integers(*fault.warm_up))
            bench = Bench(fault.name, engines[0], probes[0], clock, random, starts_at=begin, pair=pair)
            fault.arm(bench)
        broke_down = _run(step, bench)
    for engine in engines:
        if engine.unwritten:  # half a trace says nothing of what a replay sees
            raise TraceError(f"{engine.recorder.path}: torn: {engine.unwritten}; make room, then run it again")
    effects = [probe.first for probe in probes if probe.first is not None]
    return TrialRun(
        traces=tuple(Path(engine.recorder.path) for engine in engines),
        ticks=tuple(tuple(probe.ticks) for probe in probes),
        forwards=clock.now,
        injected_forward=bench.injected_at if bench is not None else -1,
        label=bench.label if bench is not None else {},
        effect=min(effects, key=lambda effect: effect.tick, default=None),
        broke_down=broke_down,
    )


def _run(step: Callable[[], bool], bench: Bench | None) -> str:
    """Step to the end; how the engine broke down, if it did."""
    try:
        for _ in range(MAX_STEPS):
            if not step():
                break
            if bench is not None:
                bench.stepped()
    except Exception as error:
        # After its fault an engine may fail in any way, as a real one may; before it, it is our own mistake.
        if bench is None or not bench.injections:
            raise
        return f"{type(error).__name__}: {error}"
    return ""


class Detection(NamedTuple):
    """One thing that the replay reported first at `event` of trace number `trace`."""

    tick: int  # forwards of all engines before it
    trace: int
    event: int
    by: str  # a violation's reasons and launch, or a finding's kind
    forward: int  # the event's, or the next one in that trace
    founded: bool  # it is behind the fault's mark


class LabResult(NamedTuple):
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
        found = [one for number, report in enumerate(reports) for one in _detections(report, outcome, number, harmless)]
    found.sort(key=lambda one: (one.tick, one.trace, one.event))
    founded = [one for one in found if one.founded]
    unfounded = {one.by for one in found if not one.founded}
    verdicts = [summary.verdict.value for summary in summaries]
    verdict = next(name for name in ("corrupt", "inconclusive", "clean") if name in verdicts)
    if not found and verdict != "clean" and harmless:
        unfounded.add(f"verdict {verdict}: {'; '.join(doubt for summary in summaries for doubt in summary.doubts)}")
    reasons = tuple(sorted({one.by for one in founded}))
    return LabResult(founded[0] if founded else None, reasons, tuple(sorted(unfounded)))


def _detections(report: Path, outcome: TrialRun, number: int, harmless: bool) -> Iterator[Detection]:
    violations = pq.read_table(report / "violations.parquet", columns=["event", "reasons", "launch"])
    findings = pq.read_table(report / "findings.parquet", columns=["event", "kind"])
    named = [(f"{row['reasons']} {row['launch']}", row["event"]) for row in violations.to_pylist()]
    named += [(row["kind"], row["event"]) for row in findings.to_pylist()]
    with TraceReader(outcome.traces[number]) as reader:
        batches = [batch for batch in reader.stream() if isinstance(batch, TraceBatch)]
        events = [pair for batch in batches for pair in zip(batch.strings("kind"), batch.strings("note"), strict=True)]
    is_forward = np.array([kind == "forward" for kind, _ in events], np.int64)
    forwards = np.cumsum(is_forward) - is_forward  # before each event
    marked = ("mark", MARK_NOTE)
    mark, ticks = events.index(marked) if marked in events else len(events), outcome.ticks[number]
    firsts: dict[str, int] = {}
    for name, event in named:
        firsts[name] = min(event, firsts.get(name, event))
    for name, event in firsts.items():
        forward = int(forwards[event])
        tick = ticks[forward] if forward < len(ticks) else ticks[-1] + 1 if ticks else 0
        yield Detection(tick, number, event, name, forward, not harmless and mark < event)
