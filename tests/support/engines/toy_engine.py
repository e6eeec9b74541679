"""A small random engine for replay tests: schedules, allocates, writes KV, and says what a recorder would say.

It keeps its own tables, truth tokens and KV pool, and emits, beside each trace event, a snapshot of that state as it
stood, so that a test can step the published canary over the engine itself and not over the trace. The differences for
the trace are found here by plain loops, independent of the Recorder.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import KvStream, PoolGroup, Runner, StateTable, TraceHeader
from kvcanary.recorder.writing.writer import TraceWriter

FAULTS = ("none", "table", "token", "position", "kv", "early_free")
CAPTURE = 32


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What kind of engine to run."""

    window: int = 0  # > 0: the one group is SWA, with a full-to-SWA table
    halves: tuple[str, ...] = ("K", "V")
    sources: int = 1
    rows: int = 6
    width: int = 48
    num_slots: int = 260
    capture: int = CAPTURE


@dataclass(kw_only=True)
class Snapshot:
    """The engine's state around one forward, for stepping the published canary."""

    rows: np.ndarray
    prefix: np.ndarray
    extend: np.ndarray
    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    table: np.ndarray
    truth: np.ndarray
    truth_lens: np.ndarray
    lut: np.ndarray
    kv: list[np.ndarray]  # one pool per stream, as it stood when TAIL ran


@dataclass
class _Request:
    request_id: int
    tokens: list[int]
    prompt_len: int
    done: int = 0
    slots: list[int] = field(default_factory=list)


