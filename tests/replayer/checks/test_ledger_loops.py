"""The ledger's loops, compiled and not, on random and on empty input; outputs are what plain Python says."""

import numpy as np
import pytest
from kvcanary.kernels.constants import RECORD_TOKEN
from kvcanary.kernels.replay_pass.ledger import (
    ALLOC,
    AS_BEFORE,
    BEING_WRITTEN,
    CONTENT,
    DIFFERS,
    HELD,
    JOINER,
    LEDGER_COLUMNS,
    LEFT,
    NEVER_WRITTEN,
    OWNER,
    PADDED,
    PADDING_WRITER,
    READ_FOREIGN,
    READ_FREE,
    READ_RECYCLED,
    STAMP,
    STAMP_REQUEST,
    STATE,
    Found,
    Reads,
    judge_reads_loops,
    judge_writes_loops,
    note_writes_loops,
)
from kvcanary.kernels.replay_pass.swa import shared_halves_loops

from ...support.loops import run

NUM_SLOTS = 40


def random_input(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    bs = int(random.integers(0, 6))
    lens = random.integers(0, 7, bs)
    total = int(lens.sum())
    ledger = random.integers(0, 9, (NUM_SLOTS, LEDGER_COLUMNS))
    ledger[:, STATE] = random.integers(0, 5, NUM_SLOTS)
    ledger[:, OWNER] = random.integers(-1, 4, NUM_SLOTS)
    return {
        "ids": random.integers(-1, 4, bs),
        "offsets": np.append(0, np.cumsum(lens)).astype(np.int64),
        "slots": random.integers(-2, NUM_SLOTS + 3, total + int(random.integers(0, 4))),
        "reads": random.integers(-2, NUM_SLOTS + 3, total),
        "positions": random.integers(0, 4, total),
        "tokens": random.integers(-1, 3, total),
        "fresh": random.integers(0, 4, bs),
        "seen": random.integers(0, 7, bs),
        "ledger": ledger,
        "writers": random.integers(0, 3, (NUM_SLOTS, 3)),
        "records": random.integers(0, 3, (NUM_SLOTS, 4)),
        "rows": random.integers(-1, 5, bs),
        "table": random.integers(0, 4, (4, 4)).astype(np.int32),
    }


@pytest.mark.parametrize("complete", [True, False])
def test_compiled_loops_do_what_their_source_says(complete: bool) -> None:
    found = 0
    for seed in range(60):
        results = []
        for backend in ("cpu", "reference"):
            case = random_input(seed)
            ledger = case["ledger"]
            partners = np.zeros((NUM_SLOTS, 2), np.int64)
            writes, reads, halves = (Found.allocate(2 * len(case["slots"]) + 1) for _ in range(3))
            run(
                judge_writes_loops, backend, slots=case["slots"], offsets=case["offsets"], request_ids=case["ids"], serial=9,
                from_start=int(complete), ledger=ledger, found=writes,
            )  # fmt: skip
            asked = Reads(
                slots=case["reads"], positions=case["positions"], tokens=case["tokens"], offsets=case["offsets"],
                request_ids=case["ids"], fresh_from=case["fresh"], seen=case["seen"],
            )  # fmt: skip
            run(
                judge_reads_loops, backend, reads=asked, serial=9, complete=int(complete), from_start=int(seed % 2 == 0),
                ledger=ledger, writers=case["writers"], records=case["records"], found=reads,
            )  # fmt: skip
            end = int(case["offsets"][-1])
            run(note_writes_loops, backend, slots=case["slots"], end=end, event=77, ledger=ledger)
            run(
                shared_halves_loops, backend, slots=case["reads"], positions=case["positions"], offsets=case["offsets"],
                rows=case["rows"], table=case["table"], written=case["slots"], written_full=case["slots"] // 2, end=end,
                serial=3, partners=partners, found=halves,
            )  # fmt: skip
            results.append([*writes.found(), *reads.found(), halves.found()[0], ledger, partners])
        assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
        found += sum(len(part) for part in results[0][:5])
    assert found > 500


def test_empty_input_finds_nothing() -> None:
    nothing = np.empty(0, np.int64)
    ledger = np.zeros((1, LEDGER_COLUMNS), np.int64)
    offsets = np.zeros(1, np.int64)
    found = Found.allocate(0)
    found.total[0] = 5
    run(
        judge_writes_loops, slots=nothing, offsets=offsets, request_ids=nothing, serial=1, from_start=1, ledger=ledger,
        found=found,
    )  # fmt: skip
    assert found.total[0] == 0


@pytest.mark.parametrize(
    ("slot", "asked", "wrong"),
    [
        ({}, {}, 0),
        ({STAMP: 9, STAMP_REQUEST: PADDING_WRITER}, {}, PADDED),
        ({STAMP: 9, STAMP_REQUEST: 3}, {}, BEING_WRITTEN),
        ({STAMP: 9, STAMP_REQUEST: 2}, {}, 0),
        ({STAMP: 8, STAMP_REQUEST: PADDING_WRITER}, {}, 0),
        ({OWNER: 3, STAMP: 9, STAMP_REQUEST: PADDING_WRITER}, {}, READ_FOREIGN + PADDED),
        ({STATE: 0}, {}, READ_FREE),
        ({STATE: 0, LEFT: 6}, {"complete": 0, "seen": 5}, READ_FREE),
        ({STATE: 0, LEFT: 6}, {"complete": 0, "seen": 6}, 0),
        ({STATE: 0, LEFT: 6}, {"complete": 0}, 0),
        ({STATE: 0, LEFT: 6}, {"complete": 0, "seen": 5, "fresh": 0}, 0),
        ({STATE: 0, LEFT: 6, CONTENT: 7}, {"complete": 0, "seen": 5}, 0),
        ({STATE: 0, LEFT: 6, CONTENT: 6}, {"complete": 0, "seen": 5}, 0),
        ({CONTENT: 3}, {"token": 6}, NEVER_WRITTEN),
        ({CONTENT: 3}, {"token": -1}, NEVER_WRITTEN),
        ({CONTENT: 3}, {}, AS_BEFORE),
        ({CONTENT: 3, OWNER: 3}, {"complete": 0}, NEVER_WRITTEN),
        ({}, {"seen": 3}, READ_RECYCLED),
        ({}, {"seen": 4}, 0),
        ({JOINER: 2}, {"seen": 3}, 0),
        ({}, {"fresh": 0, "writer": 3, "token": 6}, DIFFERS),
        ({}, {"fresh": 0, "writer": 3}, 0),
        ({}, {"fresh": 0, "token": 6}, 0),
    ],
)
def test_what_is_wrong_with_a_read(slot: dict[int, int], asked: dict[str, int], wrong: int) -> None:
    """Request 2 reads position 0 in slot 1, which it got in event 4 and wrote in event 5."""
    ledger = np.zeros((2, LEDGER_COLUMNS), np.int64)
    for column, value in ({STATE: HELD, OWNER: 2, ALLOC: 4, CONTENT: 5, JOINER: -1} | slot).items():
        ledger[1, column] = value
    one = np.ones(1, np.int64)
    reads = Reads(
        slots=one, positions=0 * one, tokens=asked.get("token", 5) * one, offsets=np.array([0, 1]), request_ids=2 * one,
        fresh_from=asked.get("fresh", 1) * one, seen=asked.get("seen", 0) * one,
    )  # fmt: skip
    records = np.zeros((2, 4), np.int64)
    records[1, RECORD_TOKEN] = 5
    found = Found.allocate(1)
    run(
        judge_reads_loops, reads=reads, serial=9, complete=asked.get("complete", 1), from_start=1, ledger=ledger,
        writers=np.array([[0] * 3, [5, 0, asked.get("writer", 2)]]), records=records, found=found,
    )  # fmt: skip
    assert found.found()[1].tolist() == ([wrong] if wrong else [])
