"""The hash of what lies at one end of a copy: the definition again, arrays and the device's form, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcanary.kernels.ops.end_hash.reference import MOST_WORDS, end_hashes, end_sums, looked_at, mixed, part_words

M = (1 << 64) - 1


def own(parts, page):
    """The definition again, of Python's own integers."""
    ordered = plain = k = 0
    for part in parts:
        row = part[page].tobytes()
        width = 4 if len(row) % 4 == 0 else 1
        for at in range(0, len(row), width):
            m = (int.from_bytes(row[at : at + width], "little") + 1) * 0x9E3779B97F4A7C15 & M
            m ^= m >> 29
            ordered, plain, k = ordered + m * (2 * k + 1) & M, plain + m & M, k + 1
    found = ((ordered ^ ordered >> 32) << 32 & M | plain & 0xFFFFFFFF) or 1
    return found - (1 << 64) if found >> 63 else found


@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 41), min_size=1, max_size=4), n=st.integers(0, 4))
def test_arrays_say_what_the_definition_does(seed, sizes, n):
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, 256, (n, size), dtype=np.uint8) for size in sizes]
    assert end_hashes(parts).tolist() == [own(parts, page) for page in range(n)]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.sampled_from([1, 2, 15, 16, 17, 1023, 1024, 1025, 1100, 5000]), min_size=1, max_size=3),
    apart=st.integers(0, 3),
    num_rows=st.integers(1, 4),
    each=st.integers(1, 3),
    data=st.data(),
)
def test_the_device_says_the_same_of_what_it_looks_at(seed, sizes, apart, num_rows, each, data):
    from kvcanary.kernels.ops.end_hash import triton

    rng = np.random.default_rng(seed)
    wanted = data.draw(st.lists(st.tuples(st.integers(0, num_rows - 1), st.integers(0, each - 1)), max_size=6))
    parts = []
    for words in sizes:
        width = 4 * (each * words + apart)
        memory = torch.from_numpy(rng.integers(0, 256, num_rows * width, dtype=np.uint8))
        parts.append(memory.as_strided((num_rows, 4 * each * words), (width, 1)))
    pages = torch.tensor(wanted, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    found = triton.end_sums(torch.tensor(part_words(parts, each=each)), pages).numpy()
    seen = []
    for part, words in zip(parts, sizes, strict=True):
        whole = part.contiguous().numpy().view("<u4").reshape(num_rows, each, words)
        rows = [whole[row, place, looked_at(words)] for row, place in wanted]
        seen.append(np.array(rows, "<u4").reshape(len(wanted), len(looked_at(words))).view(np.uint8))
    assert found.tolist() == end_sums(seen).tolist()
    assert mixed(*found.sum(axis=2)).tolist() == end_hashes(seen).tolist()


def test_words_lie_evenly_apart_and_all_are_looked_at_if_there_are_few():
    assert looked_at(MOST_WORDS).tolist() == list(range(MOST_WORDS))
    places = looked_at(10 * MOST_WORDS + 3)
    assert len(places) == MOST_WORDS and (np.diff(places) > 0).all() and places[-1] > 9 * MOST_WORDS


@pytest.mark.parametrize(
    "wrong", [torch.zeros((2, 6)), torch.zeros((2, 6), dtype=torch.uint8), torch.zeros((6, 8), dtype=torch.uint8).T]
)
def test_pages_that_are_no_words_are_refused(wrong):
    with pytest.raises(ValueError, match="expected words of 4 bytes side by side"):
        part_words([wrong])
