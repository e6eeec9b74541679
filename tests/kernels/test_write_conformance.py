"""write against the published reference: canary buffers, violation rows, ring tails, counters equal as bytes."""

from typing import Any

import numpy as np
import pytest
from kvcanary.kernels.constants import KvHashMode
from kvcanary.kernels.ops.plan.reference import WritePlan
from kvcanary.kernels.ops.write.reference import write


def make_case(seed: int, cases: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    num_slots = int(rng.choice([1, 2, 9, 40, 64]))
    bs = int(rng.choice([0, 1, 1, 2, 3, 5, 21]))
    longest = 9
    if seed % 100 == 99:
        num_slots, bs, longest = 1200, 3, 500
    canary = cases.canary(rng, num_slots)
    records = canary[:, :32].view(np.int64)
    records[:, 1] = rng.integers(0, 12, num_slots)  # positions that a seed's successor can follow
    lens = np.where(rng.random(bs) < 0.2, 0, rng.integers(0, longest, bs))
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    tokens = int(offsets[-1]) + int(rng.choice([0, 0, 4]))  # padded tail
    slots = rng.integers(0, num_slots, tokens)  # repeated ones and slot 0 included
    if rng.random() < 0.5 and tokens <= num_slots:
        slots = rng.permutation(num_slots)[:tokens]
    slots[rng.random(tokens) < 0.1] = -1 - int(rng.integers(3))
    seeds = rng.integers(-2, num_slots, bs)
    seeds[rng.random(bs) < 0.3] = -1
    if tokens and bs > 1:  # a chain that goes on from a slot which an earlier request writes
        seeds[-1] = slots[0]
    positions = np.zeros(tokens, np.int64)
    for r in range(bs):
        first = records[seeds[r], 1] + 1 if seeds[r] >= 0 else 0
        positions[offsets[r] : offsets[r + 1]] = first + np.arange(lens[r])
    positions[rng.random(tokens) < 0.05] += int(rng.choice([-1, 1, 1 << 40]))
    input_ids = rng.integers(0, 1000, tokens)
    input_ids[rng.random(tokens) < 0.05] = int(rng.choice([-1, 1 << 62, -(1 << 63)]))
    expected_tokens = expected_positions = None
    if rng.random() < 0.5:
        expected_tokens, expected_positions = input_ids.copy(), positions.copy()
        expected_tokens[rng.random(tokens) < 0.1] ^= 3
        expected_positions[rng.random(tokens) < 0.1] += 1

    capacity = int(rng.choice([bs, bs, bs + 1, bs + 5, max(0, bs - 1)]))
    plan = WritePlan.allocate(request_capacity=capacity)
    plan.offsets[:] = 0
    kept = min(bs, capacity)
    plan.offsets[: kept + 1] = offsets[: kept + 1]
    plan.seed_slots[:kept] = seeds[:kept]
    plan.seed_slots[kept:] = 1 << 50  # unspecified beyond the valid requests
    plan.num_valid_reqs[0] = int(rng.choice([bs, bs, bs, bs // 2, -3])) if capacity >= bs else bs
    return {
        "canary": canary,
        "tag": int(rng.integers(12)),
        "plan": plan,
        "input_ids": input_ids,
        "positions": positions,
        "out_cache_loc": slots,
        "expected_tokens": expected_tokens,
        "expected_positions": expected_positions,
        "chain_step_assert": bool(rng.random() < 0.6),
        "sources": cases.sources(rng, num_slots),
        "kv_hash_mode": KvHashMode(int(rng.integers(0, 3))),
        "ring": (int(rng.choice([0, 1, 3, 64, 64, 64, 2000])), int(rng.choice([0, 0, 0, 2, 70]))),
    }


def launch(run: Any, case: dict[str, Any], cases: Any, **extra: Any) -> tuple[Any, list[bytes]]:
    ring = case["ring"]
    log = cases.log(*ring)
    counters = np.array([5]), np.array([1 << 40])
    inputs = {k: v for k, v in case.items() if k != "ring"}
    # A copy with the same strides, in the midst of bytes that must stay.
    base = case["canary"].base if case["canary"].base is not None else case["canary"]
    whole = base.copy()
    step = len(whole) // max(1, len(case["canary"]))
    inputs["canary"] = whole[::step]
    assert inputs["canary"].tobytes() == case["canary"].tobytes()
    run(**inputs, violations=log, slot_counter=counters[0], kernel_counter=counters[1], **extra)
    return log, cases.state(log, whole, *counters)


def test_write_equals_the_published_reference(published: Any, cases: Any, conformance_cases: int) -> None:
    seen = {"token": 0, "position": 0, "overflow": 0, "clean": 0}
    for seed in range(conformance_cases):
        case = make_case(seed, cases)
        first = case["ring"][1]
        log, want = launch(published.write, case, cases)
        for backend in ("reference", "cpu"):
            got_log, got = launch(write, case, cases, backend=backend)
            assert got == want, (seed, backend)
            assert got_log.out_of_range[0] == 0, seed
            entries = got_log.entries[first : got_log.num_rows]
            assert (np.diff(entries) >= 0).all(), seed  # one token may give two rows
            assert case["out_cache_loc"][entries].tolist() == got_log.rows[first : got_log.num_rows, 1].tolist()
        reasons = log.rows[first : log.num_rows, 7]
        seen["token"] += int((reasons & 8 > 0).sum())
        seen["position"] += int((reasons & 16 > 0).sum())
        seen["overflow"] += int(log.write_index[0] > len(log.rows))
        seen["clean"] += int(log.write_index[0] == first and len(case["input_ids"]) > 3)
    assert min(seen.values()) > conformance_cases // 50, f"the generator has lost its variety: {seen}"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_input_asserts_want_both_tensors(cases: Any, backend: str) -> None:
    case = next(c for c in (make_case(seed, cases) for seed in range(99)) if c["expected_tokens"] is not None)
    case["expected_positions"] = None
    with pytest.raises(ValueError, match="go together"):
        launch(write, case, cases, backend=backend)
