"""One trial: one engine or pair, one seed, at most one fault; its traces, and what is true of them."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
    """What happened in the engine, or in both engines of a pair."""

    traces: tuple[Path, ...]
    ticks: tuple[tuple[int, ...], ...]  # of each trace, for each of its forwards, how many of all engines began before
    forwards: int  # of all engines
    injected_forward: int  # -1 if the fault never happened
    label: dict[str, object]  # what its mark says
    effect: Effect | None  # None if no forward had anything wrong
    broke_down: str  # how the engine itself gave up on its damaged books, if it did


def run_trial(trial: Trial, target: Path, *, overwrite: bool = False) -> TrialRun:
    """Run one trial and record its trace, or of a pair both traces, `target` being the folder.

    Raises:
        TraceError: a trace cannot be created, or not be written to its end.
    """
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
