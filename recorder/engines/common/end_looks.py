"""Hashes of what lay at the ends of copies when somebody looked: there at once, or once a device has added them up."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.ops.end_hash.reference import mixed
from ...capture.device.host_copy import HostCopy


class Look(Protocol):
    """Hashes of what lay somewhere when it was looked at, `[n]`, 0 for what was not read."""

    def read(self) -> Int64Array:
        """Return them; of a device by the recorder's thread, which may wait for them."""

    def of(self, kept: Sequence[int]) -> "Look":
        """Return some of them."""


class Known(NamedTuple):
    """Hashes that are there already."""

    values: Int64Array

    def read(self) -> Int64Array:
        """Return them."""
        return self.values

    def of(self, kept: Sequence[int]) -> Look:
        """Return some of them."""
        return Known(self.values[list(kept)])


class Sums:
    """Hashes of `n` pages that a device adds up: `parts` are places among them and their two sums."""

    def __init__(self, n: int, parts: list[tuple[list[int], HostCopy]]) -> None:
        self._parts = parts
        self._values = np.zeros(n, np.int64)

    def read(self) -> Int64Array:
        """Return them; waits until they are there."""
        parts, self._parts = self._parts, []
        for at, sums in parts:
            self._values[at] = mixed(*sums.read().reshape(2, -1))
        return self._values

    def of(self, kept: Sequence[int]) -> Look:
        """Return some of them."""
        return Some(self, tuple(kept))


class Some(NamedTuple):
    """Some of the hashes of a look."""

    look: Look
    kept: tuple[int, ...]

    def read(self) -> Int64Array:
        """Return them."""
        return self.look.read()[list(self.kept)]

    def of(self, kept: Sequence[int]) -> Look:
        """Return some of them."""
        return Some(self.look, tuple(self.kept[i] for i in kept))
