"""Other bytes in a slot than were handed in, in any layer and place: of each slot 16 bytes of one of them are looked at."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.kernels.capture.layers import watched_bytes
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.capture.kv_tensor import KvTensor
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import ReplaySettings, replay

SLOTS, HEADS, DIM, SEED = 40, 2, 8, 11
LAYERS = (2, 5, 7)
AXES = "slot head dim"


class Engine:
    """One request of many tokens; of each half a tensor a layer, `[slots, heads, dim] float32`."""

    def __init__(self, path):
        self.path = path
        self.kv = [[np.zeros((SLOTS, HEADS, DIM), np.float32) for _ in LAYERS] for _ in "KV"]
        first = [KvTensor(tensor=kv[0], axes=AXES) for kv in self.kv]
        every = [KvTensor(tensor=tuple(kv), axes=AXES) for kv in self.kv]
        streams = [one.stream(half, layers=LAYERS[:1]) for half, one in zip("KV", first, strict=True)]
        streams += [
            one.sampling_stream(half, layers=LAYERS, seed=SEED, dtype="float32")
            for half, one in zip("KV", every, strict=True)
        ]
        group = PoolGroup(name="full", num_slots=SLOTS, streams=tuple(streams))
        header = TraceHeader(groups=(group,), tables=(StateTable(rows=4, width=64),))
        sources = {(0, number): source for number, source in enumerate((*first, *every))}
        self.recorder = Recorder(path, header, kv_sources=sources)
        self.random = np.random.default_rng(3)

    def forward(self, *, damage=lambda kv: None, layers=LAYERS, change=lambda submitted: submitted):
        slots = np.arange(3, 37)
        self.recorder.before_forward(
            ForwardInput(
                mode="extend",
                req_pool_indices=[1],
                request_ids=[71],
                prefix_lens=[0],
                extend_lens=[slots.size],
                input_ids=np.arange(slots.size) + 5,
                positions=np.arange(slots.size),
                out_cache_loc=(slots,),
                reads=(np.zeros((4, 64), np.int32),),
            )
        )
        given = [[self.random.random((slots.size, HEADS, DIM), np.float32) for _ in LAYERS] for _ in "KV"]
        for half, rows in zip(self.kv, given, strict=True):
            for kv, own in zip(half, rows, strict=True):
                kv[slots] = own
        damage(self.kv)
        submitted = {(0, half): given[half][0] for half in range(2)}
        for half in range(2):
            submitted[0, 2 + half] = {layer: given[half][LAYERS.index(layer)] for layer in layers}
        self.recorder.after_forward(submitted=change(submitted))

    def found(self, folder):
        self.recorder.close()
        folder.mkdir()
        replay(self.path, settings=ReplaySettings(), report=folder)
        return pq.read_table(folder / "findings.parquet").to_pylist()


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path / "trace.arrow")


def test_what_is_stored_as_it_was_handed_in_is_no_damage(engine, tmp_path):
    engine.forward()
    assert engine.found(tmp_path / "r") == []
    (event,) = (event for event in read_trace(engine.path) if event.kind == "forward")
    assert event.scalar("submitted_watched") == 2
    assert not len(event.bytes("kv_submitted_bytes"))


@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize("half", range(2))
def test_damage_in_any_layer_is_found_where_a_slot_is_looked_at(engine, tmp_path, half, layer):
    """All rows of a layer's second head are damaged; found are those slots of which that place is looked at."""
    chunks = HEADS * DIM * 4 // 16
    looked = watched_bytes(np.arange(3, 37), seed=SEED, num_layers=len(LAYERS), num_chunks=chunks, backend="reference")
    hit = np.flatnonzero((looked[:, 0] == layer) & (looked[:, 1] >= chunks // 2)) + 3

    def damage(kv):
        kv[half][layer][:, 1] += 1

    engine.forward(damage=damage)
    rows = engine.found(tmp_path / "r")
    assert len(hit) > 2
    assert [(row["kind"], row["forward"], row["slot"], row["count"]) for row in rows] == [
        ("write_damaged", 0, hit[0], len(hit))
    ]
    begin = int(looked[hit[0] - 3, 1]) * 16
    assert f"{'KV'[half]} of layer {LAYERS[layer]} holds" in rows[0]["detail"]
    byte = int(rows[0]["detail"].partition("in byte ")[2].partition(",")[0])
    assert begin <= byte < begin + 16


def test_layers_that_were_not_seen_are_not_judged(engine, tmp_path):
    def damage(kv):
        kv[0][1] += 1

    engine.forward(damage=damage, layers=LAYERS[2:])
    assert engine.found(tmp_path / "r") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {(0, 2): {3: s[0, 0]}}, "bytes of layer 3"),
        (lambda s: s | {(0, 2): {2: s[0, 0][:4]}}, "expected [34, at least 64]"),
        (lambda s: s | {(0, 2): {2: s[0, 0][:, :, :4]}}, "expected [34, at least 64]"),
        (lambda s: s | {(0, 0): {2: s[0, 0]}}, "no such (group, stream) that samples them"),
        (lambda s: s | {(0, 9): {2: s[0, 0]}}, "no such (group, stream) that samples them"),
        (lambda s: s | {(4, 2): {2: s[0, 0]}}, "no such (group, stream) that samples them"),
        (lambda s: s | {(0, 2): s[0, 0]}, "samples layers"),
    ],
)
def test_wrong_rows_are_refused(engine, caplog, change, message):
    engine.forward(change=change)
    assert message in engine.recorder.stats().off
