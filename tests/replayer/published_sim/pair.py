"""A prefill and a decode engine, judged twice each; the canary records travel with the KV, as they do online."""

from pathlib import Path

from kvcanary.recorder.engines.simulated.config import BrokenEngineError
from kvcanary.recorder.engines.simulated.pd_pair import Link, PairSettings, PdPair
from kvcanary.replayer.run.replay import replay_joined

from .cases import FORWARDS, config_and_workload
from .injector import Injector
from .run import Run, compared, settings
from .spy import Spy


def run_pair(name: str, seed: int, folder: Path, fault: str | None = None, *, side: str = "prefill") -> list[Run]:
    """Run a pair of the named engines, one of them with a fault or both without, and replay their traces together."""
    config, workload, kv_hash = config_and_workload(name, seed)
    with PdPair(config, workload, folder, settings=PairSettings(failure_rate=0.2)) as pair:
        spies = [Spy(engine, kv_hash=kv_hash) for engine in (pair.prefill, pair.decode)]
        carry_records(pair.link, *spies)
        injector = Injector(getattr(pair, side), fault, seed=seed) if fault else None
        try:
            while pair.step() and all(len(spy.seen.forwards) < FORWARDS for spy in spies):
                if injector:
                    injector(getattr(pair, side))
        except BrokenEngineError:
            assert injector
            assert injector.injected
    traces = [pair.prefill_path, pair.decode_path]
    reports = [folder / trace.stem for trace in traces]
    for report in reports:
        report.mkdir()
    summaries = replay_joined(traces, settings=settings(kv_hash, traces[0]), reports=reports)
    injected = injector.injected if injector else 0
    return [
        compared(spy, summary, trace, report, injected=injected)
        for spy, summary, trace, report in zip(spies, summaries, traces, reports, strict=True)
    ]


def carry_records(link: Link, prefill: Spy, decode: Spy) -> None:
    """Hook into a link: what the sender's slots hold when a transfer starts arrives with it when it ends."""
    start, end = link.start, link.end
    under_way: dict[tuple[int, int], dict] = {}

    def spied_start(room) -> None:
        for part in link.parts(room):
            under_way[room.number, part.group] = prefill.canary.records(part.group, part.src)
        start(room)

    def spied_end(room) -> None:
        parts = link.parts(room)
        end(room)
        for part in parts:
            decode.canary.land(part.group, part.dst, under_way.pop((room.number, part.group)))
            decode.seen.landed += part.dst.size

    link.start, link.end = spied_start, spied_end
