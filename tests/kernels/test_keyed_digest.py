"""Keyed digests: the published test vector, both backends, and an own plain computation of the same function."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.kernels.keyed_digest import keyed_digests

MASK = (1 << 64) - 1
KEY = bytes(range(16))


def siphash_128(key: bytes, data: bytes) -> bytes:
    """SipHash-2-4-128 from its paper, in Python's integers."""
    k0, k1 = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rotate(x, n):
        return ((x << n) | (x >> (64 - n))) & MASK

    def rounds(count):
        for _ in range(count):
            v[0] = (v[0] + v[1]) & MASK
            v[2] = (v[2] + v[3]) & MASK
            v[1], v[3] = rotate(v[1], 13) ^ v[0], rotate(v[3], 16) ^ v[2]
            v[0] = rotate(v[0], 32)
            v[2] = (v[2] + v[1]) & MASK
            v[0] = (v[0] + v[3]) & MASK
            v[1], v[3] = rotate(v[1], 17) ^ v[2], rotate(v[3], 21) ^ v[0]
            v[2] = rotate(v[2], 32)

    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 0xFF])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return (first | (v[0] ^ v[1] ^ v[2] ^ v[3]) << 64).to_bytes(16, "little")


def test_the_published_vector():
    found = keyed_digests(rows=np.zeros((1, 0), np.uint8), key=KEY)
    assert found.tobytes().hex() == "a3817f04ba25a8e66df67214c7550293"
    assert siphash_128(KEY, b"").hex() == "a3817f04ba25a8e66df67214c7550293"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@given(data=st.data())
def test_rows(backend, data):
    width = 8 * data.draw(st.integers(0, 40))
    rows = [data.draw(st.binary(min_size=width, max_size=width)) for _ in range(data.draw(st.integers(0, 4)))]
    key = data.draw(st.binary(min_size=16, max_size=16))
    array = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), width)
    found = keyed_digests(rows=array, key=key, backend=backend)
    assert [row.tobytes() for row in found] == [siphash_128(key, row) for row in rows]


def test_other_shapes_are_refused():
    for rows, key in [
        (np.zeros((1, 9), np.uint8), KEY),
        (np.zeros(8, np.uint8), KEY),
        (np.zeros((1, 8), np.uint8), b""),
    ]:
        with pytest.raises(ValueError, match="expected"):
            keyed_digests(rows=rows, key=key)
