"""What an op refuses, by shape and dtype, and what it takes: any stride, read-only inputs."""

import contextlib
from typing import Any

import numpy as np
import pytest
from kvcanary.kernels.arrays import record_words, require
from kvcanary.kernels.constants import KvHashMode
from kvcanary.kernels.ops.hash.kv_source import KvSource, fold_kv
from kvcanary.kernels.ops.oracle.reference import oracle_tokens
from kvcanary.kernels.ops.plan.reference import VerifyPlan, WritePlan, plan
from kvcanary.kernels.ops.plan_verify.reference import CanaryBuffer, require_buffers
from kvcanary.kernels.ops.scatter.reference import scatter
from kvcanary.kernels.ops.verify.reference import verify
from kvcanary.kernels.ops.violation_log import ViolationLog
from kvcanary.kernels.ops.write.reference import write


def readonly(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


def unaligned(array: Any) -> Any:
    raw = np.zeros(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype)
    view[:] = array
    return view


ONE = np.zeros(1, np.int64)


@pytest.mark.parametrize(
    ("slots", "message"),
    [([], "0 canary buffers"), ([4] * 5, "5 canary buffers"), ([4, 5], r"\[4, 5\] slots"), ([4] * 4, ""), ([4], "")],
)
def test_buffers_of_one_launch_are_alike(slots: list[int], message: str) -> None:
    buffers = [
        CanaryBuffer(
            canary=np.zeros((n, 32), np.uint8), tag=0, sources=(), kv_hash_mode=KvHashMode.NONE,
            violations=ViolationLog.allocate(1), slot_counter=ONE, kernel_counter=ONE,
        )
        for n in slots
    ]  # fmt: skip
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        require_buffers(buffers)


@pytest.mark.parametrize(
    ("array", "keywords", "error", "message"),
    [
        ([1], {}, TypeError, "is a list"),
        (np.zeros(1, np.int32), {}, TypeError, "dtype int32, expected int64"),
        (np.zeros(1, ">i8"), {}, TypeError, "dtype >i8"),
        (np.zeros((1, 1), np.int64), {}, ValueError, "expected 1 axes"),
        (ONE, {"length": 2}, ValueError, "length 1, expected 2"),
        (readonly(ONE), {"written": True}, ValueError, "read-only"),
        (unaligned(ONE), {}, ValueError, "multiple of its item size"),
    ],
)
def test_require(array: Any, keywords: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        require("it", array, np.int64, 1, **keywords)


@pytest.mark.parametrize(
    ("canary", "message"),
    [
        (np.zeros((4, 24), np.uint8), "24 bytes"),
        (np.zeros((4, 36), np.uint8), "36 bytes"),
        (np.zeros((4, 64), np.uint8)[:, ::2], "contiguous slots"),
        (np.zeros((4, 36), np.uint8)[:, :32], "contiguous slots"),
        (np.zeros(4 * 32 + 1, np.uint8)[1:].reshape(4, 32), "multiple of 8 bytes"),
        (readonly(np.zeros((4, 32), np.uint8)), "read-only"),
    ],
)
def test_canary_buffers_that_are_refused(canary: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record_words(canary, written=True)


GEOMETRY: dict[str, Any] = {
    "tensor": np.zeros((4, 64), np.uint8),
    "page_size": 2,
    "bytes_per_token": 32,
    "read_bytes": 16,
}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 3}, "64 bytes wide"),
        ({"bytes_per_token": 24}, "bytes_per_token is 24"),
        ({"bytes_per_token": 0}, "bytes_per_token is 0"),
        ({"bytes_per_token": -16}, "bytes_per_token is -16"),
        ({"read_bytes": 0}, "read_bytes is 0"),
        ({"read_bytes": 8}, "read_bytes is 8"),
        ({"read_bytes": 48}, "at most"),
        ({"tensor": np.zeros(64, np.uint8)}, "expected \\[rows, row_bytes\\]"),
        ({"tensor": np.zeros((4, 72), np.uint8)}, "72 bytes apart"),
        ({"tensor": np.zeros((4, 64), np.uint8)[::-1]}, "-64 bytes apart"),
        ({"tensor": np.broadcast_to(np.zeros((1, 64), np.uint8), (4, 64))}, "0 bytes apart"),
        ({"tensor": np.zeros((4, 128), np.uint8)[:, ::2]}, "within a row"),
    ],
)
def test_kv_sources_that_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KvSource(**(GEOMETRY | overrides))


def test_kv_source_wants_bytes() -> None:
    with pytest.raises(TypeError, match="int8"):
        KvSource(**(GEOMETRY | {"tensor": np.zeros((4, 64), np.int8)}))


def test_kv_source_takes_a_torch_tensor() -> None:
    import torch

    source = KvSource(**(GEOMETRY | {"tensor": torch.zeros(8, 64, dtype=torch.uint8)[::2]}))
    assert source.num_slots == 8
    with pytest.raises(TypeError, match="is a Tensor, expected a numpy array"):
        fold_kv(sources=[source], mode=KvHashMode.PARTIAL, slots=ONE, out=ONE.copy())
    with pytest.raises(ValueError, match="within a row"):
        KvSource(**(GEOMETRY | {"tensor": torch.zeros(8, 128, dtype=torch.uint8)[:, ::2]}))


def plan_inputs() -> dict[str, Any]:
    return {
        "req_pool_indices": np.array([1, 0]),
        "prefix_lens": np.array([2, 3]),
        "extend_lens": np.array([1, 1]),
        "req_to_token": np.arange(8, dtype=np.int32).reshape(2, 4),
        "window": 0,
        "full_to_swa": np.arange(9),
        "truth_tokens": np.arange(8, dtype=np.int32).reshape(2, 4),
        "truth_lens": np.array([2, 0]),
        "token_offset": 0,
        "verify_plan": VerifyPlan.allocate(capacity=2, request_capacity=2),
        "write_plan": WritePlan.allocate(request_capacity=2),
        "out_of_range": np.zeros(1, np.int64),
    }


