"""What is not due has not changed since it was verified, and what has not changed is not due.

A model keeps, of each entry, everything that its answer depends on; the states are told of changes as the executor tells
them, and may leave out only entries of which all that is still the same.
"""

import numpy as np
import pytest
from kvcanary.kernels.ops.plan.reference import VerifyPlan
from kvcanary.kernels.replay_pass.due import ForwardReads, Readers
from kvcanary.kernels.replay_pass.entries import (
    MAX_CELLS,
    Runs,
    SlotTable,
    allocate_states,
    invalidate_lut_loops,
    invalidate_slots_loops,
    invalidate_table_loops,
    invalidate_truth_loops,
)
from kvcanary.kernels.replay_pass.swa import swa_divergence_loops, watched_divergence_loops

from ...support.loops import run

ROWS, WIDTH, SLOTS, FULL = 5, 200, 40, 50
BACKENDS = ["cpu", "reference"]


class Model:
    """Tables, versions of slots, and states that are told of every change."""

    def __init__(self, seed: int, *, window: int, sliding: bool, backend: str, token_offset: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        self.window, self.backend, self.serial, self.wrong = window, backend, 0, 0.1
        self.token_offset = token_offset
        self.table = np.zeros((ROWS, WIDTH), np.int32)
        self.lut = np.zeros(FULL, np.int64) if sliding else None
        self.truth = np.zeros((ROWS, WIDTH), np.int32)
        self.versions = np.zeros(SLOTS, np.int64)
        self.states = allocate_states(rows=ROWS, width=WIDTH, slots=SLOTS)
        self.seen: dict[tuple[int, int], tuple] = {}

    def ints(self, low: int, high: int, count: int) -> np.ndarray:
        return self.rng.integers(low, high, count)

    def change(self) -> None:
        """Change something, and tell the cells."""
        what = int(self.rng.integers(4))
        row, start = int(self.rng.integers(ROWS)), int(self.rng.integers(20))
        where = np.zeros(1, np.int64), np.array([row]), np.array([start]), np.array([2])
        if what == 0:
            slots = self.ints(1, SLOTS, 2)
            run(invalidate_slots_loops, self.backend, slots=slots, states=self.states)
            self.versions[slots] += 1
        elif what == 1:
            values = self.ints(-1, FULL + 2 if self.lut is not None else SLOTS + 2, 2)
            runs = Runs(*where, values)
            run(invalidate_table_loops, self.backend, states=self.states, index=0, runs=runs, table=self.table)
            self.table[row, start : start + 2] = values
        elif what == 2:
            values = self.ints(0, 3, 2)
            runs = Runs(*where, values)
            told = {"runs": runs, "truth": self.truth, "token_offset": self.token_offset}
            run(invalidate_truth_loops, self.backend, states=self.states, **told)
            self.truth[row, start : start + 2] = values
        elif self.lut is not None:
            places = self.ints(0, FULL, 1)
            before = self.lut[places]
            run(invalidate_lut_loops, self.backend, states=self.states, places=places, before=before, table=self.slots)
            self.lut[places] = self.ints(-1, SLOTS, 1)

    @property
    def slots(self) -> SlotTable:
        return SlotTable(self.table, np.zeros(0, np.int64) if self.lut is None else self.lut)

    def slot(self, row: int, position: int) -> int | None:
        slot = int(self.table[row, position])
        if self.lut is None or slot < 0:
            return slot
        return int(self.lut[slot]) if slot < FULL else None

    def depends_on(self, row: int, position: int, request: int, truth_len: int) -> tuple:
        """Everything that an entry's answer depends on."""
        found: list = [request]
        for at in (position, position - 1):
            slot = self.slot(row, at) if at >= 0 else -2
            found += [slot, int(self.versions[slot]) if slot is not None and 0 < slot < SLOTS else 0]
            found.append(int(self.table[row, at]) if at == position else 0)
        token = position + self.token_offset
        return (*found, int(self.truth[row, token]) if token < min(truth_len, WIDTH) else -1)

    def forward(self, batch: list[tuple[int, int, int, int]], event: int) -> set[tuple[int, int]]:
        """Plan and verify a forward of (row, request, prefix, truth_len); return what was due."""
        self.serial += 1
        rows, requests, prefix, truth_lens = (np.array(column, np.int64) for column in zip(*batch, strict=True))
        readers = Readers(rows, requests, prefix, truth_lens)
        reads = ForwardReads(
            self.states, readers, self.slots, event=event, serial=self.serial, window=self.window,
            token_offset=self.token_offset, backend=self.backend,
        )  # fmt: skip
        plan = VerifyPlan.allocate(capacity=reads.entries, request_capacity=len(batch))
        reads.plan(plan, self.truth, SLOTS, np.zeros(1, np.int64))
        assert plan.num_valid[0] == reads.entries
        planned: set[tuple[int, int]] = set()
        for r, (row, request, end, truth_len) in enumerate(batch):
            begin, stop = plan.request_offsets[r : r + 2]
            positions = plan.expected_positions[begin:stop].tolist()
            assert positions == sorted(set(positions))
            for i, position in zip(range(begin, stop), positions, strict=True):
                slot = self.slot(row, position) if row < ROWS else None
                assert plan.slots[i] == (1 << 62 if slot is None else slot)
            for position in range(max(0, end - self.window) if self.window else 0, end):
                now = self.depends_on(row, position, request, truth_len) if row < ROWS else ()
                if position in positions:
                    planned.add((row, position))
                else:
                    had = self.seen[row, position]
                    # a truth token that was there and is out of sight now can only be asked for less
                    assert now[:-1] == had[:-1], (row, position)
                    assert now[-1] in (had[-1], -1), (row, position)
                if (row < ROWS and now[-1] != -1) or (row, position) in planned:
                    self.seen[row, position] = now
        assert reads.reads == sum(min(p, self.window) if self.window else p for p in prefix.tolist())
        wrong = self.rng.random(reads.entries) < self.wrong
        reads.marks[wrong] = 1
        reads.mark_verified(plan, None)
        return planned


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("window", "sliding"), [(0, False), (0, True), (6, True), (9, False)])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_out_has_not_changed(seed: int, window: int, sliding: bool, backend: str) -> None:
    model = Model(seed, window=window, sliding=sliding, backend=backend, token_offset=seed % 2)
    requests = [7] * ROWS
    prefix = model.ints(1, 30, ROWS)
    for event in range(120 if backend == "cpu" else 40):
        for _ in range(int(model.rng.integers(3))):
            model.change()
        rows = model.rng.permutation(np.arange(1, ROWS))[: int(model.rng.integers(1, ROWS))].tolist()
        if model.rng.random() < 0.1:
            rows.append(ROWS + 3)
        elif model.rng.random() < 0.1:
            rows.append(rows[0])
        batch = []
        for row in rows:
            if row < ROWS:
                prefix[row] = max(1, min(WIDTH, prefix[row] + int(model.rng.integers(-1, 5))))
                if model.rng.random() < 0.05:
                    requests[row], prefix[row] = int(model.rng.integers(5)), int(model.rng.integers(1, 30))
                batch.append((row, requests[row], int(prefix[row]), int(prefix[row]) + int(model.rng.integers(-3, 3))))
            else:
                batch.append((row, 1, 4, 0))
        model.forward(batch, event)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_is_new_is_looked_at(backend: str) -> None:
    model = Model(1, window=0, sliding=False, backend=backend)
    model.table[1, :] = np.arange(WIDTH) % (SLOTS - 1) + 1
    model.wrong = 0.0
    assert len(model.forward([(1, 7, 150, 151)], 0)) == 150
    for event in range(1, 20):
        assert model.forward([(1, 7, 150 + event, 151 + event)], event) == {(1, 149 + event)}
    assert model.forward([(1, 7, 169, 170)], 20) == set()
    run(invalidate_slots_loops, backend, slots=np.array([1, 0, -4, SLOTS + 1]), states=model.states)
    held = [position for position in range(169) if model.table[1, position] == 1]
    assert model.forward([(1, 7, 169, 170)], 21) == {(1, p + d) for p in held for d in (0, 1) if p + d < 169}
    assert model.forward([(1, 7, 169, 0)], 22) == set()
    assert model.forward([(1, 7, 170, 0)], 23) == {(1, 169)}
    assert model.forward([(1, 7, 170, 171)], 24) == {(1, 169)}  # it was not held against the truth
    assert len(model.forward([(1, 8, 170, 171)], 25)) == 170  # another request has seen nothing of it
    assert len(model.forward([(1, 8, 170, 171)], 25)) == 170  # nor has a forward that comes no later


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_swa_slot_that_two_full_slots_lead_to_is_due_for_both_readers(backend: str) -> None:
    model = Model(1, window=0, sliding=True, backend=backend)
    assert model.lut is not None
    model.lut[1:6] = [11, 12, 13, 14, 12]
    model.table[1, :3], model.table[2, :2] = [1, 2, 3], [4, 5]
    model.wrong = 0.0
    assert len(model.forward([(1, 7, 3, 0)], 0)) == 3
    assert model.forward([(1, 7, 3, 0)], 1) == set()
    assert model.forward([(2, 8, 2, 0)], 2) == {(2, 0), (2, 1)}
    assert model.forward([(1, 7, 3, 0)], 3) == {(1, 1), (1, 2)}
    assert model.forward([(2, 8, 2, 0)], 4) == {(2, 1)}


