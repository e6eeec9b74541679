"""Reading ahead gives what reading gives: items, errors, and an end whenever it is wanted."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from random import Random
from types import FrameType

import pytest
from kvcanary.replayer.run.streams import ReadAhead


class Source:
    """Numbers up to `count`, then perhaps an error; knows how many it gave and whether it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.given = 0
        self.closed = threading.Event()
        self.count = count
        self.error = error

    def stream(self) -> Generator[int, None, None]:
        try:
            for number in range(self.count):
                self.given += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed.set()


def test_items_come_in_order_and_end_once() -> None:
    ahead = ReadAhead(Source(1000).stream())
    assert list(ahead) == list(range(1000))
    assert next(ahead, None) is None
    ahead.close()


def test_an_error_is_raised_behind_the_items_before_it() -> None:
    ahead = ReadAhead(Source(3, KeyError("torn")).stream())
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="torn"):
        next(ahead)
    assert next(ahead, None) is None


def test_no_more_is_read_than_a_little_ahead_and_close_ends_it() -> None:
    source = Source(1000)
    ahead = ReadAhead(source.stream())
    assert next(ahead) == 0
    ahead.close()
    assert source.closed.is_set()
    assert source.given <= 4
    assert next(ahead, None) is None


def test_closed_before_it_began() -> None:
    source = Source(3)
    ahead = ReadAhead(source.stream())
    ahead.close()
    assert source.given == 0
    assert list(ahead) == []


def test_it_closes_wherever_an_interrupt_struck() -> None:
    """An interrupt between two lines of `queue.Queue.get` left its other side asleep for ever, about once in a hundred."""

    def raising(error: type[BaseException]) -> Callable[[int, FrameType | None], None]:
        def handler(_: int, __: FrameType | None) -> None:
            raise error

        return handler

    before = signal.getsignal(signal.SIGALRM)
    random = Random(1)
    try:
        for _ in range(400):
            ahead = ReadAhead(number for number in range(1 << 20))
            signal.signal(signal.SIGALRM, raising(KeyboardInterrupt))
            with suppress(KeyboardInterrupt):
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(20e-6, 400e-6))
                    for _ in ahead:
                        pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, raising(TimeoutError))
            signal.setitimer(signal.ITIMER_REAL, 30)
            ahead.close()
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
