"""Whatever the schedule, a clean engine is judged clean: hypothesis drives it step by step and shrinks what is not."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.pd_pair import PdPair
from kvcanary.recorder.engines.simulated.requests import NEVER, RequestSpec

from ...support.engines.simulated_engines import (
    assert_books_balance,
    assert_clean,
    assert_clean_pair,
    look_at_books,
    random_config,
    random_pair,
)

LENGTHS = st.integers(1, 60)
SEEDS = st.integers(0, 2000)
WHICH = st.integers(0, 1000)


class _Machine(RuleBasedStateMachine):
    """Requests of any length, that share prefixes or do not, go into an engine that is stepped now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name)
        self.random = np.random.default_rng(0)
        self.prompts = [self.random.integers(0, 50, 200).astype(np.int32) for _ in range(2)]

    def spec(self, longest: int, prefix: int, shared: int, own: int, answer: int, **rest: int) -> RequestSpec | None:
        """Return a request of that many shared and own tokens, or None where it is too long."""
        prompt = np.concatenate([self.prompts[prefix][:shared], self.random.integers(0, 50, own).astype(np.int32)])
        if not len(prompt) or len(prompt) + answer > longest:
            return None
        return RequestSpec(arrival_s=0.0, prompt=prompt % 2, max_new_tokens=answer, **rest)

    def teardown(self) -> None:
        self.judge()
        self._folder.cleanup()

    def judge(self) -> None:
        """Hold the trace, as far as it got, to what a clean engine's must be."""
        raise NotImplementedError


class EngineMachine(_Machine):
    """One engine."""

    engine: SimulatedEngine | None = None

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        self.engine = SimulatedEngine(random_config(seed), (), self.path / "trace.arrow")

    @rule(
        prefix=st.integers(0, 1),
        shared=st.integers(0, 120),
        own=st.integers(0, 40),
        answer=LENGTHS,
        copies=st.integers(1, 3),
    )
    def arrive(self, prefix: int, shared: int, own: int, answer: int, copies: int) -> None:
        spec = self.spec(self.engine.config.longest_request, prefix, shared, own, answer, copies=copies)
        if spec is not None and len(self.engine.scheduler.waiting) < 30:
            self.engine.scheduler.add(self.engine.new_request(spec))

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.engine is not None and self.engine.scheduler.active)
    @rule(which=WHICH, hold=st.booleans())
    def retract(self, which: int, hold: bool) -> None:
        active = self.engine.scheduler.active
        self.engine.scheduler.retract(active[which % len(active)], hold=hold)

    @precondition(
        lambda self: self.engine is not None and (self.engine.scheduler.active or self.engine.scheduler.waiting)
    )
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        scheduler = self.engine.scheduler
        requests = scheduler.active + scheduler.waiting
        scheduler.abort(requests[which % len(requests)])

    @rule(count=st.integers(1, 400))
    def evict(self, count: int) -> None:
        self.engine.memory.cache.make_room(count)

    @rule()
    def sweep(self) -> None:
        if self.engine.config.prefix_cache:
            self.engine.sweeper.sweep()

    @rule()
    def slide(self) -> None:
        for request in self.engine.scheduler.active:
            self.engine.memory.slide(request)

    @rule()
    def hear_back(self) -> None:
        self.engine.drain()

    @rule()
    def run_dry(self) -> None:
        self.engine.run()

    @invariant()
    def books_are_in_order(self) -> None:
        if self.engine is not None:
            look_at_books(self.engine)

    def judge(self) -> None:
        if self.engine is None:
            return
        self.engine.drain()
        self.engine.close()
        if self.engine.counters.tokens:
            assert_clean(self.path / "trace.arrow", self.engine, complete=False)
        else:
            assert_books_balance(self.path / "trace.arrow", complete=False)


class PairMachine(_Machine):
    """A prefill and a decode engine."""

    pair: PdPair | None = None

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        self.pair = random_pair(seed, self.path, requests=1)
        self.pair.run()

    @rule(
        prefix=st.integers(0, 1),
        shared=st.integers(0, 120),
        own=st.integers(0, 40),
        answer=LENGTHS,
        abort_at=st.sampled_from([NEVER] * 5 + [0, 1, 20]),
    )
    def arrive(self, prefix: int, shared: int, own: int, answer: int, abort_at: int) -> None:
        longest = min(side.config.longest_request for side in (self.pair.prefill, self.pair.decode))
        spec = self.spec(longest, prefix, shared, own, answer, abort_at=abort_at)
        if spec is not None and len(self.pair.prefill.scheduler.waiting) < 30:
            self.pair.submit(spec)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.pair.step()

    @precondition(lambda self: self.pair is not None and self.pair.decode.scheduler.running)
    @rule(which=WHICH)
    def retract(self, which: int) -> None:
        running = self.pair.decode.scheduler.running
        self.pair.decode.scheduler.retract(running[which % len(running)])

    @precondition(lambda self: self.pair is not None and any(not room.steps_left for room in self.pair.rooms.values()))
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        rooms = [room for room in self.pair.rooms.values() if not room.steps_left]
        self.pair.abort(rooms[which % len(rooms)])

    @rule(count=st.integers(1, 400))
    def evict(self, count: int) -> None:
        self.pair.prefill.memory.cache.make_room(count)

    @rule()
    def run_dry(self) -> None:
        self.pair.run()

    @invariant()
    def books_are_in_order(self) -> None:
        if self.pair is not None:
            look_at_books(self.pair.prefill)
            look_at_books(self.pair.decode)

    def judge(self) -> None:
        if self.pair is None:
            return
        self.pair.run()  # what was being sent would be missed by the side that has the shorter trace
        self.pair.close()
        if self.pair.decode.counters.tokens:
            assert_clean_pair(self.pair)


_RARELY = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}

TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=30, **_RARELY)
TestPair = PairMachine.TestCase
TestPair.settings = settings(max_examples=settings().max_examples // 8, stateful_step_count=25, **_RARELY)
