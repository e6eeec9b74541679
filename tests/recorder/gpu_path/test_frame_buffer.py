"""Stretches of a buffer: inside it, apart from one another, and all of it free again in the end."""

import random
from collections import deque

import pytest
from kvcanary.recorder.capture.device.capture import FrameBuffer


@pytest.mark.parametrize("seed", range(20))
def test_stretches_lie_inside_and_apart(seed):
    rng = random.Random(seed)
    buffer = FrameBuffer(rng.choice([1, 7, 64, 1000]))
    taken = deque()
    refused = 0
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            buffer.give_back(*taken.popleft())
        words = rng.randint(0, buffer.size if rng.random() < 0.1 else max(buffer.size // 4, 1))
        place = buffer.take(words)
        if place is None:
            refused += 1
            assert taken, "all is free"
            continue
        at = place % buffer.size
        assert 0 <= at <= at + words <= buffer.size
        for other, length in taken:
            start = other % buffer.size
            assert at + words <= start or start + length <= at or not words or not length
        taken.append((place, words))
    assert refused
    while taken:
        buffer.give_back(*taken.popleft())
    assert buffer.take(buffer.size) is not None
    assert buffer.take(1) is None


def test_what_never_fits_is_refused():
    assert FrameBuffer(10).take(11) is None
