"""Lengths by machine code are those by Python, of any sized things; what has none is refused and nothing is kept."""

import gc
import random
import sys
from collections import deque

import pytest
from kvcanary.kernels.capture import builtin_calls
from kvcanary.kernels.capture.builtin_calls import lengths, lengths_by_python


@pytest.mark.parametrize("seed", range(5))
def test_lengths_are_those_that_python_says(seed):
    rng = random.Random(seed)
    kinds = (list, tuple, str, bytes, deque)
    for count in (0, 1, 7, 256):
        items = [rng.choice(kinds)(b"x" * rng.choice([0, 1, 40_000])) for _ in range(count)]
        assert lengths() is not lengths_by_python
        assert lengths()(items) == lengths_by_python(items)
        assert len(lengths()(items)) == 8 * count


class Odd:
    def __len__(self):
        raise ValueError("no length yet")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (([1, 2, 3],), TypeError),
        (([[1], Odd()],), ValueError),
        ((None,), SystemError),
        ((), SystemError),
        (([], []), SystemError),
    ],
)
def test_what_has_no_length_is_refused(given, error):
    with pytest.raises(error):
        lengths()(*given)


def test_nothing_is_kept_of_what_is_measured():
    things = [[], [1]]
    items = [things[0], things[1], things[0]]
    counts = [sys.getrefcount(thing) for thing in (*things, items)]
    for _ in range(1000):
        lengths()(items)
        with pytest.raises(ValueError, match="no length yet"):
            lengths()([*items, Odd()])
    gc.collect()
    assert [sys.getrefcount(thing) for thing in (*things, items)] == counts


def test_without_llvm_python_measures(monkeypatch):
    def no_llvm():
        raise RuntimeError("no target for this machine")

    monkeypatch.setattr(builtin_calls, "_lengths", no_llvm)
    lengths.cache_clear()
    try:
        assert lengths() is lengths_by_python
    finally:
        lengths.cache_clear()
