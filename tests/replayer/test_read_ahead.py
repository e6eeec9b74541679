"""Reading ahead gives what reading gives: items, errors, and an end whenever it is wanted."""

import threading
from collections.abc import Generator

import pytest
from kvcanary.replayer.read_ahead import ReadAhead


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
