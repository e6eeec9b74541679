"""A forward that leaves other bytes in a slot than the model handed to the cache."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import ReplaySettings, replay

SLOTS, HEADS, DIM = 12, 2, 8


class Engine:
    """Requests of some tokens each; `kv` `[slots, heads, dim] float32` of K and V."""

    def __init__(self, path, *, origin="stored"):
        self.path = path
        size = 4 * HEADS * DIM
        streams = tuple(
            KvStream(half=half, layer=3, bytes_per_token=size, capture_bytes=48, origin=origin) for half in "KV"
        )
        group = PoolGroup(name="full", num_slots=SLOTS, streams=streams)
        self.kv = [np.zeros((SLOTS, HEADS, DIM), np.float32) for _ in "KV"]
        sources = {
            (0, i): KvSource(
                tensor=kv.reshape(SLOTS, -1).view(np.uint8), page_size=1, bytes_per_token=size, read_bytes=48
            )
            for i, kv in enumerate(self.kv)
        }
        header = TraceHeader(groups=(group,), tables=(StateTable(rows=4, width=16),))
        self.recorder = Recorder(path, header, kv_sources=sources)
        self.table = np.zeros((4, 16), np.int32)
        self.random = np.random.default_rng(7)

    def forward(self, slots, *, damage=lambda kv: None, submitted=(0, 1), as_torch=False, padding=0):
        """Two requests halve the tokens; `damage` is done after the model has handed them in."""
        count, half = len(slots), len(slots) // 2
        positions = np.array([*range(half), *range(count - half), *[0] * padding])
        slots = np.array([*slots, *[0] * padding])
        self.recorder.before_forward(
            ForwardInput(
                mode="extend",
                req_pool_indices=[1, 2, *[0] * padding],
                request_ids=[71, 72, *[-1] * padding],
                prefix_lens=[0] * (2 + padding),
                extend_lens=[half, count - half, *[1] * padding],
                input_ids=positions + 5,
                positions=positions,
                out_cache_loc=(slots,),
                reads=(self.table,),
            )
        )
        given = [self.random.random((len(slots), HEADS, DIM), np.float32) for _ in "KV"]
        for kv, rows in zip(self.kv, given, strict=True):
            kv[slots] = rows
        damage(self.kv)
        if as_torch:
            given = [torch.from_numpy(rows.transpose(1, 0, 2).copy()).transpose(0, 1) for rows in given]
        self.recorder.after_forward(submitted={(0, number): given[number] for number in submitted})

    def found(self, folder, **settings):
        self.recorder.close()
        folder.mkdir()
        summary = replay(self.path, settings=ReplaySettings(**settings), report=folder)
        assert not summary.losses
        return pq.read_table(folder / "findings.parquet").to_pylist()


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path / "trace.arrow")


def flip(half, slot, byte):
    def damage(kv):
        kv[half][slot].reshape(-1).view(np.uint8)[byte] ^= 4

    return damage


SETTINGS = [{}, {"executor": "stepwise"}, {"executor": "stepwise", "backend": "reference"}]


@pytest.mark.parametrize("as_torch", [False, True])
def test_damage_within_the_writing_forward_is_told(as_torch, engine, tmp_path):
    engine.forward([3, 4, 5, 6], as_torch=as_torch)
    engine.forward([7, 8, 9, 10], damage=flip(1, 9, 44), as_torch=as_torch)
    for number, settings in enumerate(SETTINGS):
        (row,) = engine.found(tmp_path / f"report{number}", **settings)
        found = (row["kind"], row["forward"], row["request_id"], row["slot"], row["position"], row["count"])
        assert found == ("write_damaged", 1, 72, 9, 0, 1)
        assert row["detail"].startswith("V of layer 3 holds 0x")
        assert "in byte 44, the model handed in 0x" in row["detail"]


def test_what_was_not_written_at_all_is_told_apart(engine, tmp_path):
    """A slot that holds what it held before, or what a pool is made with, was left alone rather than damaged."""
    engine.forward([3, 4, 5, 6])
    before = [kv.copy() for kv in engine.kv]

    def leave(slots):
        def damage(kv):
            for half, old in zip(kv, before, strict=True):
                half[slots] = old[slots]

        return damage

    engine.forward([3, 4, 7, 8], damage=leave([3, 7]))
    engine.forward([9, 10, 5, 6], damage=flip(0, 5, 0))
    found = engine.found(tmp_path / "report")
    told = {row["slot"]: row["cause"] for row in found if row["kind"] == "write_damaged"}
    assert told == {3: "as_before", 7: "zeros", 5: ""}


def test_bytes_are_in_the_trace_only_where_they_differ(engine, tmp_path):
    engine.forward([3, 4, 5, 6])
    engine.forward([7, 8, 9, 10], damage=flip(0, 7, 0), submitted=(0,))
    engine.forward([3, 4, 5, 6], damage=flip(0, 3, 1), submitted=())
    engine.recorder.close()
    events = list(read_trace(tmp_path / "trace.arrow"))
    assert [event.scalar("submitted_watched") for event in events] == [2, 1, 0]
    assert [len(event.bytes("kv_submitted_bytes")) for event in events] == [0, 2 * 4 * 48, 0]


def test_what_is_not_damage(engine, tmp_path):
    engine.forward([3, 4, 5, 6], damage=flip(0, 3, 48))  # past the captured bytes
    engine.forward([7, 7, 9, 10])  # the second token took the first one's slot
    engine.forward([3, 4, 5, 6], damage=flip(0, 0, 0), padding=3)
    assert [finding["kind"] for finding in engine.found(tmp_path / "report")] == ["slot_written_twice"]


@pytest.mark.parametrize(
    ("submitted", "message"),
    [
        ({(0, 0): np.zeros((3, 64), np.uint8)}, "expected [2, at least 48]"),
        ({(0, 0): np.zeros((2, 16), np.uint8)}, "expected [2, at least 48]"),
        ({(0, 2): np.zeros((2, 64), np.uint8)}, "the header has no such (group, stream)"),
    ],
)
def test_wrong_bytes_are_refused(submitted, message, engine, caplog):
    engine.recorder.before_forward(
        ForwardInput(
            mode="extend",
            req_pool_indices=[1],
            request_ids=[1],
            prefix_lens=[0],
            extend_lens=[2],
            input_ids=[5, 6],
            positions=[0, 1],
            out_cache_loc=([3, 4],),
            reads=(engine.table,),
        )
    )
    engine.recorder.after_forward(submitted=submitted)
    assert message in engine.recorder.stats().off


def test_a_stream_that_is_captured_on_submission_has_nothing_beside_it(tmp_path):
    engine = Engine(tmp_path / "trace.arrow", origin="submitted")
    engine.forward([3, 4, 5, 6])
    assert "the stream is taken on submission" in engine.recorder.stats().off
