"""Random engines, random interference, and what a replay says of the trace."""

from pathlib import Path

import numpy as np
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.pd_pair import PairSettings, PdPair
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.replay import ReplaySettings, replay, replay_joined

from .audit import audit
from .books import Books, read_books


def random_config(seed: int) -> EngineConfig:
    random = np.random.default_rng(seed)

    def pick(*values):
        return values[int(random.integers(len(values)))]

    shape = pick("mha", "mla", "swa", "swa", "dsv4")
    sliding = shape in ("swa", "dsv4")
    page_size = pick(1, 2, 4, 8, 16)
    eagle = random.random() < 0.4
    cache = random.random() < 0.85
    window = pick(1, 5, 16, 48)
    chunk = max(page_size, pick(16, 33, 64, 200))
    pool = pick(300, 600, 1500)
    draft = pick(1, 2, 3, 5)
    tight = -(-(window + max(chunk, draft + 1)) // page_size) + 2 + -(-8 // page_size)
    return EngineConfig(
        seed=seed,
        shape=shape,
        page_size=page_size,
        num_pages=-(-pool // page_size),
        swa_num_pages=int(pick(0, tight, tight + 20)) if sliding else 0,
        window=window,
        rows=int(pick(6, 10, 14)),
        width=int(pick(200, 700)),
        kv_bytes_per_token=int(pick(16, 32, 48)),
        noise=bool(pick(True, True, False)),
        chunk_tokens=chunk,
        max_running=int(pick(2, 4, 5)),
        max_waiting=int(pick(1, 4, 30)),
        mixed=not eagle and bool(pick(True, False)),
        prefix_cache=cache,
        host_pages=int(pick(0, 5, 200)) if cache and not sliding else 0,
        graph_batch_sizes=pick((), (1, 2, 4, 8), (3, 6)),
        sampler=pick("oracle", "random") if eagle else pick("oracle", "random", "content"),
        vocab_size=int(pick(2, 50, 32_000)),
        eagle=eagle,
        draft_tokens=draft,
        accept_rate=float(pick(0.0, 0.5, 0.9, 1.0)),
        idle_forwards=bool(pick(True, False)),
        free_order=pick("lifo", "fifo", "shuffled"),
        sweep_interval=int(pick(0, 1, 7)) if cache else 0,
        overlap=not eagle and bool(pick(True, False)),
    )


def random_workload(seed: int, config: EngineConfig, requests: int = 24) -> RandomWorkload:
    random = np.random.default_rng([seed, 1])
    return RandomWorkload(
        requests=requests,
        seed=seed,
        prompt_tokens=int(random.integers(1, 150)),
        output_tokens=int(random.integers(1, 40)),
        max_tokens=min(500, config.longest_request + 20),  # some are refused
        sharing=float(random.choice([0.0, 0.5, 0.9])),
        num_prefixes=int(random.choice([1, 4])),
        arrival_rate=float(random.choice([2.0, 40.0, 1000.0])),
        priorities=int(random.choice([1, 3])),
        abort_rate=float(random.choice([0.0, 0.2])),
        fork_rate=float(random.choice([0.0, 0.3])),
        vocab_size=config.vocab_size,
    )


def random_pair(seed: int, folder: Path, requests: int = 24) -> PdPair:
    config = random_config(seed)
    random = np.random.default_rng([seed, 3])
    settings = PairSettings(
        max_steps=int(random.integers(1, 7)),
        failure_rate=float(random.choice([0.0, 0.1, 0.5])),
        retries=int(random.integers(0, 3)),
    )
    return PdPair(config, random_workload(seed, config, requests), folder, settings=settings)


class Interference:
    """Between steps, does at random what a scheduler may do at any time; then looks at the books."""

    def __init__(self, seed: int, *, rate: float = 0.1) -> None:
        self._random = np.random.default_rng([seed, 2])
        self._rate = rate
        self._steps = 0

    def __call__(self, engine: SimulatedEngine) -> None:
        scheduler = engine.scheduler
        if self._random.random() < self._rate and scheduler.active:
            victim = scheduler.active[int(self._random.integers(len(scheduler.active)))]
            if self._random.random() < 0.7:
                scheduler.retract(victim, hold=bool(self._random.random() < 0.5))
            else:
                scheduler.abort(victim)
        if self._random.random() < self._rate:
            engine.memory.cache.make_room(int(self._random.integers(engine.config.num_pages + 1)))
        self._steps += 1
        if self._steps % 4 == 0:
            look_at_books(engine)


def look_at_books(engine: SimulatedEngine) -> None:
    problems = audit(engine)
    assert not problems, problems


def judge(path: Path) -> Summary:
    return replay(path, settings=ReplaySettings(), report=None)


def assert_clean(path: Path, engine: SimulatedEngine, *, complete: bool = True) -> Summary:
    stats = engine.recorder.stats()
    assert stats.off == "closed"
    assert stats.dropped_events == 0
    summary = judge(path)
    assert summary.first_violation is None, summary.first_violation
    assert summary.first_finding is None, summary.first_finding
    assert summary.verdict.value == "clean" or not summary.written, summary.doubts
    assert summary.forwards == engine.counters.forwards
    assert_books_balance(path, complete=complete)
    return summary


def judge_pair(pair: PdPair) -> list[Summary]:
    paths = [pair.prefill_path, pair.decode_path]
    return replay_joined(paths, settings=ReplaySettings(), reports=[None, None])


def assert_clean_pair(pair: PdPair) -> None:
    for engine, summary in zip((pair.prefill, pair.decode), judge_pair(pair), strict=True):
        assert engine.recorder.stats().off == "closed"
        assert engine.recorder.stats().dropped_events == 0
        assert summary.first_violation is None, summary.first_violation
        assert summary.first_finding is None, summary.first_finding
        # A side that came to nothing but idle forwards had nothing to check, and its trace says so.
        assert summary.verdict.value == "clean" or not summary.written, summary.doubts
        assert summary.forwards == engine.counters.forwards
        assert_books_balance(engine.recorder.path)


def assert_books_balance(path: Path, *, complete: bool = True) -> Books:
    books = read_books(path, complete=complete)
    assert not books.wrong, books.wrong[:10]
    return books
