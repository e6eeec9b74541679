"""Stretches of a buffer: inside it, apart from one another, and all of it free again in the end."""

import random
from collections import deque

import pytest
from kvcanary.recorder.capture.device.arena import Arena


@pytest.mark.parametrize("seed", range(20))
def test_stretches_lie_inside_and_apart(seed):
    rng = random.Random(seed)
    arena = Arena(rng.choice([1, 7, 64, 1000]))
    taken = deque()
    refused = 0
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            arena.give_back(*taken.popleft())
        words = rng.randint(0, arena.size if rng.random() < 0.1 else max(arena.size // 4, 1))
        place = arena.take(words)
        if place is None:
            refused += 1
            assert taken, "all is free"
            continue
        at = place % arena.size
        assert 0 <= at <= at + words <= arena.size
        for other, length in taken:
            start = other % arena.size
            assert at + words <= start or start + length <= at or not words or not length
        taken.append((place, words))
    assert refused
    while taken:
        arena.give_back(*taken.popleft())
    assert arena.take(arena.size) is not None
    assert arena.take(1) is None


def test_what_never_fits_is_refused():
    assert Arena(10).take(11) is None