@pytest.mark.parametrize("token_offset", [0, 1])
def test_what_was_verified_without_a_truth_token_is_due_once_there_is_one(token_offset: int) -> None:
    model = Model(1, window=0, sliding=False, backend="reference", token_offset=token_offset)
    model.table[1, :3] = [4, 5, 6]
    model.wrong = 0.0
    everything = {(1, 0), (1, 1), (1, 2)}
    assert model.forward([(1, 7, 3, 5)], 0) == everything
    run(invalidate_slots_loops, "reference", slots=np.array([4]), states=model.states)
    assert model.forward([(1, 7, 3, 0)], 1) == {(1, 0), (1, 1)}
    assert model.forward([(1, 7, 3, 5)], 2) == everything


def test_tables_of_too_many_cells_are_not_watched() -> None:
    states = allocate_states(rows=2, width=MAX_CELLS, slots=4)
    assert states.rows.shape[0] == 0
    readers = Readers(np.array([1]), np.array([5]), np.array([3]), np.zeros(0, np.int64))
    table = SlotTable(np.ones((2, 4), np.int32), np.zeros(0, np.int64))
    reads = ForwardReads(states, readers, table, event=0, serial=1, window=0, token_offset=0, backend="cpu")
    assert (reads.reads, reads.entries) == (3, 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_watched_divergence_counts_what_a_walk_counts(seed: int, backend: str) -> None:
    rng = np.random.default_rng(seed)
    table, lut = np.zeros((ROWS, WIDTH), np.int32), np.zeros(FULL, np.int64)
    states, kinds = allocate_states(rows=ROWS, width=WIDTH, slots=FULL), np.zeros((ROWS, WIDTH), np.uint8)
    for _ in range(60):
        rows, starts = rng.integers(0, ROWS, 2), rng.integers(0, 30, 2)
        values = rng.integers(-1, FULL + 3, 8)
        runs = Runs(np.zeros(2, np.int64), rows, starts, np.array([5, 3]), values)
        run(invalidate_table_loops, backend, states=states, index=0, runs=runs, table=table)
        for row, start, part in zip(rows, starts, (values[:5], values[5:]), strict=True):
            table[row, start : start + len(part)] = part
        places = rng.integers(0, FULL, 3)
        run(invalidate_lut_loops, backend, states=states, places=places, before=places, table=SlotTable(table, lut))
        lut[places] = np.where(rng.random(3) < 0.5, places, rng.integers(0, FULL, 3))
        batch = {"rows": rng.integers(-1, ROWS + 1, 3), "starts": rng.integers(-2, 25, 3)}
        batch["ends"] = batch["starts"] + rng.integers(-2, 20, 3)
        came, expected = np.zeros((2, 2), np.int64)
        watched = {"table": SlotTable(table, lut), "states": states, "kinds": kinds, "figures": came}
        run(watched_divergence_loops, backend, **batch, **watched)
        run(swa_divergence_loops, **batch, req_to_token=table, lut=lut, counts=expected)
        assert came.tolist() == expected.tolist()


def test_entries_are_found_past_blocks_and_chunks() -> None:
    """A row is gone over by blocks of 64 positions and chunks of 4,096; every entry that is due is found behind them."""
    width, places = 3 * 4096 + 70, [0, 63, 64, 127, 4095, 4096, 4097, 8191, 8192, 8256, 12287, 12288, 12357]
    states = allocate_states(rows=2, width=width, slots=width + 1)
    table = np.zeros((2, width), np.int32)
    table[1] = np.arange(1, width + 1)
    readers = Readers(np.array([1]), np.array([5]), np.array([width]), np.zeros(0, np.int64))
    slots = SlotTable(table, np.zeros(0, np.int64))
    event = 0

    def due() -> list[int]:
        nonlocal event
        event += 1
        reads = ForwardReads(
            states, readers, slots, event=event, serial=event, window=0, token_offset=0, backend="reference"
        )
        plan = VerifyPlan.allocate(capacity=reads.entries, request_capacity=1)
        reads.plan(plan, None, width + 1, np.zeros(1, np.int64))
        reads.mark_verified(plan, None)
        return plan.expected_positions[: reads.entries].tolist()

    assert due() == list(range(width))
    for place in places:
        run(invalidate_slots_loops, "reference", slots=np.array([table[1, place]]), states=states)
        assert due() == [at for at in (place, place + 1) if at < width]
    for pair in ((0, 8200), (5, 12300), (4000, 8192)):  # with nothing due in the chunks between them
        run(invalidate_slots_loops, "reference", slots=table[1, list(pair)].astype(np.int64), states=states)
        assert due() == [place + more for place in pair for more in (0, 1)]
    run(invalidate_slots_loops, "reference", slots=table[1, places].astype(np.int64), states=states)
    assert due() == sorted({at for place in places for at in (place, place + 1) if at < width})
    assert due() == []
