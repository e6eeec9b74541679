"""verify against the published reference: violation rows, ring tails, counters equal as bytes, the canary untouched."""

from typing import Any

import numpy as np
import pytest
from kvcanary.kernels.constants import FailReason, KvHashMode
from kvcanary.kernels.ops.hash.kv_source import fold_kv
from kvcanary.kernels.ops.plan.reference import VerifyPlan
from kvcanary.kernels.ops.verify.reference import verify

from .device_cases import ANCHOR, s, signed

M = (1 << 64) - 1
POISON = -0x5A5A5A5A5A5A5A5B


def stamp_chains(rng: np.random.Generator, records: Any, chains: list[Any], kv_hashes: Any) -> None:
    """Lay clean records along each chain of slots."""
    for chain in chains:
        running = s(ANCHOR)
        for position, slot in enumerate(chain):
            token = int(rng.integers(0, 1000))
            records[slot] = (token, position, signed(running), kv_hashes[slot])
            running = s(s(s(running) ^ token) ^ position)


def make_case(seed: int, cases: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    num_slots = int(rng.choice([1, 2, 9, 40, 64]))
    if seed % 100 == 99:
        num_slots = 900
    canary = cases.canary(rng, num_slots)
    records = canary[:, :32].view(np.int64)
    sources = cases.sources(rng, num_slots)
    mode = KvHashMode(int(rng.integers(0, 3)))
    kv_hashes = np.empty(num_slots, np.int64)
    # Only to give most records a KV hash that holds; what is right, the published reference says below.
    fold_kv(sources=sources, mode=mode, slots=np.arange(num_slots), out=kv_hashes)
    order = rng.permutation(np.arange(1, num_slots))
    chains = [c for c in np.array_split(order, int(rng.integers(1, 4))) if len(c)]
    stamp_chains(rng, records, chains, kv_hashes)

    # Corrupt records of every kind, and KV bytes.
    for _ in range(int(rng.choice([0, 0, 1, 2, num_slots // 4]))):
        slot, field = int(rng.integers(num_slots)), int(rng.integers(4))
        records[slot, field] = int(rng.choice([0, -1, 1 << 40, -(1 << 63), int(records[slot, field]) ^ 1]))
    for source in sources:
        if rng.random() < 0.3:
            row, byte = (int(rng.integers(n)) for n in source.tensor.shape)
            source.tensor[row, byte] ^= 0xFF

    entries: list[Any] = []
    for chain in chains:
        for i, slot in enumerate(chain):
            entries.append((slot, records[slot, 0], i, chain[i - 1] if i else -1))
    for _ in range(int(rng.choice([0, 0, 1, 5]))):  # foreign entries: wrong slot, token, position or predecessor
        entries.append((rng.integers(num_slots), rng.integers(-1, 9), rng.integers(9), rng.integers(-3, num_slots)))
    if rng.random() < 0.3:
        entries.append((0, 5, 5, 5))  # an unfilled table entry
    chosen: Any = rng.integers(0, len(entries), int(rng.integers(0, 60))) if entries else []
    if entries and rng.random() < 0.5:
        chosen = np.arange(len(entries))
    # A spare tail behind the active entries, poisoned but for slots that could be read.
    spare = int(rng.choice([0, 0, 3]))
    table = np.array([entries[i] for i in chosen] + [(num_slots - 1, 1, 1, 0)] * spare, np.int64).reshape(-1, 4)
    table[rng.random(len(table)) < 0.2, 1] = -1
    table[rng.random(len(table)) < 0.05, 3] = 0
    capacity = len(table)
    num_valid = int(rng.choice([len(chosen), len(chosen), len(chosen), len(chosen) + 99, len(chosen) // 2, 0, -4]))
    plan = VerifyPlan.allocate(capacity=capacity, request_capacity=0)
    for column, name in enumerate(("slots", "expected_tokens", "expected_positions", "prev_slots")):
        getattr(plan, name)[:] = table[:, column]
    plan.num_valid[0] = num_valid
    plan.enable[0] = int(rng.choice([1, 1, 1, 1, 1, 1, 7, -1, 0]))
    return {
        "canary": canary,
        "tag": int(rng.integers(12)),
        "plan": plan,
        "check_tokens": bool(rng.random() < 0.7),
        "sources": sources,
        "kv_hash_mode": mode,
        "ring": (int(rng.choice([0, 1, 3, 64, 64, 64, 2000])), int(rng.choice([0, 0, 0, 2, 70]))),
    }


def launch(run: Any, case: dict[str, Any], cases: Any, **extra: Any) -> tuple[Any, list[bytes]]:
    ring = case["ring"]
    log = cases.log(*ring)
    counters = np.array([5]), np.array([1 << 40])
    inputs = {k: v for k, v in case.items() if k != "ring"}
    run(**inputs, violations=log, slot_counter=counters[0], kernel_counter=counters[1], **extra)
    return log, cases.state(log, case["canary"], *counters)


def test_verify_equals_the_published_reference(published: Any, cases: Any, conformance_cases: int) -> None:
    seen = dict.fromkeys((int(r) for r in FailReason if "VERIFY" in str(r.name)), 0) | {"overflow": 0, "clean": 0}
    for seed in range(conformance_cases):
        case = make_case(seed, cases)
        before = case["canary"].tobytes()
        log, want = launch(published.verify, case, cases)
        for backend in ("reference", "cpu"):
            got_log, got = launch(verify, case, cases, backend=backend)
            assert got == want, (seed, backend)
            assert got_log.out_of_range[0] == 0, seed
            check_entries(got_log, case, case["ring"][1])
        assert case["canary"].tobytes() == before
        for row in log.rows[case["ring"][1] : log.num_rows]:
            for reason in (1, 2, 4, 32):
                seen[reason] += int(row[7]) >> (reason.bit_length() - 1) & 1
        seen["overflow"] += int(log.write_index[0] > len(log.rows))
        seen["clean"] += int(log.write_index[0] == case["ring"][1] and case["plan"].active > 3)
    assert min(seen.values()) > conformance_cases // 50, f"the generator has lost its variety: {seen}"


def check_entries(log: Any, case: dict[str, Any], first: int) -> None:
    entries = log.entries[first : log.num_rows]
    assert (np.diff(entries) > 0).all()
    assert case["plan"].slots[entries].tolist() == log.rows[first : log.num_rows, 1].tolist()
    assert (log.entries[:first] == POISON).all() and (log.entries[log.num_rows :] == POISON).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_five_sources_are_refused_as_published(published: Any, cases: Any, backend: str) -> None:
    case = next(c for c in (make_case(seed, cases) for seed in range(99)) if len(c["sources"]) == 4)
    case["sources"] += case["sources"][:1]
    with pytest.raises(ValueError, match="at most 4"):
        launch(published.verify, case, cases)
    with pytest.raises(ValueError, match="at most 4"):
        launch(verify, case, cases, backend=backend)
