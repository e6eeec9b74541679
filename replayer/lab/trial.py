"""One trial: one engine or pair, one seed, at most one fault; its traces, and what is true of them."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...recorder.engines.simulated.engine import SimulatedEngine
from ...recorder.engines.simulated.pd_pair import PdPair
from ...recorder.errors import TraceError
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
    """What happened in the engine, or in both engines of a pair.

    `traces` are the files, `ticks[t]` for each forward of trace t how many forwards of all engines began before it.
    `forwards` counts them all. `injected_forward` is -1 where the fault never happened; `label` is what its mark says;
    `effect` is None where no forward had anything wrong; `broke_down` says how the engine itself gave up on its damaged
    books, if it did.
    """

    traces: tuple[Path, ...]
    ticks: tuple[tuple[int, ...], ...]
    forwards: int
    injected_forward: int
    label: dict[str, object]
    effect: Effect | None
    broke_down: str


def run_trial(trial: Trial, target: Path, *, overwrite: bool = False) -> TrialRun:
    """Run one trial and record its trace, or of a pair both traces, `target` being the folder.

    Raises:
        TraceError: a trace cannot be created, or not be written to its end.
    """
    configuration = CONFIGURATIONS[trial.config]
    config, workload = configuration.engine_config(trial.seed), configuration.requests(trial.seed)
    clock = Clock()
    with ExitStack() as stack:
        pair: PdPair | None = None
        engines: list[SimulatedEngine]
        step: Callable[[], Any]
        if configuration.pair is not None:
            pair = stack.enter_context(
                PdPair(config, workload, target, settings=configuration.pair, overwrite=overwrite)
            )
            engines, step = [pair.prefill, pair.decode], pair.step
        else:
            engine = stack.enter_context(SimulatedEngine(config, workload, target, overwrite=overwrite))
            engines, step = [engine], engine.step
        probes = [Probe(engine, clock) for engine in engines]
        bench = _bench(trial, engines[0], probes[0], clock, pair)
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


def _run(step: Callable[[], Any], bench: Bench | None) -> str:
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


def _bench(trial: Trial, engine: SimulatedEngine, probe: Probe, clock: Clock, pair: PdPair | None) -> Bench | None:
    fault = trial.fault
    if fault is None:
        return None
    random = np.random.default_rng([trial.seed, *fault.name.encode()])
    bench = Bench(fault.name, engine, probe, clock, random, starts_at=int(random.integers(*fault.warm_up)), pair=pair)
    fault.arm(bench)
    return bench
