"""One engine's run, judged twice: online by the published canary, offline by the replay of its trace."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from kvcanary.kernels.constants import FailReason, LaunchTag
from kvcanary.recorder.engines.simulated.config import BrokenEngineError
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.report.violations import VIOLATION_SCHEMA
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .cases import FORWARDS, config_and_workload
from .injector import Injector
from .spy import Rows, Seen, Spy

FIELDS = VIOLATION_SCHEMA.names[:8]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What both sides say of one run; `forwards` and `sweeps` are the replay's, in the shape of `Seen`."""

    seen: Seen
    summary: Summary
    forwards: list[Rows]
    sweeps: list[Rows]
    figures: dict[int, tuple[int, int]]
    kernel_counters: dict[str, int]
    slot_counters: dict[str, int]
    verify_totals: dict[str, int]
    injected: int

    def assert_same(self, *, kv_of_blank_slots: bool = True) -> None:
        """Rows of every forward and every sweep, health counters of every launch tag, sliding-window figures.

        A recorder does not follow the bytes of a slot that was never written under it. Where something landed in one
        all the same, and no record with it, `kv_of_blank_slots=False` leaves the KV hash of blank records out.
        """
        for forward, (ours, published) in enumerate(zip(self.forwards, self.seen.forwards, strict=True)):
            if kv_of_blank_slots:
                assert ours == published, f"forward {forward}"
            else:
                assert _without_blank_kv(ours) == _without_blank_kv(published), f"forward {forward}"
        for sweep, (ours, published) in enumerate(zip(self.sweeps, self.seen.sweeps, strict=True)):
            assert ours == published, f"sweep {sweep}"
        assert self.summary.kernel_counters == self.kernel_counters
        assert self.summary.slot_counters == self.slot_counters
        if self.seen.figures:
            assert self.figures == self.seen.figures
        if self.summary.swa_divergence is not None:
            totals = {kind: self.summary.swa_divergence[f"verify_{kind}"] for kind in ("full", "swa")}
            assert totals == self.verify_totals


def _without_blank_kv(rows: Rows) -> Rows:
    blank = {(0, 0, 0): ~FailReason.VERIFY_KV_HASH}
    return sorted((*row[:7], row[7] & blank.get((row[2], row[3], row[5]), -1)) for row in rows)


def run(name: str, seed: int, folder: Path, fault: str | None = None) -> Run:
    """Run the named engine with a fault or without, and replay its trace."""
    config, workload, kv_hash = config_and_workload(name, seed)
    folder.mkdir(parents=True)
    trace = folder / "trace.arrow"
    with SimulatedEngine(config, workload, trace) as engine:
        spy = Spy(engine, kv_hash=kv_hash)
        injector = Injector(engine, fault, seed=seed) if fault else None
        try:
            while engine.step() and len(spy.seen.forwards) < FORWARDS:
                if injector:
                    injector(engine)
        except BrokenEngineError:  # between forwards: a scheduler that stands on broken books
            assert injector
            assert injector.injected
    summary = replay(trace, settings=settings(kv_hash, trace), report=folder)
    return compared(spy, summary, trace, folder, injected=injector.injected if injector else 0)


def settings(kv_hash: str, trace: Path) -> ReplaySettings:
    """Return how to replay a run that the published canary has judged with a KV hash mode."""
    with TraceReader(trace) as reader:
        has_bytes = any(group.streams for group in reader.header.groups)
    return ReplaySettings(kv_hash=kv_hash.lower() if has_bytes else "auto", checks=(), merge_rows=False)


def compared(spy: Spy, summary: Summary, trace: Path, report: Path, *, injected: int) -> Run:
    """Put both sides of a run together."""
    assert summary.forwards == len(spy.seen.forwards)
    kernels, slots = spy.canary.counters()
    forwards, sweeps = _our_rows(trace, report, summary.forwards)
    return Run(
        seen=spy.seen,
        summary=summary,
        forwards=forwards,
        sweeps=sweeps,
        figures=_our_figures(report),
        kernel_counters={tag.name: int(kernels[tag]) for tag in LaunchTag},
        slot_counters={tag.name: int(slots[tag]) for tag in LaunchTag},
        verify_totals=spy.canary.verify_totals,
        injected=injected,
    )


def _our_rows(trace: Path, folder: Path, num_forwards: int) -> tuple[list[Rows], list[Rows]]:
    table = pq.read_table(folder / "violations.parquet")
    forwards: list[Rows] = [[] for _ in range(num_forwards)]
    sweeps: dict[int, Rows] = {int(event.scalar("event")): [] for event in read_trace(trace) if event.kind == "sweep"}
    columns = (table[name].to_pylist() for name in ("endpoint", "event", "forward", *FIELDS))
    for endpoint, event, forward, *row in zip(*columns, strict=True):
        (sweeps[event] if endpoint == "SWEEP" else forwards[forward]).append(tuple(row))
    return [sorted(rows) for rows in forwards], [sorted(rows) for rows in sweeps.values()]


def _our_figures(folder: Path) -> dict[int, tuple[int, int]]:
    """The sliding-window figures by forward; a simulated engine has one sliding group, which the target runs."""
    path = folder / "swa_divergence.parquet"
    if not path.exists():
        return {}
    rows = pq.read_table(path).to_pylist()
    return {row["forward"]: (row["out_of_window_tokens"], row["full_idx_divergence"]) for row in rows}
