"""The Triton kernels, in Triton's interpreter, against the compiled loops: every byte given or written must be equal.

On a GPU the same cases run by the thousand: `pytest tests/kernels/gpu`.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvcanary.kernels.constants import KvHashMode
from kvcanary.kernels.ops.hash.kv_source import KvSource, fold_kv
from kvcanary.kernels.ops.plan.reference import VerifyPlan, WritePlan, plan
from kvcanary.kernels.ops.plan_verify.reference import CanaryBuffer, plan_verify, write_shared
from kvcanary.kernels.ops.violation_log import ViolationLog
from kvcanary.kernels.ops.write import triton as write_triton

from . import device_cases, token_row_cases

KINDS = [("none",), ("partial",), ("all",), ("several",), ("pairs", "none"), ("none", "none", "partial", "all")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = st.integers(0, 1 << 30)
# The interpreter takes most of a second for one; a fuzz run asks for more, and on a GPU there are thousands.
EXAMPLES = settings().max_examples // 8


@settings(max_examples=EXAMPLES)
@given(SEEDS, st.sampled_from(KINDS))
def test_plan_and_verify(seed: int, kinds: Any) -> None:
    device_cases.check_plan_verify(seed, DEVICE, scale=4, kinds=kinds)


@settings(max_examples=EXAMPLES)
@given(SEEDS, st.sampled_from(KINDS))
def test_write_of_few_tokens(seed: int, kinds: Any) -> None:
    device_cases.check_write(seed, DEVICE, scale=1, kinds=kinds)


@settings(max_examples=EXAMPLES // 2)
@given(SEEDS, st.sampled_from(KINDS))
def test_write_of_many_tokens(seed: int, kinds: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_triton, "FEW_TOKENS", -1)
        device_cases.check_write(seed, DEVICE, scale=1, kinds=kinds)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy, which tells of NaN
@settings(max_examples=2 * EXAMPLES)
@given(SEEDS)
@example(63)  # whole heads, of which few seeds have any: with what bfloat16 makes of them, and without
@example(139)
def test_token_rows(seed: int) -> None:
    token_row_cases.check_token_rows(seed, DEVICE, scale=2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", [15, 41, 58, 66, 76])
def test_whole_heads_of_one_byte_that_storing_does_not_change(seed: int) -> None:
    token_row_cases.check_token_rows(seed, DEVICE, scale=2, exact=True)


# The prefix sums go over 512 requests at a time.
@pytest.mark.parametrize("bs", [1, 2, 512, 513])
def test_a_batch_of_one_request_more_than_a_plan_has_room_for(bs: int) -> None:
    prefix = np.arange(bs) % 3

    def run(side: Any) -> None:
        plan(
            req_pool_indices=side.given(np.full(bs, 1)),
            prefix_lens=side.given(prefix),
            extend_lens=side.given(prefix + 1),
            req_to_token=side.given(np.arange(8, dtype=np.int32).reshape(2, 4)),
            window=0,
            full_to_swa=None,
            truth_tokens=None,
            truth_lens=None,
            token_offset=0,
            verify_plan=side.plan(VerifyPlan.allocate(capacity=int(prefix.sum()), request_capacity=bs - 1)),
            write_plan=side.plan(WritePlan.allocate(request_capacity=bs - 1)),
            out_of_range=side.counter(0),
            backend=side.backend,
        )

    device_cases.both(run, DEVICE)


@pytest.mark.parametrize("seed", range(8))
def test_scatter_fold_and_write_plan(seed: int) -> None:
    device_cases.check_small_ops(seed, DEVICE, scale=1)


def clean_batch(device: str | None, tokens: int, slots: Any) -> tuple[Any, Any]:
    """One request's buffer and how to write `tokens` tokens into it."""
    side = device_cases.Side(device)
    buffer = CanaryBuffer(
        canary=side.given(np.zeros((400, 32), np.uint8)),
        tag=0,
        sources=(),
        kv_hash_mode=KvHashMode.NONE,
        violations=side.log(8, 0),
        slot_counter=side.counter(0),
        kernel_counter=side.counter(0),
    )
    made = WritePlan.allocate(request_capacity=1)
    made.offsets[:] = [0, tokens]
    made.num_valid_reqs[0] = 1
    numbers = np.arange(tokens)

    def run() -> None:
        write_shared(
            plan=side.plan(made),
            input_ids=side.given(numbers),
            positions=side.given(numbers),
            out_cache_loc=side.given(slots),
            expected_tokens=None,
            expected_positions=None,
            chain_step_assert=True,
            buffers=[buffer],
            backend=side.backend,
        )

    return side, run


# The walk's tiles are of 32 tokens: below, at and past one and several.
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 300])
def test_a_chain_of_whole_tiles(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_triton, "FEW_TOKENS", -1)
    ran = []
    order = np.random.default_rng(tokens).permutation(399)[:tokens] + 1
    for device in (None, DEVICE):
        side, run = clean_batch(device, tokens, order)
        run()
        ran.append(side.bytes())
    assert ran[0] == ran[1]


