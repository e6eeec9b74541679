"""The fault lab's faults, on engines small enough for a plain Python canary, judged twice."""

import dataclasses
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.pd_pair import PdPair
from kvcanary.replayer.lab.configurations import CONFIGURATIONS, Configuration
from kvcanary.replayer.lab.effect import Clock, Probe
from kvcanary.replayer.lab.fault import Bench, Fault
from kvcanary.replayer.run.replay import replay_joined

from .pair import carry_records
from .run import Run, compared, settings
from .spy import Spy

_SMALL = {"prompt_tokens": 14, "output_tokens": 8, "max_tokens": 46, "requests": 12, "vocab_size": 500}
FORWARDS_AFTER = 12


def small(name: str) -> Configuration:
    """Return one of the lab's configurations with shorter requests, and the memory that goes with them."""
    given = CONFIGURATIONS[name]
    page_size = given.engine.get("page_size", 4)
    pages = given.engine.get("num_pages", 130) * (2 if "sweep" in name else 1) // 2
    engine = {**given.engine, "num_pages": max(pages, 80 // page_size), "max_running": 4, "vocab_size": 500}
    return dataclasses.replace(given, engine=engine, workload={**given.workload, **_SMALL})


def run_lab(fault: Fault, config: str, seed: int, folder: Path) -> tuple[list[Run], bool]:
    """Run a fault of the lab in one of its configurations; both sides of each trace, and whether it happened."""
    configuration = small(config)
    engine_config, workload = configuration.engine_config(seed), configuration.requests(seed)
    random = np.random.default_rng([seed, *fault.name.encode()])
    clock = Clock()
    folder.mkdir()
    with ExitStack() as stack:
        pair = None
        if configuration.pair is not None:
            pair = stack.enter_context(PdPair(engine_config, workload, folder, settings=configuration.pair))
            engines, step = [pair.prefill, pair.decode], pair.step
        else:
            engine = stack.enter_context(SimulatedEngine(engine_config, workload, folder / "trace.arrow"))
            engines, step = [engine], engine.step
        probes = [Probe(engine, clock) for engine in engines]
        spies = [Spy(engine, kv_hash="PARTIAL") for engine in engines]
        if pair is not None:
            carry_records(pair.link, *spies)
        starts_at = int(random.integers(6, 14))
        bench = Bench(fault.name, engines[0], probes[0], clock, random, starts_at=starts_at, pair=pair)
        fault.arm(bench)
        stop_at = None
        try:
            while step() and (stop_at is None or clock.now < stop_at):
                bench.stepped()
                if stop_at is None and bench.injections:
                    stop_at = clock.now + FORWARDS_AFTER * len(engines)
        except Exception:
            if not bench.injections:
                raise
    traces = [Path(engine.recorder.path) for engine in engines]
    reports = [folder / f"{trace.stem}.report" for trace in traces]
    for report in reports:
        report.mkdir()
    summaries = replay_joined(traces, settings=settings("PARTIAL", traces[0]), reports=reports)
    runs = [
        compared(spy, summary, trace, report, injected=bench.injections)
        for spy, summary, trace, report in zip(spies, summaries, traces, reports, strict=True)
    ]
    return runs, bool(bench.injections)
