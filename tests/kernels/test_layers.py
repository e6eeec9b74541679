"""All layers of a pool: which bytes of a slot are looked at, and values that no model writes, in both backends."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcanary.kernels.capture.layers import FLOATS, INFINITE, NAN, NARROW, SATURATED, ZEROS, watched_bytes
from kvcanary.recorder.capture import kv_layers
from kvcanary.recorder.capture.kv_layers import USUAL_ROWS, KvLayers
from kvcanary.recorder.capture.kv_tensor import KvTensor

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
LAYERS, SLOTS, BLOCK, HEADS, DIM, SEED = 3, 24, 4, 2, 16, 99
RNG = np.random.default_rng(3)
LAYOUTS = {
    "slot head dim": lambda t: t,
    "head slot dim": lambda t: t.transpose(1, 0, 2),
    "block slot head dim": lambda t: t.reshape(-1, BLOCK, HEADS, DIM),
    "block head slot dim": lambda t: t.reshape(-1, BLOCK, HEADS, DIM).transpose(0, 2, 1, 3),
}


def read(source: KvTensor, *, backend: str, dtype: str = "", shift: int = 0) -> KvLayers:
    stream = source.sampling_stream("V", layers=tuple(range(len(source.tensors))), seed=SEED, dtype=dtype)
    return KvLayers(source, stream, slot_shift=shift, backend=backend)


@BACKENDS
@pytest.mark.parametrize("layers,chunks", [(1, 1), (3, 8), (32, 5), (5, 128)])
def test_slots_in_a_row_show_every_piece_of_every_layer(layers: int, chunks: int, backend: str) -> None:
    slots = np.arange(4 * layers * chunks)
    found = watched_bytes(slots, seed=SEED, num_layers=layers, num_chunks=chunks, backend=backend)
    for begin in range(0, slots.size, layers * chunks):
        pieces = {tuple(row) for row in found[begin : begin + layers * chunks].tolist()}
        assert pieces == {(layer, chunk) for layer in range(layers) for chunk in range(chunks)}
    other = watched_bytes(slots, seed=SEED + 1, num_layers=layers, num_chunks=chunks, backend=backend)
    assert layers * chunks == 1 or (other != found).any()
    if layers == 32:  # the first slot of a page shows other layers in other pages
        assert len(set(found[::32, 0].tolist())) > 5


def test_both_backends_look_at_the_same_bytes() -> None:
    slots = np.concatenate((RNG.integers(0, 1 << 31, 500), [0, (1 << 31) - 1]))
    given = {"seed": (1 << 32) - 1, "num_layers": 61, "num_chunks": 36}
    np.testing.assert_array_equal(
        watched_bytes(slots, **given, backend="cpu"), watched_bytes(slots, **given, backend="reference")
    )


@BACKENDS
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("axes", LAYOUTS)
def test_the_bytes_are_the_slots_in_any_layout(axes: str, kind: str, backend: str) -> None:
    tokens = RNG.integers(1, 99, (LAYERS, SLOTS, HEADS, DIM)).astype(np.float32)
    pools = [LAYOUTS[axes](layer).copy() for layer in tokens]
    pools = [torch.from_numpy(pool) for pool in pools] if kind == "torch" else pools
    source = KvTensor(tensor=tuple(pools), axes=axes)
    looked, slots = read(source, backend=backend, shift=1), np.array([1, 24, 7, 7, 0, 25, -1])
    at = watched_bytes(slots, seed=SEED, num_layers=LAYERS, num_chunks=HEADS * DIM // 4, backend=backend)
    rows = tokens.reshape(LAYERS, SLOTS, -1).view(np.uint8)
    expected = np.zeros((7, 16), np.uint8)
    for n in range(4):
        expected[n] = rows[at[n, 0], slots[n] - 1, 16 * at[n, 1] :][:16]
    found = looked.gather(slots)
    np.testing.assert_array_equal(found, expected)
    shadow, known = np.zeros((SLOTS + 1, 16), np.uint8), np.ones(SLOTS + 1, np.uint8)
    shadow[slots[:4]] = found[:4]
    assert looked.plainly_same(slots, shadow, known)
    shadow[7, 15] ^= 1
    assert not looked.plainly_same(slots, shadow, known)
    known[7] = 0
    assert looked.plainly_same(slots, shadow, known)


def floats(dtype: str) -> torch.Tensor:
    """Return every value of a type that is finite and not 0, as many as fill rows of all layers."""
    if dtype == "float32":
        values = torch.tensor([1.5, -2.0, 3.4e38, 1e-45, -1e-40, -3.4e38, 7.0, 8.0])
    else:
        width = torch.int16 if "16" in dtype else torch.uint8
        whole = torch.arange(-32768, 32768) if "16" in dtype else torch.arange(256)
        values = whole.to(width).view(getattr(torch, dtype))
        values = values[torch.isfinite(values.float()) & (values.float() != 0)]
    wanted = LAYERS * SLOTS * HEADS * DIM
    return values.repeat(math.ceil(wanted / len(values)))[:wanted].reshape(LAYERS, SLOTS, HEADS, DIM).clone()


@BACKENDS
@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_values_that_no_model_writes_are_found_in_their_layer(dtype: str, backend: str) -> None:
    values = floats(dtype)
    source = KvTensor(tensor=tuple(values), axes="slot head dim")
    looked, slots = read(source, backend=backend), np.arange(1, SLOTS)
    judged = np.full(slots.size, 2, np.uint8)
    for _ in range(1 + USUAL_ROWS // slots.size):
        counts, layers, _ = looked.values(slots, judged)
        assert not counts.any() and (layers == -1).all()
    values[1, 5, 1, 15] = values[2, 5, 0, 0] = math.nan
    if dtype != "float8_e4m3fn":
        values[2, 6, 0, 3] = -math.inf
    values[2, 7] = 0
    values[2, 7, 0, 1] = -0.0
    values[0, 8] = 0  # a group's first layer
    counts, layers, _ = looked.values(slots, judged)
    found = {(int(slots[n]), kind): (counts[n, kind], layers[n, kind]) for n, kind in np.argwhere(counts).tolist()}
    expected = {(5, NAN): (2, 1), (6, INFINITE): (1, 2), (7, ZEROS): (1, 2)}
    if dtype == "float8_e4m3fn":
        del expected[6, INFINITE]
    assert found == expected
    assert not looked.values(slots, judged)[0][:, ZEROS].any()  # the layer is known to have some now
    assert not looked.values(slots, np.zeros_like(judged))[0].any()


@BACKENDS
@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_rows_of_zeros_and_the_largest_value_are_found_in_types_of_8_bits(dtype: str, backend: str) -> None:
    values, largest = floats(dtype), torch.finfo(getattr(torch, dtype)).max
    looked = read(KvTensor(tensor=tuple(values), axes="slot head dim"), backend=backend)
    values[0, 4], values[0, 4, 0, 2] = largest, -largest
    values[1, 5], values[1:, 5, 1, 15] = 0, -largest  # of layer 2 one value is not all of them
    values[1, 6], values[1, 6, 0, 7] = largest, 1.0
    values[2, 7] = largest
    values[2, 7, 1, 3] = math.nan  # which says that alone
    slots = np.arange(1, SLOTS)
    counts, layers, _ = looked.values(slots, np.full(slots.size, 1, np.uint8))
    found = {int(slots[n]): (counts[n, SATURATED], layers[n, SATURATED]) for n in np.flatnonzero(counts[:, SATURATED])}
    assert found == ({4: (1, 0), 5: (1, 1)} if dtype in NARROW else {})
    assert not counts[:, ZEROS].any() and counts[6, NAN] == counts[:, NAN].sum() == 1


@BACKENDS
@pytest.mark.parametrize("dtype", sorted(NARROW))
@given(data=st.data())
@settings(max_examples=50)
def test_rows_of_8_bits_are_of_the_kinds_that_their_values_say(dtype: str, backend: str, data: st.DataObject) -> None:
    """As many pieces as there may be, of which a last one that is not whole is not looked at."""
    layers, slots, width = (data.draw(st.integers(least, most)) for least, most in ((1, 3), (0, 3), (2, 8)))
    largest = 0x7E if dtype == "float8_e4m3fn" else 0x7B
    usual = st.sampled_from([0, 0x80, largest, largest | 0x80])
    rows = np.zeros((layers, slots, 8 * width), np.uint8)
    for row in rows.reshape(-1, rows.shape[2]):
        row[:] = data.draw(st.sampled_from([0, 0x80, largest, largest | 0x80]))
        for at in data.draw(st.lists(st.integers(0, len(row) - 1), max_size=4)):
            row[at] = data.draw(usual | st.integers(0, 255))
    source = KvTensor(tensor=tuple(torch.from_numpy(rows).view(getattr(torch, dtype))), axes="slot value")
    held = source.kinds_of_floats(np.arange(slots), dtype)
    whole = torch.from_numpy(rows[:, :, : rows.shape[2] // 16 * 16].copy()).view(getattr(torch, dtype)).float()
    zeros, sizes = (whole == 0).all(2), whole.abs()
    ends = ((whole == 0) | (sizes == torch.finfo(getattr(torch, dtype)).max)).all(2) & ~zeros
    expected = torch.stack((whole.isnan().any(2), whole.isinf().any(2), zeros, ends)).permute(2, 0, 1).numpy()
    np.testing.assert_array_equal(held, expected)
    if not slots:
        return
    looked = read(source, backend=backend)
    looked._rows[:, 0] = USUAL_ROWS
    judged = np.full(slots, 2, np.uint8)
    told = looked.values(np.arange(slots), judged)
    there = read(source, backend=backend)
    there._rows[:, 0] = USUAL_ROWS
    found = there.values_found(held, judged)
    np.testing.assert_array_equal(told.counts, found.counts)
    np.testing.assert_array_equal(told.first, found.first)
    np.testing.assert_array_equal(looked._rows, there._rows)


@BACKENDS
def test_rows_of_zeros_say_nothing_of_a_layer_that_has_always_had_some(backend: str) -> None:
    values = torch.ones(LAYERS, SLOTS, HEADS, DIM)
    values[1, 3] = 0
    looked = read(KvTensor(tensor=tuple(values), axes="slot head dim"), backend=backend)
    slots = np.arange(SLOTS)
    values[2] = 0  # never written
    for _ in range(9):
        assert not looked.values(slots, np.full(SLOTS, 2, np.uint8))[0].any()


@pytest.mark.parametrize(
    "pool,axes",
    [
        (np.zeros((SLOTS, 10), np.uint8), "slot byte"),
        (np.zeros((16, SLOTS), np.uint8), "byte slot"),
        (np.zeros((SLOTS, 17), np.uint8)[:, 1:], "slot byte"),
    ],
    ids=["10 bytes", "slots innermost", "odd rows"],
)
def test_what_cannot_be_read_is_refused(pool, axes: str) -> None:
    source = KvTensor(tensor=(pool, pool), axes=axes)
    stream = KvTensor(tensor=(np.zeros((4, 32), np.uint8),) * 2, axes="slot byte")
    with pytest.raises(ValueError, match="cannot be looked at in turn"):
        KvLayers(source, stream.sampling_stream("K", layers=(0, 1), seed=1), slot_shift=0, backend="cpu")


@pytest.mark.parametrize("axes", LAYOUTS)
def test_what_lies_on_a_device_is_gathered_as_on_the_host(axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = RNG.integers(1, 99, (LAYERS, SLOTS, HEADS, DIM)).astype(np.float32)
    source = KvTensor(tensor=tuple(torch.from_numpy(LAYOUTS[axes](layer).copy()) for layer in tokens), axes=axes)
    slots = np.array([1, 24, 7, 7, 0, 25, -1, 12, 13])
    expected = read(source, backend="cpu", shift=1)
    monkeypatch.setattr(KvTensor, "on_device", True)
    looked = read(source, backend="cpu", shift=1)
    np.testing.assert_array_equal(looked.gather(slots), expected.gather(slots))
    assert not looked.plainly_same(slots, looked.gather(slots), np.ones(25, np.uint8))  # nobody has looked


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_what_lies_on_a_device_is_searched_as_on_the_host(
    dtype: str, axes: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = floats(dtype)
    pools = [layer.view(-1, BLOCK, HEADS, DIM) if "block" in axes else layer for layer in values]
    slot = axes.split().index("slot")
    source = KvTensor(tensor=tuple(pool.movedim(int("block" in axes), slot) for pool in pools), axes=axes)
    host = read(source, backend="cpu", shift=1)
    monkeypatch.setattr(KvTensor, "on_device", True)
    monkeypatch.setattr(kv_layers, "SEARCHED_BYTES", at_once)
    device = read(source, backend="cpu", shift=1)
    for step in range(8):
        slots, judged = RNG.integers(-2, SLOTS + 3, 12), RNG.integers(0, 3, 12).astype(np.uint8)
        if step > 5:
            values[RNG.integers(0, LAYERS), RNG.integers(0, SLOTS)] = [math.nan, 0.0][step % 2]
            values[RNG.integers(0, LAYERS), RNG.integers(0, SLOTS)] = torch.finfo(values.dtype).max
        told, found = host.values(slots, judged), device.values(slots, judged)
        np.testing.assert_array_equal(told.counts, found.counts)
        np.testing.assert_array_equal(told.first, found.first)
        if told.counts[:, ZEROS].any():
            np.testing.assert_array_equal(told.empty, found.empty)


def test_rows_that_a_device_has_found_are_counted_as_those_of_the_host() -> None:
    values = floats("bfloat16")
    source = KvTensor(tensor=tuple(values), axes="slot head dim")
    host, device = read(source, backend="cpu"), read(source, backend="cpu")
    for step in range(12):
        slots = RNG.integers(0, SLOTS, 9)
        judged = RNG.integers(0, 3, 9).astype(np.uint8)
        if step > 5:
            values[RNG.integers(0, LAYERS), RNG.integers(0, SLOTS)] = [math.nan, math.inf, 0.0][step % 3]
        rows = values[:, slots].float().reshape(LAYERS, slots.size, -1)
        kinds = rows.isnan().any(2), rows.isinf().any(2), (rows == 0).all(2)
        held = torch.stack((*kinds, torch.zeros_like(kinds[0]))).permute(2, 0, 1).numpy()
        told = host.values(slots, judged)
        found = device.values_found(held if held.any() else None, judged)
        np.testing.assert_array_equal(told.counts, found.counts)
        np.testing.assert_array_equal(told.first, found.first)
        if told.counts[:, ZEROS].any():
            np.testing.assert_array_equal(told.empty, found.empty)
