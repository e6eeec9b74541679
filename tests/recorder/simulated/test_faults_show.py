"""The engine's decision points can be broken one by one, as real bugs did, and the replay sees it."""

import numpy as np
import pytest
from kvcanary.recorder.engines.simulated.batch import BatchBuilder
from kvcanary.recorder.engines.simulated.config import BrokenEngineError, EngineConfig
from kvcanary.recorder.engines.simulated.eagle import Eagle
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.pools import PageAllocator, SlidingWindowPool
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload

from ...support.engines.simulated_engines import assert_clean, judge


class UncheckedAllocator(PageAllocator):
    """Frees whatever it is told to, as a real allocator does."""

    def check_free(self, pages):
        pass


def early_free(engine):
    """A running request's first own page is freed while it goes on reading it."""
    engine.memory.allocator.__class__ = UncheckedAllocator

    def act(engine):
        for request in engine.scheduler.running[:1]:
            if request.shared_pages * engine.config.page_size < request.cached_len:
                page = engine.memory.row_pages(request.row, request.shared_pages, request.shared_pages + 1)
                engine.memory.allocator.free(page)

    return act


def stale_window_entry(engine):
    """A full-to-SWA entry survives its page."""

    class Stale(SlidingWindowPool):
        def unpair(self, full_pages):
            pass

        def pair(self, full_pages, swa_pages):
            fresh = self.paired(full_pages) == 0
            super().pair(full_pages[fresh], swa_pages[fresh])

    engine.memory.swa.__class__ = Stale
    engine.memory.swa.pages.__class__ = UncheckedAllocator


def padded_rows_keep_slots(engine):
    class Keeps(BatchBuilder):
        def padding_slots(self, count):
            row = engine.scheduler.running[0].row
            return np.resize(engine.memory.req_to_token[row, :1].astype(np.int64), count)

    engine.builder.__class__ = Keeps


def draft_position_plus_one(engine):
    class PlusOne(BatchBuilder):
        def build(self, mode, requests, **kwargs):
            self.off = int(mode == "decode" and kwargs.get("runner", 0) == 1)
            return super().build(mode, requests, **kwargs)

        def positions(self, prefix_lens, extend_lens):
            return super().positions(prefix_lens, extend_lens) + self.off

    engine.builder.__class__ = PlusOne


def chunk_tail_predicted_token(engine):
    class Predicted(Eagle):
        def draft_inputs(self, request, prefix, extend):
            tokens = super().draft_inputs(request, prefix, extend).copy()
            if prefix + extend < request.prompt_len:
                tokens[-1] = (tokens[-1] + 1) % 32_000
            return tokens

    engine.eagle.__class__ = Predicted


def byte_flip(engine):
    def act(engine):
        for request in engine.scheduler.running[:1]:
            slot = engine.memory.req_to_token[request.row, request.cached_len - 1]
            engine.memory.pools[0].stream_bytes(0)[slot, 0] ^= 0xFF

    return act


def row_points_elsewhere(engine):
    def act(engine):
        if len(engine.scheduler.running) > 1:
            first, second = engine.scheduler.running[:2]
            table = engine.memory.req_to_token
            table[first.row, first.cached_len - 1] = table[second.row, second.cached_len - 1]

    return act


FAULTS = {
    "early_free": (early_free, {"prefix_cache": False}, {"position", "token", "chain", "kv"}),
    "stale_window_entry": (stale_window_entry, {"shape": "swa", "window": 16}, {"position", "chain", "token"}),
    "padded_rows_keep_slots": (padded_rows_keep_slots, {"graph_batch_sizes": (8, 16)}, {"kv"}),
    "draft_position_plus_one": (draft_position_plus_one, {"eagle": True}, {"position"}),
    "chunk_tail_predicted_token": (chunk_tail_predicted_token, {"eagle": True, "chunk_tokens": 32}, {"token"}),
    "byte_flip": (byte_flip, {}, {"kv"}),
    "row_points_elsewhere": (row_points_elsewhere, {}, {"position", "token", "chain"}),
}
WORKLOAD = RandomWorkload(requests=30, prompt_tokens=60, output_tokens=20, max_tokens=200, arrival_rate=200.0)


def start(tmp_path, changes) -> SimulatedEngine:
    config = EngineConfig(**{"page_size": 4, "num_pages": 300, **changes})
    return SimulatedEngine(config, WORKLOAD, tmp_path / "trace.arrow")


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name, tmp_path):
    inject, changes, reasons = FAULTS[name]
    with start(tmp_path, changes) as engine:
        act = inject(engine)
        for step in range(120):
            if not engine.step():
                break
            if act is not None and step == 20:
                act(engine)
    summary = judge(tmp_path / "trace.arrow")
    assert summary.verdict.value == "corrupt"
    found = " ".join(summary.violations_by_reason)
    assert any(reason in found.lower() for reason in reasons), summary.violations_by_reason


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_run_without_the_fault_is_clean(name, tmp_path):
    _, changes, _ = FAULTS[name]
    with start(tmp_path, changes) as engine:
        engine.run()
    assert_clean(tmp_path / "trace.arrow", engine)


def test_clean_engine_catches_its_own_double_free(tmp_path):
    with start(tmp_path, {}) as engine:
        while not engine.scheduler.running:
            engine.step()
        page = engine.memory.allocator.held_pages()[:1]
        engine.memory.allocator.free(page)
        with pytest.raises(BrokenEngineError, match="the full pool: pages"):
            engine.memory.allocator.free(page)
