"""Room for the frames of forwards in flight: stretches of one buffer, taken and given back in the same order."""

from collections import deque


class Arena:
    """Hands out stretches of `size` words; one thread takes, another gives back, in order.

    Stretches never wrap around the end, so what is left there is skipped.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[tuple[int, int]] = deque()  # (start, words of the stretch)
        self._head = 0  # where the next stretch begins

    def take(self, words: int) -> int | None:
        """Return where a stretch of `words` begins, None where there is no room."""
        try:
            tail = self._taken[0][0]
        except IndexError:
            self._head = 0
            tail = -1
        if tail < 0:
            start = 0 if words <= self.size else None
        elif self._head > tail:
            start = self._head if self._head + words <= self.size else (0 if words < tail else None)
        else:
            start = self._head if self._head + words < tail else None
        if start is not None:
            self._taken.append((start, words))
            self._head = start + words
        return start

    def give_back(self) -> None:
        """Give back the oldest stretch."""
        self._taken.popleft()

    @property
    def in_use(self) -> int:
        """How many stretches are taken."""
        return len(self._taken)
