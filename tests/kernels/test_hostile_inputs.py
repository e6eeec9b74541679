"""Inputs that no engine should give: both backends do the same with them, touch nothing else, and never raise."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.kernels.constants import SLOT_OUT_OF_RANGE, KvHashMode
from kvcanary.kernels.ops.hash.kv_source import KvSource, fold_kv
from kvcanary.kernels.ops.plan.reference import VerifyPlan, WritePlan, plan
from kvcanary.kernels.ops.scatter.reference import scatter
from kvcanary.kernels.ops.verify.reference import verify
from kvcanary.kernels.ops.violation_log import ViolationLog
from kvcanary.kernels.ops.write.reference import write

EXTREMES = [-(1 << 63), -(1 << 31) - 1, -2, -1, 1 << 31, 1 << 32, 1 << 61, SLOT_OUT_OF_RANGE, (1 << 63) - 1]
INTS = st.integers(0, 7) | st.integers(-3, 12) | st.sampled_from(EXTREMES)
INT32S = st.integers(-3, 12) | st.sampled_from([-(1 << 31), (1 << 31) - 1])
POISON = 0x5A
BACKENDS = ("reference", "cpu")


def ints(
    draw: Callable[[Any], Any], length: int, strategy: st.SearchStrategy[int] = INTS, dtype: Any = np.int64
) -> Any:
    return np.array(draw(st.lists(strategy, min_size=length, max_size=length)), dtype)


def guarded(shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """Return a poisoned array and the larger one around it, whose rest must stay."""
    whole = np.full((shape[0] + 8, *shape[1:]), POISON, dtype)
    return whole[4 : shape[0] + 4], whole


@st.composite
def plan_cases(draw: st.DrawFn) -> dict[str, Any]:
    bs = draw(st.integers(0, 4))
    rows, width = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    table = ints(draw, rows * width, INT32S, np.int32).reshape(rows, width)
    has_truth = draw(st.booleans())
    truth_rows = draw(st.integers(0, 4))
    return {
        "req_pool_indices": ints(draw, bs),
        "prefix_lens": ints(draw, bs),
        "extend_lens": ints(draw, bs),
        "req_to_token": table,
        "window": draw(st.sampled_from([0, 0, 1, 3, 1 << 61])),
        "full_to_swa": ints(draw, draw(st.integers(0, 6))) if draw(st.booleans()) else None,
        "truth_tokens": ints(draw, truth_rows * 3, INT32S, np.int32).reshape(truth_rows, 3) if has_truth else None,
        "truth_lens": ints(draw, bs) if has_truth else None,
        "token_offset": draw(st.sampled_from([0, 1, -1, -(1 << 31) + 1, (1 << 31) - 1])),
    }


@given(plan_cases(), st.integers(0, 40), st.integers(0, 5))
def test_plan(case: dict[str, Any], capacity: int, request_capacity: int) -> None:
    results = []
    for backend in BACKENDS:
        wholes, arrays = [], []
        sizes = [(capacity, np.int64)] * 4 + [(1, np.int32)] * 2 + [(request_capacity + 1, np.int64)] * 2
        for size, dtype in [*sizes, (request_capacity, np.int64), (1, np.int32), (1, np.int64)]:
            array, whole = guarded((size,), dtype)
            arrays.append(array)
            wholes.append(whole)
        verify_plan = VerifyPlan(**dict(zip(VerifyPlan._fields, arrays[:7], strict=True)))
        write_plan = WritePlan(**dict(zip(WritePlan._fields, arrays[7:10], strict=True)))
        plan(**case, verify_plan=verify_plan, write_plan=write_plan, out_of_range=arrays[10], backend=backend)
        results.append([w.tobytes() for w in wholes])
        for array, whole in zip(arrays, wholes, strict=True):
            assert (whole[:4] == POISON).all() and (whole[len(array) + 4 :] == POISON).all()
        if verify_plan.enable[0] == 0:
            assert (verify_plan.slots == POISON).all()  # not one entry is written
        else:
            assert verify_plan.request_offsets.max(initial=0) <= capacity
    assert results[0] == results[1]


@st.composite
def buffers(draw: st.DrawFn) -> dict[str, Any]:
    """A canary buffer inside a larger one, hostile records included, and up to four small sources."""
    num_slots = draw(st.integers(0, 5))
    stride = draw(st.sampled_from([32, 40]))
    records = np.full((num_slots + 8, stride), POISON, np.uint8)
    records[4 : num_slots + 4, :32].view(np.int64)[:] = ints(draw, num_slots * 4).reshape(num_slots, 4)
    sources = []
    for _ in range(draw(st.integers(0, 4))):
        page_size, rows = draw(st.integers(1, 3)), draw(st.integers(0, 4))
        row_bytes = page_size * 32 + 16
        tensor = (np.arange(rows * row_bytes) % 251).astype(np.uint8).reshape(rows, row_bytes)
        sources.append(KvSource(tensor=tensor, page_size=page_size, bytes_per_token=32, read_bytes=32))
    return {
        "whole": records,
        "num_slots": num_slots,
        "sources": sources,
        "kv_hash_mode": draw(st.sampled_from(list(KvHashMode))),
        "tag": draw(st.integers(0, 11)),
        "log": (draw(st.integers(0, 6)), draw(INTS)),
    }


def run_guarded(run: Any, case: dict[str, Any], inputs: dict[str, Any], backend: str) -> list[bytes]:
    whole = case["whole"].copy()
    capacity, write_index = case["log"]
    rows, rows_whole = guarded((capacity, 8), np.int64)
    entries, entries_whole = guarded((capacity,), np.int64)
    log = ViolationLog(
        rows=rows, entries=entries, write_index=np.array([write_index]), out_of_range=np.array([(1 << 63) - 1])
    )
    counters = np.array([(1 << 63) - 1]), np.array([(1 << 63) - 1])
    run(
        canary=whole[4 : case["num_slots"] + 4],
        tag=case["tag"],
        sources=case["sources"],
        kv_hash_mode=case["kv_hash_mode"],
        violations=log,
        slot_counter=counters[0],
        kernel_counter=counters[1],
        backend=backend,
        **inputs,
    )
    for outer, inner in ((whole, case["num_slots"]), (rows_whole, capacity), (entries_whole, capacity)):
        assert (outer[:4] == POISON).all() and (outer[inner + 4 :] == POISON).all()
    return [a.tobytes() for a in (whole, rows_whole, entries_whole, log.write_index, log.out_of_range, *counters)]


@given(st.data(), buffers())
def test_verify(data: st.DataObject, case: dict[str, Any]) -> None:
    capacity = data.draw(st.integers(0, 8))
    arrays = [ints(data.draw, capacity) for _ in range(4)]
    for array in arrays[:1] + arrays[3:]:
        if data.draw(st.booleans()):  # mostly slots that exist
            array[:] = np.abs(array) % (case["num_slots"] + 1)
    made = VerifyPlan(
        **dict(zip(VerifyPlan._fields[:4], arrays, strict=True)),
        num_valid=ints(data.draw, 1, INT32S, np.int32),
        enable=np.array([data.draw(st.sampled_from([1, 1, 1, 0, -1]))], np.int32),
        request_offsets=np.zeros(1, np.int64),
    )
    inputs = {"plan": made, "check_tokens": data.draw(st.booleans())}
    results = [run_guarded(verify, case, inputs, backend) for backend in BACKENDS]
    assert results[0] == results[1]
    assert results[0][0] == case["whole"].tobytes()


@given(st.data(), buffers())
def test_write(data: st.DataObject, case: dict[str, Any]) -> None:
    bs, tokens = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 8))
    made = WritePlan(
        offsets=ints(data.draw, bs + 1),
        seed_slots=ints(data.draw, bs),
        num_valid_reqs=ints(data.draw, 1, INT32S, np.int32),
    )
    asserts = data.draw(st.booleans())
    inputs = {
        "plan": made,
        "input_ids": ints(data.draw, tokens),
        "positions": ints(data.draw, tokens),
        "out_cache_loc": ints(data.draw, tokens),
        "expected_tokens": ints(data.draw, tokens) if asserts else None,
        "expected_positions": ints(data.draw, tokens) if asserts else None,
        "chain_step_assert": data.draw(st.booleans()),
    }
    results = [run_guarded(write, case, inputs, backend) for backend in BACKENDS]
    assert results[0] == results[1]


@given(st.data())
def test_scatter(data: st.DataObject) -> None:
    bs, rows, width = (data.draw(st.integers(0, 4)) for _ in range(3))
    inputs = {
        "flat": ints(data.draw, data.draw(st.integers(0, 6))),
        "offsets": ints(data.draw, bs + 1),
        "rows": ints(data.draw, bs),
    }
    results = []
    for backend in BACKENDS:
        pool, whole = guarded((rows, width), np.int32)
        out_of_range = np.zeros(1, np.int64)
        scatter(**inputs, pool=pool, out_of_range=out_of_range, backend=backend)
        assert (whole[:4] == POISON).all() and (whole[rows + 4 :] == POISON).all()
        results.append((whole.tobytes(), int(out_of_range[0])))
    assert results[0] == results[1]


@given(st.data(), buffers())
def test_fold(data: st.DataObject, case: dict[str, Any]) -> None:
    slots = ints(data.draw, data.draw(st.integers(0, 8)))
    results = []
    for backend in BACKENDS:
        out, whole = guarded((len(slots),), np.int64)
        fold_kv(sources=case["sources"], mode=case["kv_hash_mode"], slots=slots, out=out, backend=backend)
        held = min((s.num_slots for s in case["sources"]), default=0)
        assert not out[(slots < 0) | (slots >= held)].any()
        results.append(whole.tobytes())
    assert results[0] == results[1]
