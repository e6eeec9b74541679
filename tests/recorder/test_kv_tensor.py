"""Pools of any layout: the bytes that are recorded are the slot's, wherever they lie."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.kv_tensor import KvTensor

from ..support.engines.documented_engine import judged, printed_code, run_code, run_requests

SLOTS, BLOCK, HEADS, DIM = 24, 4, 3, 10
RNG = np.random.default_rng(1)


def _tokens(dtype: Any = np.float32, dim: int = DIM) -> np.ndarray:
    return RNG.integers(1, 99, (SLOTS, HEADS, dim)).astype(dtype)


LAYOUTS = {
    "slot head dim": lambda t: t,
    "block slot head dim": lambda t: t.reshape(-1, BLOCK, HEADS, DIM),
    "head slot dim": lambda t: t.transpose(1, 0, 2),
    "block head slot dim": lambda t: t.reshape(-1, BLOCK, HEADS, DIM).transpose(0, 2, 1, 3),
    "head dim slot": lambda t: t.transpose(1, 2, 0),
    "block head part slot lane": lambda t: t.reshape(-1, BLOCK, HEADS, DIM // 2, 2).transpose(0, 2, 3, 1, 4),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("capture", [16, 32, 48])
@pytest.mark.parametrize("axes", LAYOUTS)
def test_a_slots_bytes_are_found_in_any_layout(axes: str, capture: int, kind: str) -> None:
    tokens = _tokens()
    pool = LAYOUTS[axes](np.ascontiguousarray(tokens)).copy()  # lies as it looks
    source = KvTensor(tensor=torch.from_numpy(pool) if kind == "torch" else pool, axes=axes)
    assert (source.num_slots, source.bytes_per_token) == (SLOTS, 120)
    slots = np.array([0, 23, 5, 5, -1, 24, 1 << 40])
    expected = np.zeros((7, capture), np.uint8)
    expected[:4] = tokens.reshape(SLOTS, -1).view(np.uint8)[slots[:4], :capture]
    np.testing.assert_array_equal(source.gather(slots, capture), expected)


def test_an_offset_a_short_token_and_several_layers() -> None:
    tokens = _tokens(np.int8, 4)  # 12 bytes
    source = KvTensor(tensor=(tokens, tokens + 1), axes="slot head dim", first_slot=2)
    assert (source.num_slots, source.bytes_per_token) == (26, 32)
    stream = source.stream("K", layers=(3, 8), capture_bytes=64)
    assert (stream.layer, stream.layers, stream.capture_bytes, stream.bytes_per_token) == (3, (3, 8), 32, 32)
    assert [stream.layer_of(byte) for byte in (0, 15, 16, 31)] == [3, 3, 8, 8]
    found = source.gather(np.array([1, 2, 25]), 32)
    assert not found[0].any()
    for layer in (0, 1):
        for row, slot in ((1, 0), (2, 23)):
            held = found[row, 16 * layer : 16 * layer + 16].view(np.int8)
            assert held.tolist() == [*(tokens[slot].reshape(-1) + layer).tolist(), 0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_lies_slot_by_slot_is_a_plain_source_of_the_same_memory(kind: str) -> None:
    pool = np.zeros((SLOTS, HEADS, 16), np.float32)
    given = torch.from_numpy(pool) if kind == "torch" else pool
    source = KvTensor(tensor=given, axes="slot head dim").as_source()
    assert isinstance(source, KvSource)
    pool[5] = 1.5
    np.testing.assert_array_equal(source.tensor[5].view(np.float32), 1.5)
    blocks = KvTensor(tensor=given.reshape(-1, BLOCK, HEADS, 16), axes="block slot head dim").as_source()
    assert isinstance(blocks, KvSource)
    assert (blocks.page_size, blocks.num_slots, blocks.bytes_per_token) == (BLOCK, SLOTS, HEADS * 64)
    for other, axes in (
        (given[:, :, :10], "slot head dim"),  # not packed
        (given.reshape(HEADS, SLOTS, 16), "head slot dim"),
        (given[:, 0, :2], "slot dim"),
        ((given, given[:]), "slot head dim"),
    ):
        assert isinstance(KvTensor(tensor=other, axes=axes).as_source(), KvTensor)


@pytest.mark.parametrize(
    ("axes", "message"),
    [("head dim", "one named slot"), ("slot slot dim", "one named slot"), ("slot dim", "shape \\[24, 3, 10\\]")],
)
def test_axes_that_do_not_fit(axes: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KvTensor(tensor=_tokens(), axes=axes)


# The guide's engine with its pool turned round, six layers deep, and what records it.
TURNED = """
import torch
from kvcanary import KvTensor
LAYERS = 6
pools = {half: torch.zeros((LAYERS, DIM, SLOTS)) for half in "KV"}

class Pool:
    def __init__(self, half):
        self.half = half
    def __setitem__(self, slots, rows):
        for layer in range(LAYERS):
            pools[self.half][layer][:, slots] = torch.from_numpy(rows.T.astype(np.float32)) + layer
    def __getitem__(self, slots):
        return pools[self.half][0][:, slots].numpy().T

def turned_recorder(engine, path):
    sources = {(0, n): KvTensor(tensor=tuple(pools[h]), axes="dim slot") for n, h in enumerate("KV")}
    streams = tuple(sources[0, n].stream(h, layers=tuple(range(LAYERS))) for n, h in enumerate("KV"))
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=SLOTS, num_layers=LAYERS, streams=streams),),
        tables=(StateTable(rows=ROWS, width=WIDTH),),
        truth_table=StateTable(name="truth", rows=ROWS, width=WIDTH),
    )
    engine.pool = {half: Pool(half) for half in "KV"}
    return Recorder(path, header, kv_sources=sources)
"""


@pytest.mark.parametrize("damaged", [None, 0, 5])
def test_six_turned_layers_are_watched(tmp_path: Path, damaged: int | None) -> None:
    names = run_code(printed_code().split("\nengine = ToyEngine")[0] + TURNED)
    path = tmp_path / "trace.arrow"
    engine = names["ToyEngine"](lambda engine: names["turned_recorder"](engine, path))

    def before_step(step: int) -> None:
        if step == 5 and damaged is not None:
            slot = int(engine.req_to_token[next(iter(engine.requests)), 0])
            names["pools"]["V"][damaged][0, slot] += 1

    run_requests(engine, before_step)
    engine.recorder.close()
    summary = judged(path)
    assert not any("layers" in row.what and row.words for row in summary.coverage)
    if damaged is None:
        assert (summary.violations, summary.findings) == (0, 0)
    else:
        assert set(summary.violations_by_launch) == {"TAIL_V_FULL"}
        assert summary.first_violation["forward"] == 5


def test_one_tensor_twice_is_refused(tmp_path: Path) -> None:
    names = run_code(printed_code().split("\nengine = ToyEngine")[0] + TURNED)
    names["pools"]["V"] = names["pools"]["K"]
    with pytest.raises(ValueError, match="lie over the same bytes"):
        names["ToyEngine"](lambda engine: names["turned_recorder"](engine, tmp_path / "trace.arrow"))
