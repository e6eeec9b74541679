"""plan against the published reference: plans, tails and flags equal as bytes."""

from typing import Any

import numpy as np
import pytest
from kvcanary.kernels.ops.plan.reference import VerifyPlan, WritePlan, plan

POISON = -0x5A5A5A5A5A5A5A5B
FIELDS = ("slots", "expected_tokens", "expected_positions", "prev_slots", "num_valid", "enable")


def poisoned_plans(capacity: int, request_capacity: int) -> tuple[VerifyPlan, WritePlan]:
    verify_plan = VerifyPlan.allocate(capacity=capacity, request_capacity=request_capacity)
    write_plan = WritePlan.allocate(request_capacity=request_capacity)
    for one in (verify_plan, write_plan):
        for name in one._fields:
            getattr(one, name).fill(0x5A5A5A5A if getattr(one, name).dtype == np.int32 else POISON)
    return verify_plan, write_plan


def make_case(seed: int) -> tuple[dict[str, Any], int, int]:
    """Return a valid input, the verify capacity and the request capacity."""
    rng = np.random.default_rng(seed)
    bs = int(rng.choice([0, 1, 1, 2, 3, 5, 8, 37]))
    rows, width = int(rng.integers(1, 12)), int(rng.choice([1, 2, 7, 16, 33]))
    if seed % 100 == 99:
        bs, rows, width = 3, 4, 700
    num_slots = int(rng.integers(1, 200))
    table = rng.integers(0, num_slots, (rows, width * 2), dtype=np.int32)
    table[rng.random(table.shape) < 0.1] = 0  # never filled
    table[rng.random(table.shape) < 0.05] = -1 - rng.integers(5)
    table = table[:, ::2] if rng.random() < 0.3 else table[:, :width].copy()
    window = int(rng.choice([0, 0, 1, 2, 5, width, width + 3]))
    lut = rng.integers(-1, 90, num_slots, dtype=np.int64) if window or rng.random() < 0.2 else None
    prefix = rng.integers(-2, width + 1, bs)
    prefix[rng.random(bs) < 0.15] = 0
    extend = rng.integers(-3, 6, bs)
    row = rng.integers(0, rows, bs)
    row[rng.random(bs) < 0.2] = 0
    truth = truth_lens = None
    if rng.random() < 0.7:
        truth_width = width + int(rng.integers(0, 4))
        truth = rng.integers(0, 1000, (rows, truth_width), dtype=np.int32)
        truth_lens = rng.integers(0, truth_width + 1, bs)
    reach = np.where(row == 0, 0, np.maximum(prefix, 0))
    needed = int((np.minimum(reach, window) if window else reach).sum())
    capacity = int(rng.choice([needed, needed, needed + 1, needed + 9, max(0, needed - 1), needed // 2, 0]))
    request_capacity = int(rng.choice([bs, bs, bs + 1, bs + 7, max(0, bs - 1), bs // 2]))
    case = {
        "req_pool_indices": row,
        "prefix_lens": prefix,
        "extend_lens": extend,
        "req_to_token": table,
        "window": window,
        "full_to_swa": lut,
        "truth_tokens": truth,
        "truth_lens": truth_lens,
        "token_offset": int(rng.choice([0, 0, 1, -1, 2])),
    }
    return case, capacity, request_capacity


def test_plan_equals_the_published_reference(published: Any, conformance_cases: int) -> None:
    seen = {"overflow": 0, "entries": 0, "truth": 0, "short": 0}
    for seed in range(conformance_cases):
        case, capacity, request_capacity = make_case(seed)
        want_verify, want_write = poisoned_plans(capacity, request_capacity)
        published.plan(verify_plan=want_verify, write_plan=want_write, **case)
        for backend in ("reference", "cpu"):
            got_verify, got_write = poisoned_plans(capacity, request_capacity)
            out_of_range = np.zeros(1, np.int64)
            plan(verify_plan=got_verify, write_plan=got_write, out_of_range=out_of_range, backend=backend, **case)
            for name in FIELDS:
                assert getattr(got_verify, name).tobytes() == getattr(want_verify, name).tobytes(), (seed, name)
            for name in WritePlan._fields:
                assert getattr(got_write, name).tobytes() == getattr(want_write, name).tobytes(), (seed, name)
            assert out_of_range[0] == 0, seed
            assert got_verify.request_offsets.tolist() == request_offsets(case, request_capacity), seed
        seen["overflow"] += int(want_verify.enable[0] == 0)
        seen["entries"] += want_verify.active
        seen["truth"] += int((want_verify.expected_tokens[: want_verify.active] >= 0).sum())
        seen["short"] += int(request_capacity < len(case["prefix_lens"]))
    assert min(seen.values()) > conformance_cases // 50, f"the generator has lost its variety: {seen}"


def request_offsets(case: dict[str, Any], request_capacity: int) -> list[int]:
    counts = []
    for row, prefix in zip(case["req_pool_indices"], case["prefix_lens"], strict=True):
        start = max(0, prefix - case["window"]) if case["window"] else 0
        counts.append(0 if row == 0 else len(range(start, prefix)))
    offsets = [sum(counts[:r]) for r in range(len(counts) + 1)]
    offsets += [offsets[-1]] * request_capacity
    return offsets[: request_capacity + 1]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_large_plan_equals_the_published_reference(published: Any, backend: str) -> None:
    rng = np.random.default_rng(7)
    bs, width = 600, 40
    case: dict[str, Any] = {
        "req_pool_indices": rng.permutation(bs).astype(np.int64),
        "prefix_lens": rng.integers(0, width + 1, bs),
        "extend_lens": rng.integers(0, 3, bs),
        "req_to_token": rng.integers(0, 5000, (bs, width), dtype=np.int32),
        "window": 17,
        "full_to_swa": rng.permutation(5000),
        "truth_tokens": rng.integers(0, 99, (bs, width), dtype=np.int32),
        "truth_lens": rng.integers(0, width + 1, bs),
        "token_offset": 1,
    }
    want, got = poisoned_plans(bs * 17, bs), poisoned_plans(bs * 17, bs)
    published.plan(verify_plan=want[0], write_plan=want[1], **case)
    plan(verify_plan=got[0], write_plan=got[1], out_of_range=np.zeros(1, np.int64), backend=backend, **case)
    for name in FIELDS:
        assert getattr(got[0], name).tobytes() == getattr(want[0], name).tobytes(), name
    for name in WritePlan._fields:
        assert getattr(got[1], name).tobytes() == getattr(want[1], name).tobytes(), name