def launch_state() -> dict[str, Any]:
    return {
        "canary": np.zeros((4, 32), np.uint8),
        "tag": 0,
        "sources": [KvSource(**GEOMETRY)],
        "kv_hash_mode": 1,
        "violations": ViolationLog.allocate(4),
        "slot_counter": np.zeros(1, np.int64),
        "kernel_counter": np.zeros(1, np.int64),
    }


def verify_inputs() -> dict[str, Any]:
    return launch_state() | {"plan": VerifyPlan.allocate(capacity=2, request_capacity=2), "check_tokens": True}


def write_inputs() -> dict[str, Any]:
    names = ("input_ids", "positions", "out_cache_loc", "expected_tokens", "expected_positions")
    made = launch_state() | {name: np.zeros(2, np.int64) for name in names}
    return made | {"plan": WritePlan.allocate(request_capacity=2), "chain_step_assert": True}


def scatter_inputs() -> dict[str, Any]:
    return {
        "flat": np.arange(3),
        "offsets": np.array([0, 1, 3]),
        "rows": np.array([1, 0]),
        "pool": np.zeros((2, 2), np.int32),
        "out_of_range": np.zeros(1, np.int64),
    }


def oracle_inputs() -> dict[str, Any]:
    return {"request_ids": np.arange(2), "positions": np.arange(2), "vocab_size": 7, "out": np.zeros(2, np.int64)}


OPS = {
    plan: plan_inputs,
    verify: verify_inputs,
    write: write_inputs,
    scatter: scatter_inputs,
    oracle_tokens: oracle_inputs,
}
ARRAYS = [
    pytest.param(op, make, name, id=f"{op.__name__}-{name}")
    for op, make in OPS.items()
    for name, value in make().items()
    if isinstance(value, np.ndarray)
]


@pytest.mark.parametrize(("op", "make", "name"), ARRAYS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_array_of_every_op_is_checked(op: Any, make: Any, name: str, backend: str) -> None:
    good = make()
    op(**good, backend=backend)
    # Wrong dtype, one axis too many, a list.
    for wrong in (good[name].astype(np.float64), good[name][None], good[name].tolist()):
        with pytest.raises((TypeError, ValueError), match=name.removesuffix("s")):
            op(**{**make(), name: wrong}, backend=backend)


@pytest.mark.parametrize(("op", "make", "name"), ARRAYS)
def test_every_array_may_be_strided(op: Any, make: Any, name: str) -> None:
    good, strided = make(), make()
    array = strided[name]
    strided[name] = np.repeat(array, 2, axis=0)[::2]
    assert strided[name].strides[0] == 2 * array.strides[0]
    for inputs in (good, strided):
        op(**inputs)
    assert strided[name].tobytes() == good[name].tobytes()


RESULTS = {
    plan: {"out_of_range"},
    verify: {"slot_counter", "kernel_counter"},
    write: {"canary", "slot_counter", "kernel_counter"},
    scatter: {"pool", "out_of_range"},
    oracle_tokens: {"out"},
}


@pytest.mark.parametrize(("op", "make", "name"), ARRAYS)
def test_only_what_results_go_to_must_be_writable(op: Any, make: Any, name: str) -> None:
    given = make()
    given[name] = readonly(given[name])
    if name in RESULTS[op]:
        with pytest.raises(ValueError, match="read-only, but results go there"):  # before anything is done
            op(**given)
    else:
        op(**given)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"window": -1}, "window is -1"),
        ({"token_offset": 1 << 40}, "token_offset"),
        ({"truth_lens": None}, "go together"),
        ({"prefix_lens": np.zeros(3, np.int64)}, "length 3, expected 2"),
        ({"truth_lens": np.zeros(0, np.int64)}, "length 0, expected 2"),
    ],
)
def test_plan_refuses(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**(plan_inputs() | overrides))


def test_plan_refuses_a_read_only_plan() -> None:
    inputs = plan_inputs()
    inputs["verify_plan"].slots.flags.writeable = False
    with pytest.raises(ValueError, match="slots is read-only"):
        plan(**inputs)


def test_a_window_without_a_swa_table_is_a_group_with_its_own_table() -> None:
    inputs = plan_inputs() | {"window": 1, "full_to_swa": None}
    plan(**inputs)
    assert inputs["verify_plan"].slots[:1].tolist() == [5]
    assert inputs["verify_plan"].prev_slots[:1].tolist() == [4]


@pytest.mark.parametrize("capacity", [-1, 1 << 31])
def test_capacities_that_cannot_be_counted(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        VerifyPlan.allocate(capacity=capacity, request_capacity=0)
    with pytest.raises(ValueError, match="capacity"):
        WritePlan.allocate(request_capacity=capacity)


def test_violation_log_refuses_other_shapes() -> None:
    log = ViolationLog.allocate(2)
    with pytest.raises(ValueError, match="7 fields"):
        ViolationLog(rows=log.rows[:, :7], entries=log.entries, write_index=ONE.copy(), out_of_range=ONE.copy())
    with pytest.raises(ValueError, match="length 2, expected 1"):
        ViolationLog(rows=log.rows[:1], entries=log.entries, write_index=ONE.copy(), out_of_range=ONE.copy())
    with pytest.raises(ValueError, match="at least 0"):
        ViolationLog.allocate(-1)


@pytest.mark.parametrize("vocab_size", [0, -1, 1 << 31])
def test_vocabularies_that_are_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        oracle_tokens(**(oracle_inputs() | {"vocab_size": vocab_size}))
