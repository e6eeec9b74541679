"""Overlap scheduling: forwards that were launched and not yet heard back from, and the tokens that wait on the device."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .batch import Batch

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A forward on its way: its number in the trace, its batch, which of its requests get a token, and the tokens.

    `samples` is `[len(batch.requests)] bool`, `tokens` `[samples.sum()] int64`; the host looks at them when it hears back.
    """

    forward: int
    batch: Batch
    samples: BoolArray
    tokens: Int64Array

    @property
    def sampled_lens(self) -> Int64Array:
        """How many tokens each row of the batch got, padding included."""
        return np.append(self.samples, np.zeros(self.batch.rows.size - self.samples.size, np.bool_)).astype(np.int64)


class FutureMap:
    """A ring on the device that holds sampled tokens until the forwards after them have read them.

    `size` must be as many as the forwards in flight can sample together; a smaller ring is overrun in silence, and a
    request is fed another one's token.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._tokens = np.zeros(size, np.int32)
        self._next = 0

    def store(self, tokens: Int64Array) -> list[int]:
        """Keep tokens, and return where each of them lies."""
        places = (self._next + np.arange(tokens.size)) % self.size
        self._tokens[places] = tokens
        self._next = (self._next + tokens.size) % self.size
        return [int(place) for place in places]

    def read(self, place: int) -> npt.NDArray[np.int32]:
        """Return the token at a place, `[1] int32`."""
        return self._tokens[place : place + 1].copy()


class InFlight:
    """The forwards in flight, oldest first; each of their requests counts them."""

    def __init__(self) -> None:
        self._launched: deque[Launched] = deque()

    def __len__(self) -> int:
        return len(self._launched)

    def push(self, launched: Launched) -> None:
        """Take a forward that was just launched."""
        self._launched.append(launched)
        for request in launched.batch.requests:
            request.in_flight += 1

    def pop(self) -> Launched:
        """Return the oldest one, which the host hears back from now."""
        launched = self._launched.popleft()
        for request in launched.batch.requests:
            request.in_flight -= 1
        return launched
