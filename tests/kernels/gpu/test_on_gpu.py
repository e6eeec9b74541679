"""The Triton kernels on a GPU against the compiled loops on the CPU, byte for byte, over many random cases.

    pytest tests/kernels/gpu --gpu-cases 60 -n 8 -s

Not a part of `make test`, which has no GPU: it fails, rather than skips, where there is none.
"""

from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.constants import KvHashMode
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.kernels.ops.plan.reference import WritePlan
from kvcanary.kernels.ops.plan_verify.reference import CanaryBuffer, plan_verify, write_shared
from kvcanary.kernels.ops.write import triton as write_triton

from .. import device_cases, token_row_cases

KINDS = [("none",), ("partial",), ("all",), ("several",), ("pairs", "none"), ("none", "none", "partial", "all")]


@pytest.fixture(autouse=True)
def gpu() -> None:
    assert torch.cuda.is_available(), "these tests are for a machine with a GPU"


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("part", range(4))
def test_plan_and_verify(gpu_cases: int, kinds: Any, part: int) -> None:
    for seed in range(part, 4 * gpu_cases, 4):
        device_cases.check_plan_verify(seed, "cuda", scale=20, kinds=kinds)


@pytest.mark.parametrize("kinds", KINDS)
def test_write_of_few_tokens(gpu_cases: int, kinds: Any) -> None:
    for seed in range(gpu_cases):
        device_cases.check_write(seed, "cuda", scale=1, kinds=kinds)


@pytest.mark.parametrize("kinds", KINDS)
def test_write_of_many_tokens(gpu_cases: int, kinds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_triton, "FEW_TOKENS", -1)
    for seed in range(gpu_cases):
        device_cases.check_write(seed, "cuda", scale=20, kinds=kinds)


def test_scatter_fold_and_write_plan(gpu_cases: int) -> None:
    for seed in range(2 * gpu_cases):
        device_cases.check_small_ops(seed, "cuda", scale=40)


@pytest.mark.parametrize("part", range(8))  # nearly each is a form of its own, and to compile one takes a second
def test_token_rows(gpu_cases: int, part: int) -> None:
    for seed in range(part, 4 * gpu_cases, 8):
        token_row_cases.check_token_rows(seed, "cuda", scale=40)


@pytest.mark.parametrize("mode", [KvHashMode.PARTIAL, KvHashMode.ALL])
@pytest.mark.parametrize("damaged", [0, 1, 3000])
def test_a_large_batch(mode: KvHashMode, damaged: int) -> None:
    """40 requests of up to 20,000 tokens, shuffled slots: written by both sides, damaged, verified by both."""
    rng = np.random.default_rng(int(mode) + damaged)
    lens = rng.integers(0, 20_000, 40)
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    total = int(offsets[-1])
    slots = rng.permutation(total) + 1
    table = np.zeros((41, 20_000), np.int32)
    for r, length in enumerate(lens):
        table[r + 1, :length] = slots[offsets[r] : offsets[r + 1]]
    ids = rng.integers(0, 150_000, total)
    positions = np.concatenate([np.arange(n) for n in lens])
    kv = rng.integers(0, 256, (total + 1, 160), dtype=np.uint8)
    made = WritePlan.allocate(request_capacity=40)
    made.offsets[:] = offsets
    made.num_valid_reqs[0] = 40
    spoilt = rng.permutation(total)[:damaged] + 1

    def run(side: Any) -> None:
        source = KvSource(tensor=side.given(kv), page_size=1, bytes_per_token=160, read_bytes=160)
        buffer = CanaryBuffer(
            canary=side.given(np.zeros((total + 1, 32), np.uint8)),
            tag=2,
            sources=(source,),
            kv_hash_mode=mode,
            violations=side.log(4 * damaged + 1, 0),
            slot_counter=side.counter(0),
            kernel_counter=side.counter(0),
        )
        write_shared(
            plan=side.plan(made),
            input_ids=side.given(ids),
            positions=side.given(positions),
            out_cache_loc=side.given(slots),
            expected_tokens=None,
            expected_positions=None,
            chain_step_assert=True,
            buffers=[buffer],
            backend=side.backend,
        )
        for slot in spoilt.tolist():
            buffer.canary[slot, slot % 32] ^= 1
        plan_verify(
            req_pool_indices=side.given(np.arange(1, 41)),
            prefix_lens=side.given(lens),
            req_to_token=side.given(table),
            window=0,
            full_to_swa=None,
            truth_tokens=None,
            truth_lens=None,
            token_offset=0,
            check_tokens=False,
            buffers=[buffer],
            out_of_range=side.counter(0),
            backend=side.backend,
        )
        found.append(int(buffer.violations.write_index[0]))

    found: list[int] = []
    device_cases.both(run, "cuda")
    assert found[0] == found[1] and (found[0] >= damaged) and (damaged or not found[0])
    print(f"{total} tokens, {mode.name}: {found[0]} rows, equal")
