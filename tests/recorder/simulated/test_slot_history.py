"""The engine tells of every slot and every request, so that a reader of the trace knows who holds what."""

import pytest
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.memory import SlotEvents
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.trace.reader import TraceReader, read_trace

from ...support.engines.books import read_books
from ...support.engines.simulated_engines import assert_clean

WORKLOAD = RandomWorkload(
    requests=25, prompt_tokens=60, output_tokens=25, max_tokens=200, sharing=0.8, fork_rate=0.3, abort_rate=0.2
)
CONFIGS = {
    "paged": {"page_size": 4, "num_pages": 100},
    "sliding": {"page_size": 4, "num_pages": 150, "shape": "swa", "window": 16, "swa_num_pages": 80},
    "eagle": {"page_size": 2, "num_pages": 200, "eagle": True},
    "no_cache": {"page_size": 8, "num_pages": 60, "prefix_cache": False},
    "host": {"page_size": 4, "num_pages": 80, "host_pages": 40},
    "overlap": {"page_size": 1, "num_pages": 500, "overlap": True},
}


def record(path, changes):
    engine = SimulatedEngine(EngineConfig(**changes), WORKLOAD, path, overwrite=True)
    with engine:
        engine.run()
    return engine


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.one_in(3)
def test_the_header_promises_it_and_the_trace_keeps_it(name, tmp_path):
    path = tmp_path / "trace.arrow"
    engine = record(path, CONFIGS[name])
    with TraceReader(path) as reader:
        assert reader.header.slot_history == "complete"
    assert_clean(path, engine)
    books, counters = read_books(path), engine.counters
    assert books.statuses["finished"] == counters.finished > 0
    assert books.statuses["aborted"] == counters.aborted
    assert books.statuses["retracted"] == counters.retractions
    left_early = counters.requests - counters.forks  # forks that found no room come in as any other request
    assert left_early <= books.statuses["admitted"] + counters.aborted


def test_statuses_of_allocs(tmp_path):
    path = tmp_path / "trace.arrow"
    engine = record(path, CONFIGS["sliding"])
    told = {
        (view.scalar("status"), group)
        for view in read_trace(path)
        if view.kind == "alloc"
        for group in view.ints("slot_group").tolist()
    }
    assert told == {(status, group) for status in ("", "shared", "cached") for group in (0, 1)}
    assert engine.counters.window_remapped_pages + engine.counters.deduplicated_pages > 0


class SilentOn(SlotEvents):
    """Keeps one kind of thing to itself."""

    left_out: tuple[str, str] = ("", "")

    def record(self, kind, pages, **rest):
        if (kind, rest.get("status", "")) != self.left_out:
            super().record(kind, pages, **rest)


@pytest.mark.parametrize(
    "left_out", [("alloc", ""), ("alloc", "shared"), ("alloc", "cached"), ("free", ""), ("evict", "")]
)
def test_what_is_not_told_is_missed(left_out, tmp_path):
    """The books above can be wrong: whatever an engine keeps to itself shows in them."""
    path = tmp_path / "trace.arrow"
    with SimulatedEngine(EngineConfig(**CONFIGS["paged"]), WORKLOAD, path) as engine:
        engine.history.__class__ = SilentOn
        engine.history.left_out = left_out
        engine.run()
    assert read_books(path).wrong
