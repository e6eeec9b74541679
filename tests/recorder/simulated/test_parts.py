"""The engine's parts by themselves."""

import tracemalloc

import numpy as np
import pytest
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.pools import PageAllocator
from kvcanary.recorder.engines.simulated.radix import RadixTree, window_prefix
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload


def tokens(*values):
    return np.array(values, np.int32)


def test_allocator_orders_and_never_gives_page_0():
    orders = {tuple(PageAllocator(40, free_order="shuffled", seed=seed).alloc(40).tolist()) for seed in range(3)}
    assert len(orders) == 3
    assert all(sorted(order) == list(range(1, 41)) for order in orders)
    lifo, fifo = PageAllocator(3), PageAllocator(3, free_order="fifo")
    for allocator in (lifo, fifo):
        assert allocator.alloc(4) is None
        assert allocator.alloc(3).tolist() == [1, 2, 3]
        assert allocator.alloc(1) is None
        allocator.free(np.array([2]))
        allocator.free(np.array([1]))
    assert lifo.alloc(2).tolist() == [1, 2]
    assert fifo.alloc(2).tolist() == [2, 1]


def test_tree_matches_inserts_and_finds_duplicates():
    tree = RadixTree(page_size=2, lookahead=0)
    first = tree.insert(tokens(1, 2, 3, 4, 5), [10, 11])
    assert [n.page for n in first.new] == [10, 11]
    assert [n.page for n in tree.match(tokens(1, 2, 3, 4, 9, 9), 3)] == [10, 11]
    assert [n.page for n in tree.match(tokens(1, 2, 3, 4, 9, 9), 1)] == [10]
    assert tree.match(tokens(1, 3, 3, 4), 2) == []
    second = tree.insert(tokens(1, 2, 7, 7), [20, 21])
    assert second.duplicates == [(0, 20)]
    assert [n.page for n in second.nodes] == [10, 21]


def test_lookahead_makes_the_next_token_part_of_a_page():
    tree = RadixTree(page_size=2, lookahead=1)
    tree.insert(tokens(1, 2, 3, 4, 5), [10, 11])
    assert tree.whole_pages(4) == 1
    assert [n.page for n in tree.match(tokens(1, 2, 3, 4, 6), 2)] == [10]
    assert [n.page for n in tree.match(tokens(1, 2, 3, 4, 5), 2)] == [10, 11]


def test_eviction_takes_the_leaf_used_longest_ago_and_no_locked_one():
    tree = RadixTree(page_size=1, lookahead=0)
    tree.insert(tokens(1, 2), [10, 11])
    tree.insert(tokens(1, 3), [10, 12])
    tree.insert(tokens(1, 4), [10, 13])
    tree.lock(tree.match(tokens(1, 3), 2)[-1])
    tree.match(tokens(1, 2), 2)
    gone = []
    while (node := tree.leaves.pop()) is not None:
        gone.append(node.page)
        tree.drop(node)
    assert gone == [13, 11]
    tree.unlock(tree.match(tokens(1, 3), 2)[-1])
    while (node := tree.leaves.pop()) is not None:
        gone.append(node.page)
        tree.drop(node)
    assert gone == [13, 11, 12, 10]


def test_window_prefix_needs_the_window_only():
    tree = RadixTree(page_size=2, lookahead=0)
    nodes = tree.insert(tokens(*range(10)), [1, 2, 3, 4, 5]).nodes
    for node, live in zip(nodes, [True, False, True, True, False], strict=True):
        node.windowed = live
    assert window_prefix(nodes, page_size=2, window=4) == 4
    assert window_prefix(nodes, page_size=2, window=5) == 1
    assert window_prefix(nodes[1:], page_size=2, window=4) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "x"}, "shape is 'x', expected one of mha"),
        ({"page_size": 0}, "page_size is 0"),
        ({"rows": 4, "max_running": 4}, "row 0 is padding"),
        ({"kv_bytes_per_token": 24}, "multiple of 16"),
        ({"eagle": True, "mixed": True}, "exclude one another"),
        ({"eagle": True, "sampler": "content"}, "oracle or random"),
        ({"host_pages": 3, "shape": "swa"}, "host_pages needs"),
        ({"shape": "swa", "swa_num_pages": 4}, "one window, one chunk"),
        ({"chunk_tokens": 8, "page_size": 16}, "chunk_tokens is 8"),
        ({"eagle": True, "overlap": True}, "eagle and overlap exclude one another"),
        ({"sweep_interval": -1}, "sweep_interval is -1"),
        ({"sweep_interval": 4, "prefix_cache": False}, "sweep_interval needs the prefix cache"),
        ({"role": "both"}, "role is 'both'"),
    ],
)
def test_config_says_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)


@pytest.mark.long
def test_memory_does_not_grow_with_the_workload(tmp_path):
    """Thirty thousand tokens more leave nothing behind in the engine."""
    workload = RandomWorkload(requests=100_000, prompt_tokens=400, output_tokens=5, max_tokens=900)
    config = EngineConfig(page_size=16, num_pages=300, chunk_tokens=900, host_pages=50)
    with SimulatedEngine(config, workload, tmp_path / "t.arrow", kv_watch_every=0) as engine:
        grown = []
        tracemalloc.start()
        for limit in (10_000, 40_000):
            while engine.counters.tokens < limit:
                engine.step()
            assert engine.recorder.stats().off == ""
            mine = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/engines/simulated/*")])
            grown.append(sum(trace.size for trace in mine.traces))
        tracemalloc.stop()
    assert 0 < grown[1] < grown[0] + 250_000, grown
