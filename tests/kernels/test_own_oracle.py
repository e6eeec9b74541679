"""Oracles by their names: the hash oracle, one's own, and what is none."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from kvcanary import HashOracle
from kvcanary.kernels.ops.oracle.own import load_oracle
from kvcanary.kernels.ops.oracle.reference import oracle_tokens


class Counting:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def next_token(self, seed: int, position: int) -> int:
        return seed + position


def test_the_hash_oracle_is_the_ops() -> None:
    seeds, positions = np.array([5, -7, 1 << 62], np.int64), np.array([0, 9, 4097], np.int64)
    expected = np.empty(3, np.int64)
    oracle_tokens(request_ids=seeds, positions=positions, vocab_size=97, out=expected)
    assert load_oracle("hash", 97)(seeds, positions).tolist() == expected.tolist()
    one = HashOracle(97)
    assert [one.next_token(s, p) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)] == expected.tolist()
    assert one.next_token((1 << 64) - 7, 9) == expected[1]  # the same seed, unsigned


def test_ones_own_is_asked_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_oracles", SimpleNamespace(Counting=Counting))
    tokens = load_oracle("own_oracles:Counting", 100)
    assert tokens(np.array([3, 4]), np.array([10, 20])).tolist() == [13, 24]
    with pytest.raises(ValueError, match="says token 104, expected 0 to 99"):
        tokens(np.array([3, 4]), np.array([10, 100]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hashes", "expected hash, or module:name"),
        ("no_such_module_here:Own", "cannot be used: No module named"),
        ("math:nothing", "cannot be used: module 'math' has no attribute"),
        ("math:pi", "'float' object is not callable"),
        ("math:sqrt", "gives a float, expected a method next_token"),
    ],
)
def test_what_is_none_is_named(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_oracle(name, 100)


def test_a_vocabulary_that_is_none() -> None:
    with pytest.raises(ValueError, match="vocab_size is 0"):
        HashOracle(0)
