"""Answers worked out by hand or by other code: hash vectors, a chain, a plan, each reason, each out-of-range count."""

from typing import Any

import numpy as np
import pytest
from kvcanary.kernels.constants import SLOT_OUT_OF_RANGE, FailReason, KvHashMode, LaunchTag
from kvcanary.kernels.ops.hash.kv_source import KvSource, fold_kv
from kvcanary.kernels.ops.hash.reference import MASK64, as_i32, as_i64, as_u64, chain_seed, mix3, splitmix64
from kvcanary.kernels.ops.plan.reference import VerifyPlan, WritePlan, plan, plan_capacity
from kvcanary.kernels.ops.verify.reference import verify
from kvcanary.kernels.ops.violation_log import ViolationLog
from kvcanary.kernels.ops.write.reference import write

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
GAMMA = 0x9E3779B97F4A7C15


def test_splitmix64_gives_the_known_stream() -> None:
    # The generator's first outputs for seeds 0 and 1234567 (Java's SplittableRandom, Rosetta Code); it adds gamma
    # before the finaliser, the canary does not.
    assert splitmix64(GAMMA) == 0xE220A8397B1DCDAF
    assert splitmix64(2 * GAMMA & MASK64) == 0x6E789E6AA1B965F4
    assert splitmix64(3 * GAMMA & MASK64) == 0x06C45D188009454F
    assert splitmix64(1234567 + GAMMA) == 6457827717110365317
    assert splitmix64(1234567 + 2 * GAMMA & MASK64) == 3203168211198807973
    assert splitmix64(0) == 0


def test_words_keep_their_bits() -> None:
    assert as_u64(-1) == MASK64 and as_i64(MASK64) == -1
    assert as_i64(1 << 63) == -(1 << 63) and as_i64((1 << 64) + 5) == 5
    assert as_i32(0xFFFFFFFF) == -1 and as_i32(1 << 31) == -(1 << 31) and as_i32(-1) == -1


def by_numpy(x: int) -> int:
    """The finaliser once more, written for numpy's own wrapping arrays."""
    word = np.array([x], np.uint64)
    word ^= word >> np.uint64(30)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    word ^= word >> np.uint64(27)
    word *= np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return int(word[0])


def fresh() -> dict[str, Any]:
    return {
        "violations": ViolationLog.allocate(16),
        "slot_counter": np.zeros(1, np.int64),
        "kernel_counter": np.zeros(1, np.int64),
    }


def write_plan(offsets: list[int], seeds: list[int]) -> WritePlan:
    return WritePlan(
        offsets=np.array(offsets), seed_slots=np.array(seeds), num_valid_reqs=np.array([len(seeds)], np.int32)
    )


def verify_plan(entries: list[tuple[int, int, int, int]]) -> VerifyPlan:
    table = np.array(entries, np.int64).reshape(-1, 4)
    made = VerifyPlan.allocate(capacity=len(entries), request_capacity=0)
    for column, name in enumerate(("slots", "expected_tokens", "expected_positions", "prev_slots")):
        getattr(made, name)[:] = table[:, column]
    made.num_valid[0] = len(entries)
    return made