class ToyEngine:
    """Runs `forwards` random forwards; `events` and `snapshots` are what came of them."""

    def __init__(self, shape: Shape, *, seed: int, fault: str = "none", forwards: int = 24, fault_rate: float = 0.25):
        self.shape, self.fault, self.fault_rate = shape, fault, fault_rate
        self.rng = np.random.default_rng(seed)
        self.table = np.zeros((shape.rows, shape.width), np.int32)
        self.truth = np.zeros((shape.rows, shape.width), np.int32)
        self.lut = np.zeros(shape.num_slots, np.int64)
        if shape.window:
            self.lut[1:] = self.rng.permutation(np.arange(1, shape.num_slots))
        self.mirror = [np.zeros_like(self.table), np.zeros_like(self.truth), np.zeros_like(self.lut)]
        self.kv = [
            np.zeros((shape.num_slots, shape.capture), np.uint8) for _ in range(len(shape.halves) * shape.sources)
        ]
        self.free = list(range(1, shape.num_slots))
        self.requests: dict[int, _Request] = {}
        self.next_id = 100
        self.events: list[TraceEvent] = []
        self.snapshots: list[Snapshot] = []
        self.faulty_forwards: list[int] = []
        for number in range(forwards):
            self._forward(number)

    @property
    def header(self) -> TraceHeader:
        shape = self.shape
        return TraceHeader(
            groups=(
                PoolGroup(
                    name="swa" if shape.window else "full",
                    kind="swa" if shape.window else "full",
                    window=shape.window,
                    lut=0 if shape.window else -1,
                    num_slots=shape.num_slots,
                    halves=shape.halves,
                    streams=tuple(
                        KvStream(half=half, layer=layer, bytes_per_token=shape.capture, capture_bytes=shape.capture)
                        for half in shape.halves
                        for layer in range(shape.sources)
                    ),
                ),
            ),
            tables=(StateTable(rows=shape.rows, width=shape.width),),
            lut_lens=(shape.num_slots,) if shape.window else (),
            truth_table=StateTable(name="truth", rows=shape.rows, width=shape.width),
            runners=(Runner(),),
        )

    def _schedule(self) -> list[tuple[int, int]]:
        """Admit, retire, and choose (row, extend) for this forward."""
        for row, request in list(self.requests.items()):
            if len(request.tokens) >= self.shape.width - 2 or self.rng.random() < 0.04:
                self.free.extend(request.slots)
                del self.requests[row]
        empty = [row for row in range(1, self.shape.rows) if row not in self.requests]
        if empty and self.rng.random() < 0.5:
            prompt = self.rng.integers(3, 500, int(self.rng.integers(1, 20))).tolist()
            self.requests[int(self.rng.choice(empty))] = _Request(self.next_id, prompt, len(prompt))
            self.next_id += 1
        batch = []
        for row, request in self.requests.items():
            left = len(request.tokens) - request.done
            if left and self.rng.random() < 0.85:
                batch.append((row, int(self.rng.integers(1, left + 1)) if left > 1 else 1))
        self.rng.shuffle(batch)
        return [(int(row), int(extend)) for row, extend in batch]

    def _forward(self, number: int) -> None:
        batch = self._schedule()
        ids, positions, slots = [], [], []
        for row, extend in batch:
            request = self.requests[row]
            self.truth[row, : len(request.tokens)] = request.tokens
            for position in range(request.done, request.done + extend):
                slot = self.free.pop(int(self.rng.integers(len(self.free))))
                request.slots.append(slot)
                self.table[row, position] = slot
                ids.append(request.tokens[position])
                positions.append(position)
                slots.append(slot)
        rows = np.array([row for row, _ in batch], np.int64)
        prefix = np.array([self.requests[row].done for row in rows], np.int64)
        extend = np.array([n for _, n in batch], np.int64)
        truth_lens = np.array([len(self.requests[row].tokens) for row in rows], np.int64)
        undo = self._fault_before(number, rows, prefix, ids, positions)
        written = np.array(slots, np.int64)
        pool_slots = self.lut[written] if self.shape.window else written
        changes_before = self._kv_fault("kv", number, rows, prefix)
        fresh = [self.rng.integers(0, 256, (len(slots), self.shape.capture), dtype=np.uint8) for _ in self.kv]
        for pool, data in zip(self.kv, fresh, strict=True):
            pool[pool_slots] = data
        snapshot = Snapshot(
            rows=rows, prefix=prefix, extend=extend, ids=np.array(ids, np.int64),
            positions=np.array(positions, np.int64), slots=written, table=self.table.copy(), truth=self.truth.copy(),
            truth_lens=truth_lens, lut=self.lut.copy(), kv=[pool.copy() for pool in self.kv],
        )  # fmt: skip
        sampled = [
            int(self.rng.integers(3, 500)) if self.requests[row].done + n == len(self.requests[row].tokens) else -1
            for row, n in batch
        ]
        self.snapshots.append(snapshot)
        self.events.append(self._event(number, snapshot, fresh, changes_before, sampled))
        undo()
        for (row, n), token in zip(batch, sampled, strict=True):
            self.requests[row].done += n
            if token >= 0:
                self.requests[row].tokens.append(token)

    def _fires(self, name: str, number: int) -> bool:
        if self.fault != name or number < 4 or self.rng.random() >= self.fault_rate:
            return False
        self.faulty_forwards.append(number)
        return True

    def _fault_before(self, number, rows, prefix, ids, positions):
        """Damage what the forward is about to use; return what puts the table right again."""
        readers = [r for r in range(len(rows)) if prefix[r] > 0]
        if readers and self._fires("table", number):
            r = int(self.rng.choice(readers))
            cell = (int(rows[r]), int(self.rng.integers(max(0, prefix[r] - (self.shape.window or 99)), prefix[r])))
            right = int(self.table[cell])
            self.table[cell] = int(self.rng.integers(1, self.shape.num_slots))
            return lambda: self.table.__setitem__(cell, right)
        if len(ids) and self._fires("token", number):
            ids[int(self.rng.integers(len(ids)))] += 1
        if len(ids) and self._fires("position", number):
            positions[int(self.rng.integers(len(ids)))] += 1
        if self.requests and self._fires("early_free", number):
            request = self.requests[int(self.rng.choice(list(self.requests)))]
            self.free.extend(request.slots[: request.done])
            del request.slots[: request.done]
        return lambda: None

    def _kv_fault(self, name, number, rows, prefix):
        """Flip a byte that this forward reads; return what a recorder that watches would note."""
        readers = [r for r in range(len(rows)) if prefix[r] > 0]
        if not readers or not self._fires(name, number):
            return []
        r = int(self.rng.choice(readers))
        position = int(self.rng.integers(max(0, prefix[r] - (self.shape.window or 99)), prefix[r]))
        slot = int(self.table[rows[r], position])
        slot = int(self.lut[slot]) if self.shape.window else slot
        stream = int(self.rng.integers(len(self.kv)))
        self.kv[stream][slot, int(self.rng.integers(self.shape.capture))] ^= 0xFF
        return [(stream, slot, 0, self.kv[stream][slot].copy())]

    def _event(self, number, snapshot, fresh, changes, sampled) -> TraceEvent:
        ints = {
            "req_pool_indices": snapshot.rows,
            "request_ids": np.array([self.requests[row].request_id for row in snapshot.rows], np.int64),
            "prefix_lens": snapshot.prefix,
            "extend_lens": snapshot.extend,
            "truth_lens": snapshot.truth_lens,
            "sampled_lens": np.array([int(token >= 0) for token in sampled], np.int64),
            "sampled_tokens": np.array([token for token in sampled if token >= 0], np.int64),
            "input_ids": snapshot.ids,
            "positions": snapshot.positions,
            "out_cache_loc": snapshot.slots,
        }
        lens = (snapshot.prefix, snapshot.truth_lens)
        for name, state, mirror, upto in zip(
            ("table", "truth"), (self.table, self.truth), self.mirror[:2], lens, strict=True
        ):
            runs = [
                (row, p, int(state[row, p]))
                for row, end in zip(snapshot.rows, upto, strict=True)
                for p in range(end)
                if state[row, p] != mirror[row, p]
            ]
            for row, p, value in runs:
                mirror[row, p] = value
            ints |= {
                f"{name}_row": _column(runs, 0),
                f"{name}_start": _column(runs, 1),
                f"{name}_count": np.ones(len(runs), np.int64),
                {"table": "table_slots", "truth": "truth_tokens"}[name]: _column(runs, 2),
            }
            if name == "table":
                ints["table_index"] = np.zeros(len(runs), np.int64)
        moved = np.flatnonzero(self.lut != self.mirror[2])
        self.mirror[2][moved] = self.lut[moved]
        ints |= {
            "lut_index": np.zeros(len(moved), np.int64),
            "lut_start": moved.astype(np.int64),
            "lut_count": np.ones(len(moved), np.int64),
            "lut_slots": self.lut[moved],
            "kv_change_stream": _column(changes, 0),
            "kv_change_slot": _column(changes, 1),
            "kv_change_phase": _column(changes, 2),
        }
        at = 0
        for row, p, n, token in zip(snapshot.rows, snapshot.prefix, snapshot.extend, sampled, strict=True):
            self.mirror[0][row, p : p + n] = snapshot.slots[at : at + n]
            if token >= 0:
                self.mirror[1][row, p + n] = token
            at += n
        return TraceEvent(
            kind="forward",
            time_ns=1_000_000 * number,
            scalars={"forward": number, "mode": "mixed", "kv_watched": 1},
            ints=ints,
            bytes={
                "kv_bytes": np.concatenate([data.reshape(-1) for data in fresh]),
                "kv_change_bytes": np.concatenate([c[3] for c in changes]) if changes else np.zeros(0, np.uint8),
            },
        )


def _column(rows, index) -> np.ndarray:
    return np.array([row[index] for row in rows], np.int64)


def record(engine: ToyEngine, path: Path) -> Path:
    with TraceWriter(path, engine.header, flush_bytes=4096) as writer:
        for event in engine.events:
            assert writer.append(event)
    return path


SHAPES = {
    "full": Shape(),
    "full_k_only": Shape(halves=("K",)),
    "full_two_sources": Shape(sources=2, capture=16),
    "swa": Shape(window=5),
    "swa_wide": Shape(window=16, halves=("K",)),
}
