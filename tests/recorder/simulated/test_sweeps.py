"""Sweeps name what the prefix cache holds, and show damage that no forward reads."""

import pytest
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.radix import NO_PAGE
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.trace.reader import TraceReader, read_trace

from ...support.engines.simulated_engines import assert_clean, judge

WORKLOAD = RandomWorkload(requests=25, prompt_tokens=60, output_tokens=20, max_tokens=200, sharing=0.8)
SHAPES = {
    "mha": {"page_size": 4},
    "swa": {"page_size": 4, "shape": "swa", "window": 16, "swa_num_pages": 60},
    "dsv4": {"page_size": 1, "shape": "dsv4", "window": 8, "num_pages": 900},
    "eagle": {"page_size": 2, "eagle": True},
    "host": {"page_size": 4, "num_pages": 80, "host_pages": 60},
}


def start(path, changes, **options) -> SimulatedEngine:
    return SimulatedEngine(
        EngineConfig(**{"num_pages": 300, "sweep_interval": 5, **changes}), WORKLOAD, path, **options
    )


def swept(engine):
    """What a sweep has to say now: `{(group, slot): (position, previous slot, locked)}`."""
    memory, size, found = engine.memory, engine.config.page_size, {}
    for node in memory.cache.tree.walk():
        if node.page == NO_PAGE:
            continue
        for offset in range(size):
            slot, position = node.page * size + offset, (node.depth - 1) * size + offset
            before = slot - 1 if offset else (node.parent.page + 1) * size - 1 if position else -1
            for group in memory.layout.full_groups:
                found[group, slot] = (position, before, int(node.lock > 0))
            if memory.swa is not None:
                half, half_before = int(memory.lut[slot]), int(memory.lut[before]) if before >= 0 else -1
                if half:
                    found[memory.layout.swa_group, half] = (position, half_before, int(node.window_lock > 0))
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.one_in(2)
def test_a_sweep_names_all_that_the_cache_holds(shape, tmp_path):
    path = tmp_path / "trace.arrow"
    with start(path, SHAPES[shape]) as engine:
        expected, swept_before = [], 0
        while engine.step():
            if engine.counters.sweeps > swept_before:
                swept_before = engine.counters.sweeps
                expected.append(swept(engine))
    with TraceReader(path) as reader:
        runners = len(reader.header.runners)
        assert reader.header.sweep_interval == 5
    events = [view for view in read_trace(path) if view.kind == "sweep"]
    assert len(events) == runners * engine.counters.sweeps
    assert len(expected) >= engine.counters.target_forwards // 8 > 0
    assert any(expected)
    for number, whole in enumerate(expected):
        told = {}
        for view in events[runners * number : runners * (number + 1)]:
            columns = [view.ints(f"sweep_{name}").tolist() for name in ("group", "slot", "position", "prev", "locked")]
            told |= {(g, s): (p, before, lock) for g, s, p, before, lock in zip(*columns, strict=True) if s}
        assert told == whole
    assert {lock for whole in expected for _, _, lock in whole.values()} == {0, 1}
    assert_clean(path, engine)


def test_damage_to_an_unused_page_shows_in_the_sweep_only(tmp_path):
    path = tmp_path / "trace.arrow"
    with start(path, {"page_size": 4}) as engine:
        done = False
        while engine.step():
            unused = [n for n in engine.memory.cache.tree.walk() if n.page != NO_PAGE and not n.lock]
            if not done and engine.counters.finished > 3 and unused:
                engine.memory.pools[0].stream_bytes(0)[unused[-1].page * 4, 0] ^= 0xFF
                engine.sweeper.sweep()
                done = True
                break
    assert done
    summary = judge(path)
    assert summary.verdict.value == "corrupt"
    assert summary.first_violation["launch"] == "SWEEP_K_FULL"
    assert summary.first_violation["reasons"] == ["VERIFY_KV_HASH"]
