"""KV bytes: gathered for what was written, compared for what is read; full-to-SWA tables on the way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.forward_input import ForwardInput, TableRead, translate
from kvcanary.recorder.capture.kv_shadow import group_shadows
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.schema import PHASE_AFTER, PHASE_BEFORE, TIER_HOST

from ..support.engines.documented_engine import contents, judged, run_requests, toy_engine

TOKEN_BYTES = 32


class Bench:
    """A pool of two groups over one table: full layers, and sliding ones behind a full-to-SWA table."""

    def __init__(self, path: Path, *, torch_pools: bool = False, **options: Any) -> None:
        self.pools = [np.zeros((40, TOKEN_BYTES), np.uint8), np.zeros((10, 2 * TOKEN_BYTES), np.uint8)]
        stream = KvStream(half="K", bytes_per_token=TOKEN_BYTES, capture_bytes=16)
        self.lut = np.zeros(40, np.int64)
        self.table = np.zeros((4, 16), np.int32)
        header = TraceHeader(
            groups=(
                PoolGroup(name="full", num_slots=40, streams=(stream,), halves=("K",), host_num_slots=8),
                PoolGroup(
                    name="swa", kind="swa", window=2, lut=0, num_slots=20, page_size=2, streams=(stream,), halves=("K",)
                ),
            ),
            tables=(StateTable(rows=4, width=16),),
            lut_lens=(40,),
        )
        tensors = [torch.from_numpy(pool) for pool in self.pools] if torch_pools else self.pools
        self.recorder = Recorder(
            path,
            header,
            kv_sources={
                (g, 0): KvSource(tensor=tensor, page_size=1 + g, bytes_per_token=TOKEN_BYTES, read_bytes=16)
                for g, tensor in enumerate(tensors)
            },
            **options,
        )
        self.rng = np.random.default_rng(0)

    def forward(self, prefix: int, slots: list[int], swa_slots: list[int], *, row: int = 1) -> None:
        self.lut[slots] = swa_slots
        positions = np.arange(prefix, prefix + len(slots))
        self.recorder.before_forward(
            ForwardInput(
                mode="extend",
                req_pool_indices=[row],
                request_ids=[row],
                prefix_lens=[prefix],
                extend_lens=[len(slots)],
                input_ids=positions + 100,
                positions=positions,
                out_cache_loc=(slots,),
                reads=(self.table,),
                luts=(self.lut,),
            )
        )
        self.table[row, positions] = slots
        for slot, swa in zip(slots, swa_slots, strict=True):
            self.pools[0][slot] = self.rng.integers(1, 256, TOKEN_BYTES)
            if swa > 0:
                self.swa_token(swa)[:] = self.rng.integers(1, 256, TOKEN_BYTES)
        self.recorder.after_forward()

    def swa_token(self, slot: int) -> np.ndarray:
        return self.pools[1].reshape(20, TOKEN_BYTES)[slot]


@pytest.mark.parametrize("torch_pools", [False, True])
def test_written_bytes_of_both_groups(tmp_path: Path, torch_pools: bool) -> None:
    bench = Bench(tmp_path / "trace.arrow", torch_pools=torch_pools)
    bench.forward(0, [7, 3, 9], [0, 5, 6])  # the first token is outside the window: slot 0 of the sliding pool
    bench.forward(3, [4], [8])
    bench.recorder.close()
    first, second = contents(tmp_path / "trace.arrow")
    expected = [
        *bench.pools[0][[7, 3, 9], :16].ravel(),
        *np.zeros(16),
        *bench.swa_token(5)[:16],
        *bench.swa_token(6)[:16],
    ]
    assert first["kv_bytes"] == [int(byte) for byte in expected]
    assert second["kv_bytes"] == [*bench.pools[0][4, :16].tolist(), *bench.swa_token(8)[:16].tolist()]
    # Slot 7 maps to 0, as it does in the zeroed table: no change to tell.
    assert list(zip(first["lut_start"], first["lut_count"], strict=True)) == [(3, 1), (9, 1)]
    assert first["lut_slots"] == [5, 6]
    assert (second["lut_start"], second["lut_slots"]) == ([4], [8])
    summary = judged(tmp_path / "trace.arrow")
    assert (summary.violations, summary.findings) == (0, 0)


def test_a_changed_byte_is_told_once_and_only_where_it_is_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "trace.arrow")
    bench.forward(0, [7, 3, 9], [1, 5, 6])
    bench.pools[0][3, 0] ^= 0xFF
    bench.swa_token(6)[15] ^= 1
    bench.swa_token(1)[0] ^= 0xFF  # out of the window: nobody reads it
    bench.pools[0][9, 16] ^= 0xFF  # past the captured bytes
    bench.forward(3, [4], [8])
    bench.forward(4, [11], [9])
    bench.recorder.close()
    _, second, third = contents(tmp_path / "trace.arrow")
    assert second["kv_change_stream"] == [0, 1]
    assert second["kv_change_slot"] == [3, 6]
    assert second["kv_change_phase"] == [PHASE_AFTER, PHASE_AFTER]
    assert second["kv_change_bytes"] == [*bench.pools[0][3, :16].tolist(), *bench.swa_token(6)[:16].tolist()]
    assert third["kv_change_slot"] == []
    assert judged(tmp_path / "trace.arrow").violations_by_launch == {"TAIL_K_FULL": 2, "TAIL_K_SWA": 2}


@pytest.mark.parametrize(
    ("every", "watched", "changed"),
    [(0, [0] * 5, None), (1, [1] * 5, 2), (2, [1, 0, 1, 0, 1], 2), (4, [1, 0, 0, 0, 1], 4)],
)
def test_watching_every_n_forwards(tmp_path: Path, every: int, watched: list[int], changed: int | None) -> None:
    bench = Bench(tmp_path / "trace.arrow", kv_watch_every=every)
    for step in range(5):
        if step == 2:
            bench.pools[0][10, 0] ^= 0xFF
        bench.forward(step, [10 + step], [1 + step])
    bench.recorder.close()
    events = contents(tmp_path / "trace.arrow")
    assert [event["kv_watched"] for event in events] == watched
    assert [event["forward"] for event in events if event["kv_change_slot"]] == ([] if changed is None else [changed])


def test_a_slot_that_was_never_written_under_the_recorder_is_not_judged(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "trace.arrow")
    bench.table[1, :2] = [20, 21]
    bench.pools[0][20:22] = 7
    bench.forward(2, [22], [3])
    bench.pools[0][20:22] = 8
    bench.forward(3, [23], [4])
    bench.recorder.close()
    assert [event["kv_change_slot"] for event in contents(tmp_path / "trace.arrow")] == [[], []]


def test_copied_slots_carry_their_bytes(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "trace.arrow")
    bench.forward(0, [7, 3, 9], [1, 5, 6])
    host = bench.pools[0][[7, 3]].copy()
    bench.recorder.kv_copy(group=0, src=[7, 3], dst=[2, 3], count=[1, 1], dst_tier=TIER_HOST, note="offload")
    bench.pools[0][[7, 3]] = 0
    bench.pools[0][[30, 31]] = host
    bench.recorder.kv_copy(group=0, src=[2], dst=[30], count=[2], src_tier=TIER_HOST, note="load-back")
    bench.lut[[30, 31]] = [1, 5]
    bench.table[1, :2] = [30, 31]
    bench.forward(3, [4], [8])
    bench.pools[0][31, 0] ^= 0xFF
    bench.forward(4, [12], [9])
    bench.recorder.close()
    events = contents(tmp_path / "trace.arrow")
    assert [event["kind"] for event in events] == ["forward", "kv_copy", "kv_copy", "forward", "forward"]
    assert [event["kv_change_slot"] for event in events[3:]] == [[], [31]]


def test_a_ring_is_compared_before_its_slots_are_written_again(tmp_path: Path) -> None:
    pool = np.zeros((8, 16), np.uint8)
    stream = KvStream(half="K", bytes_per_token=16, capture_bytes=16)
    group = PoolGroup(
        name="ring", kind="swa", window=3, num_slots=8, streams=(stream,), halves=("K",), reads_before_write=True
    )
    header = TraceHeader(groups=(group,), tables=(StateTable(rows=2, width=32),))
    source = KvSource(tensor=pool, page_size=1, bytes_per_token=16, read_bytes=16)
    with Recorder(tmp_path / "trace.arrow", header, kv_sources={(0, 0): source}) as recorder:
        for position in range(12):
            if position == 9:
                pool[1 + (position - 2) % 4, 3] ^= 0xFF
            first = max(0, position - 4)
            recorder.before_forward(
                ForwardInput(
                    mode="decode",
                    req_pool_indices=[1],
                    request_ids=[1],
                    prefix_lens=[position],
                    extend_lens=[1],
                    input_ids=[position],
                    positions=[position],
                    out_cache_loc=([1 + position % 4],),
                    reads=(
                        TableRead(
                            starts=[first],
                            counts=[position - first],
                            slots=[1 + p % 4 for p in range(first, position)],
                        ),
                    ),
                )
            )
            pool[1 + position % 4] = position + 1
            recorder.after_forward()
    events = contents(tmp_path / "trace.arrow")
    changed = [(event["forward"], event["kv_change_slot"], event["kv_change_phase"]) for event in events]
    assert [change for change in changed if change[1]] == [(9, [1 + 7 % 4], [PHASE_BEFORE])]
    summary = judged(tmp_path / "trace.arrow")
    assert summary.violations_by_launch == {"TAIL_K_SWA": 2}  # forwards 9 and 10 read position 7, 11 does not
    assert summary.findings == 0


def test_a_pool_on_a_device_is_watched_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device path on the CPU: what decides for it says yes, torch does the rest."""

    def record(name: str) -> list[dict[str, Any]]:
        engine = toy_engine(tmp_path / name)

        def flip(step: int) -> None:
            if step == 9:
                row = next(row for row, request in engine.requests.items() if request[2])
                engine.pool["K"].view(np.uint8)[engine.req_to_token[row, 0], 0] ^= 0xFF

        run_requests(engine, flip)
        engine.recorder.close()
        return contents(tmp_path / name)

    expected = record("host.arrow")
    assert any(event["kv_change_slot"] for event in expected)
    monkeypatch.setattr("kvcanary.recorder.capture.kv_shadow.on_device", lambda _: True)
    monkeypatch.setattr(
        "kvcanary.recorder.capture.kv_shadow._host_view",
        lambda source: KvSource(
            tensor=torch.from_numpy(source.tensor),
            page_size=source.page_size,
            bytes_per_token=source.bytes_per_token,
            read_bytes=source.read_bytes,
        ),
    )
    assert record("device.arrow") == expected


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_changed_slots_are_found_once_each_in_the_order_in_which_they_are_read(page_size: int, backend: str) -> None:
    tensor = np.random.default_rng(page_size).integers(0, 256, (24 // page_size, page_size * 32), np.uint8)
    tokens = tensor.reshape(24, 32)
    stream = KvStream(half="K", bytes_per_token=32, capture_bytes=16)
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=24, streams=(stream,)),), tables=(StateTable(rows=2, width=4),)
    )
    source = KvSource(tensor=tensor, page_size=page_size, bytes_per_token=32, read_bytes=16)
    (kv,) = group_shadows(header, {(0, 0): source}, backend=backend)
    slots = np.array([x for x in range(24) if x != 11], np.int64)
    kv.store_written(slots, [kv.gather(0, slots)])
    for slot, byte in ((0, 0), (5, 0), (7, 15), (9, 16), (11, 0), (13, 3), (2, 1)):
        tokens[slot, byte] ^= 0xFF
    read = np.array([13, 1, 5, 0, -1, 7, 9, 11, 5, 2, 24, 1 << 62], np.int64)
    ((number, found, content),) = kv.changes(read, np.array([2, 3], np.int64))
    assert (number, found.tolist()) == (0, [13, 5, 7])  # byte 16 is not captured, 11 not known, 2 written just now
    np.testing.assert_array_equal(content, tokens[[13, 5, 7], :16])
    kv.store_change(0, found, content)
    assert kv.changes(read, np.array([2], np.int64)) == []


@pytest.mark.parametrize("kind", [np.int32, np.int64, torch.int32, torch.int64, np.int16])
def test_slots_outside_a_full_to_swa_table_are_none(kind: Any) -> None:
    places = np.array([0, -1, 19, 20, np.iinfo(np.int64).min, np.iinfo(np.int64).max, 7], np.int64)
    table = np.arange(100, 140)
    lut = torch.arange(100, 140, dtype=kind) if isinstance(kind, torch.dtype) else table.astype(kind)
    assert translate(lut[::2], places).tolist() == [100, -1, 138, -1, -1, -1, 114]
    assert translate(None, places) is places
