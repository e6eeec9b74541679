"""Recurrent state on the device: the same ops as the host's recorder takes down, the same hashes, in the same order."""

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture import model_forward
from kvcanary.kernels.capture.frames import SavedStates, StateIndices
from kvcanary.recorder.capture.device.forward import BatchRequests, DeviceForward
from kvcanary.recorder.capture.device.recorder import DeviceRecorder
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.capture.privacy import Privacy
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.capture.recurrent import StateAccess
from kvcanary.recorder.state.recurrent import SAVE, STEP
from kvcanary.recorder.trace.header import PoolGroup, Runner, StatePool, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

ROWS, WIDTH, SLOTS, STATES = 6, 40, 64, 9
COLUMNS = [f"recurrent_{name}" for name in ("pool", "op", "request", "source", "slot", "before", "after")]


@pytest.fixture(autouse=True)
def _small_kernels(monkeypatch):
    monkeypatch.setattr(model_forward, "PROGRAMS", 3)
    monkeypatch.setattr(model_forward, "TILE", 16)


class Engine:
    """Two pools of states, one of odd bytes; a forward adds to what it read."""

    def __init__(self, folder, rng, *, from_end=False, **options):
        self.rng = rng
        self.table = torch.zeros((ROWS, WIDTH), dtype=torch.int32)
        whole = torch.from_numpy(rng.integers(0, 256, (STATES, 7, 41), dtype=np.uint8))
        self.parts = {
            0: [torch.randn(STATES, 3, 5), torch.randn(STATES, 11).to(torch.bfloat16)],
            1: [whole[:, 2:5]],  # 123 bytes, and more to the next slot
        }
        sizes = {"num_slots": STATES, "num_layers": 2}
        header = TraceHeader(
            groups=(PoolGroup(name="full", num_slots=SLOTS),),
            tables=(StateTable(rows=ROWS, width=WIDTH),),
            runners=(Runner(),),
            states=(
                StatePool(name="a", hashed_bytes=40, from_end=from_end, **sizes),
                StatePool(name="b", hashed_bytes=4096, from_end=from_end, **sizes),
            ),
        )
        self.host = Recorder(folder / "host.arrow", header, state_sources=self.parts, **options)
        more = {"tables": [self.table], "luts": [], "kv_sources": {}, "state_sources": self.parts}
        self.device = DeviceRecorder(folder / "device.arrow", header, **more, **options)
        self.device.capture.carries = True
        self.known = {}

    def change(self, what, pool, slots, sources=()):
        to, of = torch.tensor(slots), torch.tensor(sources)
        for part in self.parts[pool]:
            part[to] = part[of] if what == "copy" else torch.zeros_like(part[to])
        self.host.state_changed(what, pool=pool, slots=to, sources=of)
        self.device.state_changed(what, pool=pool, slots=to, sources=of)

    def forward(self, rows, prefix, slots, *, host=True, saves=(), reads=None, **how):
        """One token for each request; `slots[pool]` are read and written, and `saves[pool]` are slots and tokens `[2, bs]`.

        Who has a prefix begins with the state that lies there, if `reads` `[bs]` does not say who does.
        """
        goes_on = np.array(prefix) > 0 if reads is None else np.array(reads)
        slots = [np.array(one, np.int64) for one in slots]
        saved = [*saves, *[np.zeros((2, 0), np.int64)] * (len(slots) - len(saves))]
        if host:
            self.host.before_forward(
                ForwardInput(
                    mode="decode",
                    request_ids=np.array(rows) * 7,
                    req_pool_indices=rows,
                    prefix_lens=prefix,
                    extend_lens=[1] * len(rows),
                    input_ids=[3] * len(rows),
                    positions=prefix,
                    out_cache_loc=(np.arange(len(rows)) + 1,),
                    reads=(self.table,),
                    states=tuple(
                        StateAccess(np.where(goes_on, one, -1), one, False, *more)
                        for one, more in zip(slots, saved, strict=True)
                    ),
                )
            )
        self._begin_on_device(rows, prefix, slots, saves=saves, reads=reads, **how)
        for pool, one in enumerate(slots):
            for row, slot in zip(rows, one.tolist(), strict=True):
                for part in self.parts[pool]:
                    if row and 0 <= slot < STATES:
                        part[slot] += 1
        for pool, (one, tokens) in enumerate(saves):
            for row, slot, count in zip(rows, one.tolist(), tokens.tolist(), strict=True):
                for part in self.parts[pool]:
                    if row and 0 <= slot < STATES:
                        part[slot] = count
        for recorder in (self.host, self.device) if host else (self.device,):
            recorder.after_forward()

    def _begin_on_device(
        self, rows, prefix, slots, *, saves=(), reads=None, split=None, spaced=1, slot_type=torch.int32
    ):
        def tensor(values):
            there = torch.full((len(values) * spaced + 1,), 77, dtype=slot_type)
            there[: len(values) * spaced : spaced] = torch.from_numpy(values).to(slot_type)
            return there[: len(values) * spaced : spaced]

        def flags(values):
            if values is not None and len(values) and all(values):
                return True
            return (
                None if values is None else torch.tensor([[value, not value] for value in values]).reshape(-1, 2)[:, 0]
            )

        def of_parts(values):
            return (values, None) if split is None or values is None else (values[:split], values[split:])

        def indices(one):
            (first, second), who = of_parts(one), map(flags, of_parts(reads))
            return StateIndices(tensor(first), None if second is None else tensor(second), *who)

        longs = torch.tensor(prefix, dtype=torch.int64)
        self.device.before_forward(
            DeviceForward(
                mode="decode",
                runner=0,
                rows=torch.tensor(rows, dtype=torch.int64),
                prefix=longs,
                input_ids=torch.full((len(rows),), 3),
                positions=longs,
                out_cache_loc=torch.arange(len(rows)) + 1,
                num_tokens=len(rows),
                requests=BatchRequests(ids=np.array(rows, np.int64) * 7),
                states=(
                    *map(indices, slots),
                    *(SavedStates(torch.from_numpy(to), tensor(tokens)) for to, tokens in saves),
                ),
            )
        )

    def close(self):
        for recorder in (self.host, self.device):
            recorder.close()
            assert recorder.stats().off == "closed"
        return [steps_of(recorder.path) for recorder in (self.host, self.device)]