def write_chain(backend: str, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """Write tokens 11, 22, 33 at positions 0, 1, 2 into slots 3, 1, 2 of five, KV hashed."""
    canary = np.full((5, 32), 0xEE, np.uint8)
    state = fresh()
    inputs: dict[str, Any] = {
        "canary": canary,
        "tag": LaunchTag.TAIL_K_FULL,
        "plan": write_plan([0, 3], [-1]),
        "input_ids": np.array([11, 22, 33]),
        "positions": np.array([0, 1, 2]),
        "out_cache_loc": np.array([3, 1, 2]),
        "expected_tokens": None,
        "expected_positions": None,
        "chain_step_assert": False,
        "sources": [kv_source()],
        "kv_hash_mode": KvHashMode.PARTIAL,
    } | overrides
    write(**inputs, **state, backend=backend)
    return canary, state


def kv_source() -> KvSource:
    return KvSource(
        tensor=np.arange(5 * 48, dtype=np.uint8).reshape(5, 48), page_size=1, bytes_per_token=32, read_bytes=32
    )


@BACKENDS
def test_a_chain_of_three_tokens(backend: str) -> None:
    canary, state = write_chain(backend)
    records = canary.view(np.uint64)
    running = by_numpy(0xC0FFEE1234567890)
    assert running == chain_seed()
    for token, position, slot in ((11, 0, 3), (22, 1, 1), (33, 2, 2)):
        words = [int.from_bytes(bytes(range(slot * 48 + at, slot * 48 + at + 8)), "little") for at in (0, 8)]
        kv_hash = by_numpy(by_numpy(by_numpy(words[0]) ^ words[1]))
        assert records[slot].tolist() == [token, position, running, kv_hash]
        running = by_numpy(by_numpy(by_numpy(running) ^ token) ^ position)
    assert (canary[[0, 4]] == 0xEE).all()
    assert state["slot_counter"][0] == 3 and state["kernel_counter"][0] == 1
    assert mix3(1, 2, 3) == by_numpy(by_numpy(by_numpy(1) ^ 2) ^ 3)


@BACKENDS
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_kv_hash_of_two_sources_depends_on_their_order(backend: str, order: tuple[int, int]) -> None:
    tensor = (np.arange(3 * 96) % 251).astype(np.uint8).reshape(3, 96)
    sources = [
        KvSource(tensor=tensor, page_size=2, bytes_per_token=48, read_bytes=32),  # slots 0..5
        KvSource(tensor=tensor[:, 16:], page_size=1, bytes_per_token=16, read_bytes=16),  # slots 0..2
    ]
    out = np.full(4, -77)
    fold_kv(
        sources=[sources[i] for i in order],
        mode=KvHashMode.ALL,
        slots=np.array([1, 2, 3, -1]),
        out=out,
        backend=backend,
    )

    def fold(data: Any) -> int:
        acc = 0
        for word in np.ascontiguousarray(data).view(np.uint64).tolist():
            acc = by_numpy(acc ^ word)
        return acc

    for slot in (1, 2):
        parts = [fold(tensor[slot // 2, slot % 2 * 48 : slot % 2 * 48 + 32]), fold(tensor[slot, 16:32])]
        total = by_numpy(by_numpy(parts[order[0]]) ^ parts[order[1]])
        assert as_u64(out[slot - 1]) == total
    assert out[2] == 0 and out[3] == 0  # slot 3 is beyond the second source


@BACKENDS
def test_each_verify_reason_and_its_row(backend: str) -> None:
    canary, _ = write_chain(backend)
    records = canary.view(np.int64)
    clean = [(3, 11, 0, -1), (1, 22, 1, 3), (2, 33, 2, 1)]
    common: dict[str, Any] = {
        "tag": LaunchTag.SWEEP_V_SWA,
        "sources": [kv_source()],
        "kv_hash_mode": KvHashMode.PARTIAL,
    }

    def rows(entries: list[tuple[int, int, int, int]], *, check_tokens: bool = True) -> list[list[int]]:
        state = fresh()
        verify(canary=canary, plan=verify_plan(entries), check_tokens=check_tokens, **common, **state, backend=backend)
        assert state["slot_counter"][0] == len(entries)
        log = state["violations"]
        return [[e, *row] for e, row in zip(log.entries.tolist(), log.rows.tolist(), strict=True)][: log.num_rows]

    h1, h2 = int(records[1, 2]), int(records[2, 2])
    assert rows([*clean, (0, 1, 2, 3), (2, -1, 2, 0)]) == []  # slot 0 is skipped, token -1 and prev 0 unchecked
    assert rows([(1, 23, 1, 3)]) == [[0, 11, 1, 1, 22, 23, h1, h1, FailReason.VERIFY_TOKEN]]
    assert rows([(1, 23, 1, 3)], check_tokens=False) == []
    assert rows([clean[0], (1, 22, 7, 3)]) == [[1, 11, 1, 1, 22, 22, h1, h1, FailReason.VERIFY_POSITION]]
    seed = as_i64(chain_seed())
    assert rows([(2, -1, 2, -9)]) == [[0, 11, 2, 2, 33, -1, h2, seed, FailReason.VERIFY_CHAIN_HASH]]
    records[2, 3] ^= 1
    everything = rows([(2, 1, 1, 3)])
    assert everything == [[0, 11, 2, 2, 33, 1, h2, h1, 1 | 2 | 4 | 32]]
    assert rows([(2, 33, 2, 1)]) == [[0, 11, 2, 2, 33, 33, h2, h2, FailReason.VERIFY_KV_HASH]]


@BACKENDS
def test_verify_counts_what_it_cannot_read(backend: str) -> None:
    canary, _ = write_chain(backend)
    state = fresh()
    entries = [(5, 1, 1, 1), (-1, 1, 1, 1), (SLOT_OUT_OF_RANGE, 1, 1, 1), (2, 33, 2, 5), (2, 33, 9, SLOT_OUT_OF_RANGE)]
    verify(
        canary=canary,
        tag=0,
        plan=verify_plan(entries),
        check_tokens=True,
        sources=[kv_source()],
        kv_hash_mode=KvHashMode.PARTIAL,
        **state,
        backend=backend,
    )
    log = state["violations"]
    assert log.out_of_range[0] == 5
    stored = int(canary.view(np.int64)[2, 2])
    assert log.rows[: log.num_rows].tolist() == [[0, 2, 2, 33, 33, stored, stored, FailReason.VERIFY_POSITION]]
    assert log.entries[0] == 4
    assert state["slot_counter"][0] == 5


@BACKENDS
def test_write_asserts_inputs_and_steps_in_rows_of_their_own(backend: str) -> None:
    canary, _ = write_chain(backend)
    tail = int(as_i64(mix3(int(canary.view(np.uint64)[2, 2]), 33, 2)))
    state = fresh()
    write(
        canary=canary,
        tag=LaunchTag.HEAD_K_FULL,
        plan=write_plan([0, 2], [2]),
        input_ids=np.array([44, 55]),
        positions=np.array([7, 8]),
        out_cache_loc=np.array([4, 0]),
        expected_tokens=np.array([45, 55]),
        expected_positions=np.array([3, 8]),
        chain_step_assert=True,
        sources=[],
        kv_hash_mode=KvHashMode.ALL,
        **state,
        backend=backend,
    )
    log = state["violations"]
    assert log.rows[: log.num_rows].tolist() == [
        [0, 4, 7, 44, 45, tail, 3, FailReason.WRITE_TOKEN | FailReason.WRITE_POSITION],
        [0, 4, 7, 44, 44, tail, 3, FailReason.WRITE_POSITION],
    ]
    assert log.entries[:2].tolist() == [0, 0]
    # The chain goes on with what was fed, and slot 0 is written like any other.
    assert canary.view(np.int64)[4].tolist() == [44, 7, tail, 0]
    assert canary.view(np.int64)[0].tolist() == [55, 8, as_i64(mix3(as_u64(tail), 44, 7)), 0]


@BACKENDS
def test_write_leaves_out_what_the_buffer_does_not_have(backend: str) -> None:
    canary, state = write_chain(
        backend,
        plan=write_plan([0, 3, 2, 99], [5, 1, -1]),  # a seed beyond, offsets backwards, offsets past the tokens
        out_cache_loc=np.array([5, -1, 3]),
        sources=[],
    )
    assert state["violations"].out_of_range[0] == 4
    # Skipped tokens are not chained: the third one hangs on the anchor, written by request 0 and again by request 2.
    assert canary.view(np.int64)[3].tolist() == [33, 2, as_i64(chain_seed()), 0]
    assert (canary[[0, 1, 2, 4]] == 0xEE).all()
    assert state["slot_counter"][0] == 2


@BACKENDS
def test_plan_counts_look_ups_that_cannot_be_made(backend: str) -> None:
    table = np.array([[0, 0, 0], [4, 5, 6], [-1, 9, 2]], np.int32)
    made = VerifyPlan.allocate(capacity=9, request_capacity=4), WritePlan.allocate(request_capacity=4)
    out_of_range = np.zeros(1, np.int64)
    plan(
        req_pool_indices=np.array([1, 2, 7, 0]),
        prefix_lens=np.array([4, 3, 1, 9]),  # one beyond the width, one row that is not there, one padding row
        extend_lens=np.array([2, 0, 1, 5]),
        req_to_token=table,
        window=3,
        full_to_swa=np.array([0, 10, 20, 30, 40, 50, 60]),
        truth_tokens=np.array([[0] * 3, [1, 2, 3], [4, 5, 6]], np.int32),
        truth_lens=np.array([4, 2, 0, 9]),
        token_offset=1,
        verify_plan=made[0],
        write_plan=made[1],
        out_of_range=out_of_range,
        backend=backend,
    )
    bad = SLOT_OUT_OF_RANGE
    n = int(made[0].num_valid[0])
    assert made[0].slots[:n].tolist() == [50, 60, bad, -1, bad, 20, bad]
    assert made[0].prev_slots[:n].tolist() == [40, 50, 60, -1, -1, bad, -1]
    assert made[0].expected_positions[:n].tolist() == [1, 2, 3, 0, 1, 2, 0]
    assert made[0].expected_tokens[:n].tolist() == [3, -1, -1, 5, -1, -1, -1]
    assert made[0].request_offsets.tolist() == [0, 3, 6, 7, 7]
    assert made[1].offsets.tolist() == [0, 2, 2, 3, 3]
    assert made[1].seed_slots.tolist() == [bad, -1, bad, -1]
    # position 3 of row 1 twice (entry, seed), its truth token once, slot 9, row 7, and row 7's seed
    assert out_of_range[0] == 6


def test_capacity_fits_exactly() -> None:
    prefix_lens = np.array([0, 3, 10, -4])
    assert plan_capacity(prefix_lens, 0) == 13
    assert plan_capacity(prefix_lens, 4) == 7
    assert plan_capacity(np.zeros(0, np.int64), 4) == 0


@pytest.mark.parametrize("name", ["rows", "entries", "write_index", "out_of_range"])
def test_a_log_that_cannot_be_written_to_is_refused(name: str) -> None:
    arrays = {key: getattr(ViolationLog.allocate(2), key) for key in ("rows", "entries", "write_index", "out_of_range")}
    ViolationLog(**arrays)
    arrays[name].flags.writeable = False
    with pytest.raises((TypeError, ValueError), match=f"violations.{name}"):
        ViolationLog(**arrays)
