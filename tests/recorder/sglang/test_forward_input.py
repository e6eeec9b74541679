"""A batch becomes a forward, by its mode, and a draft graph's steps become several."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.host_arrays import own_int64
from kvcanary.recorder.engines.sglang.forward import MODES, draft_steps, forward_input, prefix_and_extend
from kvcanary.recorder.engines.sglang.trees import draft_tree


def batch(mode: str, **fields: Any) -> Any:
    values = {
        "forward_mode": SimpleNamespace(name=mode),
        "req_pool_indices": torch.tensor([2, 3]),
        "seq_lens": torch.tensor([10, 20]),
        "positions": torch.tensor([9, 19]),
        "input_ids": torch.tensor([70, 71]),
        "out_cache_loc": torch.tensor([30, 31]),
        "extend_seq_lens": torch.tensor([3, 4]),
        "extend_prefix_lens": torch.tensor([7, 16]),
        "spec_info": SimpleNamespace(draft_token_num=4),
    }
    return SimpleNamespace(**{**values, **fields})


@pytest.mark.parametrize(
    ("mode", "prefix", "extend"),
    [
        ("DECODE", [9, 19], [1, 1]),
        ("EXTEND", [7, 16], [3, 4]),
        ("MIXED", [7, 16], [3, 4]),
        ("TARGET_VERIFY", [10, 20], [4, 4]),
        ("DRAFT_EXTEND_V2", [7, 16], [3, 4]),
    ],
)
def test_prefix_and_extend_by_mode(mode: str, prefix: list[int], extend: list[int]) -> None:
    told = prefix_and_extend(batch(mode), MODES[mode], 2, np.array([9, 19]))
    assert [part.tolist() for part in told] == [prefix, extend]


def test_a_decode_goes_by_positions_and_its_padding_has_none() -> None:
    prefix, extend = prefix_and_extend(batch("DECODE"), "decode", 3, np.array([9, 19]))
    assert (prefix.tolist(), extend.tolist()) == ([9, 19, 0], [1, 1, 1])


def test_a_forward_of_one_table_says_nothing_of_another() -> None:
    tables = [torch.zeros((4, 8), dtype=torch.int32), torch.ones((4, 8), dtype=torch.int32)]
    layout: Any = SimpleNamespace(tables=tables, luts=[])
    runner: Any = SimpleNamespace(index=1, table=1, fed=None)
    told = forward_input(
        batch("DECODE", out_cache_loc=torch.tensor([30])),
        runner=runner,
        layout=layout,
        request_ids=np.array([1, 2]),
        truth=None,
    )
    assert [loc.tolist() for loc in told.out_cache_loc] == [[-1, -1], [30, -1]]
    assert told.reads[0].counts.tolist() == [0, 0]
    assert told.reads[1] is tables[1]


def test_a_batch_of_an_unknown_mode_is_refused() -> None:
    layout: Any = SimpleNamespace(tables=[], luts=[])
    runner: Any = SimpleNamespace(index=0, table=0, fed=None)
    with pytest.raises(ValueError, match="FUTURE"):
        forward_input(batch("FUTURE"), runner=runner, layout=layout, request_ids=np.array([1, 2]), truth=None)


def test_the_steps_of_a_draft_graph_become_forwards() -> None:
    before = batch("DECODE", rids=["a", "b"], out_cache_loc=torch.tensor([30, 31, 32, 40, 41, 42]))
    steps_of = draft_steps(before, own_int64)
    before.positions += 100  # the engine goes on with its buffers
    steps = steps_of((None, None, torch.tensor([[1, 2, 3], [4, 5, 6]]), None))
    shown = [(s.input_ids.tolist(), s.positions.tolist(), s.out_cache_loc.tolist(), s.rids) for s in steps]
    assert shown == [([1, 4], [9, 19], [30, 40], ["a", "b"]), ([2, 5], [10, 20], [31, 41], ["a", "b"])]


def test_an_idle_draft_has_no_steps() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    names = ("req_pool_indices", "positions", "out_cache_loc", "seq_lens")
    steps_of = draft_steps(batch("IDLE", rids=[], **dict.fromkeys(names, nothing)), own_int64)
    assert steps_of((None, None, torch.empty(0, 3), None)) == []


@pytest.mark.parametrize(
    ("said", "tree"),
    [
        ({}, ""),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}, ""),
        ({"speculative_algorithm": None, "speculative_eagle_topk": 4}, ""),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, "speculative_eagle_topk is 4"),
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 10}, "max_bfs_breadth is 10"),
        (
            {
                "speculative_algorithm": "NGRAM",
                "speculative_ngram_max_bfs_breadth": 1,
                "speculative_num_draft_tokens": 4,
            },
            "shorter than speculative_num_draft_tokens, 4",
        ),
        (
            {
                "speculative_algorithm": "NGRAM",
                "speculative_ngram_max_bfs_breadth": 1,
                "speculative_num_draft_tokens": 2,
            },
            "",
        ),
    ],
)
def test_draft_trees_are_told_from_chains(said: dict[str, Any], tree: str) -> None:
    found = draft_tree(SimpleNamespace(**said))
    assert tree in found
    assert bool(found) == bool(tree)