def steps_of(path):
    forwards = [event for event in read_trace(path) if event.kind == "forward"]
    return [np.stack([event.ints(name) for name in COLUMNS]).T.tolist() for event in forwards]


@pytest.mark.parametrize("from_end", [False, True])
def test_a_careless_engine_is_taken_down_alike(tmp_path, from_end):
    rng = np.random.default_rng(5)
    engine = Engine(tmp_path, rng, from_end=from_end)
    for number in range(24):
        for _ in range(int(rng.integers(0, 3))):
            count = int(rng.integers(1, 4))
            to, of = rng.permutation(STATES)[:count].tolist(), rng.integers(0, STATES, count).tolist()
            if rng.random() < 0.5:
                engine.change("clear", int(rng.integers(0, 2)), to)
            else:
                engine.change("copy", int(rng.integers(0, 2)), to, of)
        bs = int(rng.integers(0, 5))
        rows = sorted(rng.permutation(ROWS)[:bs].tolist(), key=lambda row: row == 0)
        slots = [np.where(rng.random(bs) < 0.1, -1, rng.permutation(STATES)[:bs]).tolist() for _ in range(2)]
        engine.forward(
            rows,
            rng.integers(0, 9, bs).tolist(),
            slots,
            saves=[
                (np.where(rng.random(bs) < 0.5, -1, rng.permutation(STATES)[:bs]), rng.integers(0, 9, bs))
                for _ in range(number % 3)
            ],
            reads=(rng.random(bs) < (0.5, 1.1)[number // 6 % 2]).tolist() if number % 6 < 4 else None,
            split=None if number % 3 else int(rng.integers(0, bs + 1)),
            spaced=1 + number % 2,
            slot_type=(torch.int32, torch.int64)[number // 2 % 2],
        )
    host, device = engine.close()
    assert sum(map(len, host)) > 60
    assert device == host


def test_hashes_are_keyed_where_tokens_are_private(tmp_path):
    hashes = []
    for number, salt in enumerate((None, b"0123456789abcdef" * 2)):
        (tmp_path / str(number)).mkdir()
        torch.manual_seed(3)
        engine = Engine(
            tmp_path / str(number), np.random.default_rng(3), **({} if salt is None else {"privacy": Privacy(salt)})
        )
        engine.change("clear", 0, [4])
        engine.forward([1, 2], [3, 0], [[2, 4], [1, 3]])
        host, device = engine.close()
        assert host == device
        hashes.append([row[5:] for row in host[0]])
    assert all(a != b for one, other in zip(*hashes, strict=True) for a, b in zip(one, other, strict=True) if a or b)


def test_a_pool_of_which_a_slot_does_not_exist_is_unknown(tmp_path):
    engine = Engine(tmp_path, np.random.default_rng(1))
    for wrong in (STATES, -7, 1 << 30):
        engine.forward([1, 2], [3, 4], [[2, wrong], [1, 3]], host=False)
    _, device = engine.close()
    assert [{(pool, op) for pool, op, *_ in ops} for ops in device] == [{(1, STEP)}] * 3


def test_a_pool_of_which_a_saved_slot_does_not_exist_is_unknown(tmp_path):
    engine = Engine(tmp_path, np.random.default_rng(1))
    saves = [(np.array([5, STATES]), np.array([4, 5])), (np.array([5, -1]), np.array([4, 5]))]
    engine.forward([1, 2], [3, 4], [[2, 4], [1, 3]], saves=saves, host=False)
    _, device = engine.close()
    assert [[tuple(op[:5]) for op in ops] for ops in device] == [
        [(1, STEP, 0, 1, 1), (1, STEP, 1, 3, 3), (1, SAVE, 0, 4, 5)]
    ]


def test_changes_before_a_forward_that_is_lost_are_lost_with_it(tmp_path):
    engine = Engine(tmp_path, np.random.default_rng(1))
    refused, writer = [True], engine.device.recorder.outbox.writer
    append, has_room = writer.append, writer.has_room
    writer.append = lambda *events, **more: False if refused[0] else append(*events, **more)
    writer.has_room = lambda size: not refused[0] and has_room(size)
    engine.change("clear", 0, [2])
    engine.forward([1], [0], [[2], [2]], host=False)
    assert engine.device.drain()
    refused[0] = False
    engine.forward([1], [1], [[2], [2]], host=False)
    engine.forward([1], [2], [[2], [2]], host=False)
    _, device = engine.close()
    assert [[op for _, op, *_ in ops] for ops in device][-1] == [STEP, STEP]
    assert not replay(engine.device.path, settings=ReplaySettings(), report=None).findings_by_kind.get("state_differs")


def serve(folder, fault):
    """Two requests, of which one goes on from the other's checkpoint of four tokens; `fault` before that."""
    engine = Engine(folder, np.random.default_rng(2))
    engine.change("clear", 0, [1])
    engine.change("clear", 1, [1])
    for position in range(4):
        engine.forward([1], [position], [[1], [1]])
    for pool in (0, 1):
        engine.change("copy", pool, [5], [1])
    engine.forward([1], [4], [[1], [1]])
    fault(engine)
    for pool in (0, 1):
        engine.change("copy", pool, [2], [5])
    engine.forward([1, 2], [5, 4], [[1, 2], [1, 2]])
    engine.host.close()
    engine.device.close()
    return replay(engine.device.path, settings=ReplaySettings(), report=None).findings_by_kind


def test_a_healthy_engine_replays_without_a_finding(tmp_path):
    assert not serve(tmp_path, lambda engine: None).get("state_differs")


@pytest.mark.parametrize("odd", [0, 1])
def test_an_overwritten_checkpoint_is_found(tmp_path, odd):
    def overwrite(engine):
        engine.parts[odd][0][5] += 1

    assert serve(tmp_path, overwrite)["state_differs"] == 1


def test_after_a_change_that_was_not_seen_nothing_is_judged(tmp_path):
    def unseen(engine):
        engine.parts[0][0][5] += 1
        engine.device.give_up_states()

    assert not serve(tmp_path, unseen).get("state_differs")


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_begins_with_a_state_is_what_the_layers_are_told(tmp_path, goes_on):
    """A request without a prefix that goes on from another's state, and one that begins anew in the middle."""
    engine = Engine(tmp_path, np.random.default_rng(4))
    for position in range(4):
        engine.forward([1], [position], [[1], [1]], reads=[position > 0])
    row, position = (2, 0) if goes_on else (1, 4)
    engine.forward([row], [position], [[1], [1]], reads=[goes_on])
    host, device = engine.close()
    assert device == host
    found = replay(engine.device.path, settings=ReplaySettings(), report=None).findings_by_kind
    assert found.get("state_differs") == 2  # in each pool
