"""The hash of a slot of recurrent state: plain loops, compiled loops and the device's form, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.kernels.ops.state_hash.reference import MAX_PARTS, pool_words, state_hashes

M = (1 << 64) - 1


def s(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
    return x ^ (x >> 31)


def own(parts, slot):
    """The definition again, of Python's own integers."""
    total = 0
    for number, part in enumerate(parts):
        row = part[slot].tobytes()
        for w in range(0, len(row), 8):
            total += s(int.from_bytes(row[w : w + 8], "little") ^ s(w // 8 + 1 + (number << 32)))
    total &= M
    return (total - (1 << 64) if total >> 63 else total) or 1


@given(
    seed=st.integers(0, 2**32 - 1),
    num_slots=st.integers(1, 5),
    sizes=st.lists(st.one_of(st.integers(1, 40), st.sampled_from([512, 4088, 4096, 4103])), max_size=MAX_PARTS),
    apart=st.integers(0, 9),
    shift=st.integers(0, 9),
    stride=st.integers(1, 3),
    wanted=st.lists(st.one_of(st.integers(-2, 6), st.sampled_from([-(1 << 31), (1 << 31) - 1])), max_size=4),
    shorts=st.booleans(),
)
def test_all_forms_say_the_same(seed, num_slots, sizes, apart, shift, stride, wanted, shorts):
    rng = np.random.default_rng(seed)
    parts = []
    for size in sizes:
        memory = rng.integers(0, 256, shift + num_slots * (size + apart) + apart, dtype=np.uint8)
        memory[rng.random(memory.size) < rng.choice([0, 0.9, 1])] = 0
        tensor = torch.from_numpy(memory)[shift:].as_strided((num_slots, size), (size + apart, 1))
        parts.append(tensor)
    spaced = np.full(len(wanted) * stride + 1, 99, np.int32 if shorts else np.int64)
    slots = spaced[: len(wanted) * stride : stride]
    slots[:] = wanted
    arrays = [part.numpy() for part in parts]
    expected = [own(arrays, slot) if 0 <= slot < num_slots and parts else 0 for slot in wanted]
    longs = slots.astype(np.int64)
    for backend in ("reference", "cpu"):
        assert state_hashes(parts=arrays, num_slots=num_slots, slots=longs, backend=backend).tolist() == expected
    tensors = torch.from_numpy(spaced)[: len(wanted) * stride : stride]
    found = state_hashes(parts=parts, num_slots=num_slots, slots=tensors, backend="triton")
    assert found.tolist() == expected


def test_words_at_other_places_and_in_other_parts_are_others():
    row = np.zeros((1, 24), np.uint8)
    row[0, 0] = 7
    moved, zeros = np.roll(row, 8, axis=1), np.zeros((1, 24), np.uint8)
    hashes = [
        int(state_hashes(parts=parts, num_slots=1, slots=np.zeros(1, np.int64))[0])
        for parts in ([row, zeros], [moved, zeros], [zeros, row], [zeros, zeros], [zeros])
    ]
    assert len(set(hashes)) == 5


def test_a_state_that_the_device_cannot_find_is_refused():
    part = torch.zeros((2, 8), dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected at most 4"):
        pool_words([part] * 5, 2)
    with pytest.raises(ValueError, match="side by side"):
        pool_words([torch.zeros((2, 16), dtype=torch.uint8)[:, ::2]], 2)