def test_the_caller_hears_of_other_shapes() -> None:
    side = device_cases.Side(DEVICE)
    log = side.log(1, 0)
    fields = {
        "tag": 0,
        "sources": (),
        "kv_hash_mode": KvHashMode.NONE,
        "violations": log,
        "slot_counter": side.counter(0),
        "kernel_counter": side.counter(0),
    }
    small, large = (CanaryBuffer(canary=side.given(np.zeros((n, 32), np.uint8)), **fields) for n in (3, 4))
    plan = side.plan(WritePlan.allocate(request_capacity=1))
    inputs = dict.fromkeys(("input_ids", "positions", "out_cache_loc"), side.given(np.zeros(2, np.int64)))
    rest = {"expected_tokens": None, "expected_positions": None, "chain_step_assert": False, "backend": "triton"}
    for buffers, message in (
        ([], "0 canary buffers"),
        ([small] * 5, "5 canary buffers"),
        ([small, large], "same number"),
    ):
        with pytest.raises(ValueError, match=message):
            write_shared(plan=plan, **inputs, buffers=buffers, **rest)
    odd = CanaryBuffer(canary=side.given(np.zeros((3, 36), np.uint8)), **fields)
    with pytest.raises(ValueError, match="slots of 36 bytes"):
        write_shared(plan=plan, **inputs, buffers=[odd], **rest)
    strided = side.given(np.zeros((4, 2), np.int64))[:, 0]
    with pytest.raises(ValueError, match="contiguous"):
        write_shared(plan=plan, **(inputs | {"positions": strided[:2]}), buffers=[small], **rest)
    with pytest.raises(TypeError, match="expected a torch tensor"):
        write_shared(plan=plan, **(inputs | {"positions": np.zeros(2, np.int64)}), buffers=[small], **rest)
    with pytest.raises(TypeError, match="int32, expected int64"):
        write_shared(plan=plan, **(inputs | {"positions": side.given(np.zeros(2, np.int32))}), buffers=[small], **rest)
    source = KvSource(tensor=side.given(np.zeros((2, 16), np.uint8)), page_size=1, bytes_per_token=16, read_bytes=16)
    with pytest.raises(ValueError, match="at most 4"):
        fold_kv(
            sources=[source] * 5,
            mode=KvHashMode.ALL,
            slots=inputs["positions"],
            out=inputs["positions"],
            backend="triton",
        )
    with pytest.raises(ValueError, match="window is -1"):
        plan_verify(
            req_pool_indices=inputs["positions"], prefix_lens=inputs["positions"],
            req_to_token=side.given(np.zeros((2, 2), np.int32)), window=-1, full_to_swa=None, truth_tokens=None,
            truth_lens=None, token_offset=0, check_tokens=False, buffers=[small], out_of_range=side.counter(0),
            backend="triton",
        )  # fmt: skip


def test_allocations_on_a_device() -> None:
    made = VerifyPlan.allocate(capacity=3, request_capacity=2, device=DEVICE)
    assert made.slots.tolist() == [0, 0, 0] and made.prev_slots.tolist() == [-1] * 3 and made.active == 0
    log = ViolationLog.allocate(2, device=DEVICE)
    log.write_index[0] = 7
    assert log.num_rows == 2
    log.clear()
    assert log.num_rows == 0 and log.rows.dtype == torch.int64


# What a GPU machine would compile, compiled here: the words of a launch, without its device.
COMPILE = """
import warnings
warnings.simplefilter("ignore")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kvcanary.kernels.ops.plan_verify import triton as fused
from kvcanary.kernels.ops.token_rows import triton as token_rows
from kvcanary.kernels.ops.write import triton_many as write_many

NESTED = {
    "requests": ("*i64", "*i64", "*i32"), "tokens": ("*i64",) * 5, "memory": ("*i64", "*i32"),
    "pools": (("*i64",), ("*i64",), ("i32",)), "inputs": ("*i64", "*i64", "*i32", "*i32", "*i64", "*i64"),
    "ends": ("*i64", ("*i64",), ("*i64",), ("*i64",)), "numbers": ("i32",) * 9, "counted": ("*i32", "*i64"),
}
NUMBERS = {"capacity", "num_tokens", "num_slots", "splits"}


def type_of(name):
    if name in NESTED:
        return NESTED[name]
    if name in NUMBERS:
        return "i32"
    return "*i32" if name == "taken" else "*i64"


def build(kernel, warps, types={}, **constants):
    types = types | dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] if name in types else type_of(name) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    print(len(compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["cubin"]) > 0)


sources = {"SOURCES": ((1, 128, 128, 128),), "ENDS": (0, 1), "STRIDES": (4,)}
build(fused._count_kernel, 1, ASKED=(True,) * 4, **sources, T=32)
build(write_many._chain_kernel, 1, **sources, ASSERTS=(True, True), T=32)
rows = {
    "captured": ("*i16", "*i32", "*i32", "*i32"), "turns": ("*fp32", "*fp32", "*i16", "*i16"), "numbers": "*fp32",
    "flags": "*u8", "count": "i32", "noise": "fp32", "tolerances": ("fp32",) * 5,
}
heads = rows | {"table": ("*fp32", "*fp32", "*i16")}
rows = rows | {"table": ("*fp32", "*fp32", "*i32", "*i16")}
form = {"DTYPE": "bfloat16", "LOW": True}
build(token_rows._heads_kernel, 4, heads, **form, ITEMS=8, HEADS=2, HALF=64, R=16)
for shift in (0, 4):
    build(token_rows._token_rows_kernel, 4, rows, **form, SHAPE=(8, 40, 43, 8, shift), QUANTISED=True, TILE=(64, 64))
"""


@pytest.mark.long
def test_they_compile_for_a_gpu(tmp_path: Path) -> None:
    import os

    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["True"] * 5
