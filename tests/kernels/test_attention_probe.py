"""A token's attention that is laid aside on the device is what the engine's tensors hold."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcanary.kernels.capture.attention_probe import (
    FOUND_WORDS,
    PagedHalf,
    ProbedCall,
    ProbeMemory,
    launch_probe,
)

POSITIONS, BLOCKS, KV_HEADS, EACH = 40, 12, 2, 3


def memory(width: int, dtype: torch.dtype) -> ProbeMemory:
    wanted, found = (torch.zeros(n, dtype=torch.int64) for n in (5, FOUND_WORDS))
    return ProbeMemory(wanted, found, torch.full((2 + 2 * POSITIONS, width), 7.0, dtype=dtype))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    page=st.sampled_from([1, 4]),
    block=st.sampled_from([4, 8]),
    dims=st.sampled_from([(8, 8), (24, 16), (5, 8)]),
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=4),
    named=st.booleans(),
    first=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_what_is_laid_aside_is_what_the_engine_has(
    seed: int,
    page: int,
    block: int,
    dims: tuple[int, int],
    lens: list[tuple[int, int]],
    named: bool,
    first: bool,
    dtype: torch.dtype,
) -> None:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    both = torch.randn(BLOCKS, KV_HEADS, block, sum(dims)).to(dtype).permute(0, 2, 1, 3)
    keys, values = both[..., : dims[0]], both[..., dims[0] :]
    total, held = [p + e for p, e in lens], BLOCKS * block // page
    table = torch.full((len(lens) + 3, -(-POSITIONS // page)), 10**6, dtype=torch.int32)
    rows = torch.from_numpy(random.permutation(len(table))[: len(lens)]) if named else None
    for r, n in enumerate(total):
        pages = random.integers(0, held, -(-n // page))
        table[r if rows is None else int(rows[r]), : len(pages)] = torch.from_numpy(pages)
    starts = torch.tensor(np.cumsum([0, *(e for _, e in lens)]), dtype=torch.int32)
    query, output = (torch.randn(int(starts[-1]), KV_HEADS * EACH, dim).to(dtype) for dim in dims)
    r, kv_head, head = int(random.integers(len(lens))), int(random.integers(KV_HEADS)), int(random.integers(6))
    probe = memory(max(dims), dtype)
    call = ProbedCall(query, output, table, page, torch.tensor(total, dtype=torch.int32), starts, rows)
    launch_probe(probe, call, PagedHalf(keys), PagedHalf(values), 9)
    assert not probe.found.any() and (probe.rows == 7).all()  # nothing was wanted
    probe.wanted[:] = torch.tensor([5, r, kv_head, head, int(first)])
    launch_probe(probe, call, PagedHalf(keys), PagedHalf(values), 9)
    begin, token = int(starts[r]), int(starts[r] if first else starts[r + 1] - 1)
    assert probe.found.tolist() == [5, 9, r, begin, token, total[r]]
    position = np.arange(total[r])
    slot = table[r if rows is None else int(rows[r])].numpy()[position // page].astype(int) * page + position % page
    for at, half, own in ((2, keys, dims[0]), (2 + POSITIONS, values, dims[1])):
        same(probe.rows[at : at + len(slot), :own], half[slot // block, slot % block, kv_head])
        assert (probe.rows[at + len(slot) : at + POSITIONS] == 7).all()
    same(probe.rows[0, : dims[0]], query[token, head])
    same(probe.rows[1, : dims[1]], output[token, head])


def same(got: Any, expected: Any) -> None:
    assert torch.equal(got, expected)


def test_a_token_of_each_request_needs_no_starts_and_one_that_is_too_long_has_no_rows() -> None:
    pool = PagedHalf(torch.randn(64, 1, 1, 8))
    table = torch.arange(128, dtype=torch.int32).reshape(2, 64)
    tokens = torch.randn(2, 1, 8)
    for length in (POSITIONS, POSITIONS + 1):
        probe = memory(8, torch.float32)
        probe.wanted[:] = torch.tensor([1, 1, 0, 0, 0])
        lens = torch.tensor([3, length])
        launch_probe(probe, ProbedCall(tokens, tokens, table, 1, lens), pool, pool, 0)
        assert probe.found.tolist() == [1, 0, 1, 1, 1, length]
        assert bool((probe.rows[2] == 7).all()) is (length > POSITIONS)


@pytest.mark.parametrize(
    ("wanted", "starts", "row"),
    [
        ((7, 0, 0, 0), None, 0),
        ((-1, 0, 0, 0), None, 0),
        ((0, 0, 0, 0), [0, 9], 0),
        ((0, 0, 0, 0), [-3, -2], 0),
        ((0, 0, 0, 0), None, 5),
    ],
)
def test_of_what_the_call_has_not_nothing_is_laid_aside(
    wanted: tuple[int, ...], starts: list[int] | None, row: int
) -> None:
    pool, table, tokens = (
        PagedHalf(torch.randn(64, 1, 1, 8)),
        torch.arange(64, dtype=torch.int32)[None],
        torch.randn(1, 1, 8),
    )
    probe = memory(8, torch.float32)
    probe.wanted[:] = torch.tensor([1, *wanted])
    begins = None if starts is None else torch.tensor(starts)
    call = ProbedCall(tokens, tokens, table, 1, torch.tensor([9]), begins, torch.tensor([row]))
    launch_probe(probe, call, pool, pool, 0)
    assert not probe.found.any() and (probe.rows == 7).all()


@pytest.mark.parametrize("entry", [-1, 64, 1 << 30])
def test_slots_that_the_pool_has_not_hold_no_numbers(entry: int) -> None:
    pool = PagedHalf(torch.randn(64, 1, 1, 8))
    table = torch.arange(64, dtype=torch.int32)[None].clone()
    table[0, 3] = entry
    probe, tokens = memory(8, torch.float32), torch.randn(1, 1, 8)
    probe.wanted[0] = 1
    launch_probe(probe, ProbedCall(tokens, tokens, table, 1, torch.tensor([9])), pool, pool, 0)
    same(probe.rows[2:5], pool.values[:3, 0, 0])
    assert probe.rows[5].isnan().all() and not probe.rows[6:11].isnan().any()
